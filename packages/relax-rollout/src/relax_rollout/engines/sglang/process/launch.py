"""Starts SGLang's server in this process, with two doors shut that its command line leaves open.

    python -m relax_rollout.engines.sglang.process.launch ARGUMENTS OF SGLANG'S SERVER < KEY

- The first line of standard input is a key; without it as a bearer token the server answers ``/health`` alone (and
  ``/metrics``, where that is switched on). It is added to SGLang's web application and not to its settings, so that
  it is in no command line, no log and no answer of the server.
- The ranks of the engine meet by a file in the temporary folder. By default the first one opens a store that listens
  on every interface of the machine and asks for no key.
"""

import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

MEETING = "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"
"""Environment variable of SGLang: how its ranks find each other."""


def main(words: Sequence[str], key: str) -> None:
    """Runs the server until it ends.

    Args:
        words: SGLang's command line.
        key: that every request has to carry.

    Raises:
        ValueError: the key is empty.
    """
    if not key:
        raise ValueError("the first line of standard input has to be the key of the server, and it is empty")
    os.environ.setdefault(MEETING, Path(tempfile.gettempdir(), "ranks").as_uri())
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins

    load_plugins()  # before the arguments are read, as SGLang's own entry point does
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    settings = prepare_server_args(list(words))
    from sglang.srt.entrypoints.http_server import app
    from sglang.srt.utils.auth import add_api_key_middleware

    add_api_key_middleware(app, api_key=key, admin_api_key=None)
    if settings.device == "cpu":
        from relax_rollout.engines.sglang import cpu

        cpu.fork_processes()
    try:
        run_server(settings)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main(sys.argv[1:], sys.stdin.readline().strip())
