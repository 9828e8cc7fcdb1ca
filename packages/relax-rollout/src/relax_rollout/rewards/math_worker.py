"""The worker process of ``--rm-type math``: ``python -m relax_rollout.rewards.math_worker``.

Reads lines ``{"response", "label", "cpu_limit_s"}`` from stdin, answers each with one line ``{"reward"}`` or
``{"error"}``, and ends when stdin does.
"""

import functools
import json
import os
import resource
import sys
import traceback
from typing import Any

MEMORY_LIMIT = 8 << 30
"""Bytes of address space: a response may ask for a number that fills the machine."""


def main() -> None:
    """Answers one request a line on standard input, until it ends."""
    # math-verify and sympy may print: the answers keep stdout for themselves.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def answer(value: dict[str, Any]) -> None:
        print(json.dumps(value), file=answers)

    try:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, resource.getrlimit(resource.RLIMIT_AS)[1]))
        import math_verify  # noqa: F401 - its import takes seconds; before the first time limit starts
    except Exception:
        answer({"error": traceback.format_exc()})
        return
    answer({"ready": True})
    for line in sys.stdin:
        request = json.loads(line)
        _limit_cpu(request["cpu_limit_s"])
        try:
            answer({"reward": compare(request["response"], request["label"])})
        except Exception:
            answer({"error": traceback.format_exc()})


def _limit_cpu(seconds: float) -> None:
    """Lets the kernel end this process (SIGXCPU) if nobody is left to kill it while it computes."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime + seconds) + 30, hard))


@functools.lru_cache(maxsize=256)
def gold(label: str) -> list[Any]:
    """The label as math-verify's expressions: as it stands if it is marked as LaTeX, else also read as LaTeX."""
    from math_verify import parse

    found = parse(label, parsing_timeout=None)
    if not found or ("$" not in label and "\\boxed" not in label and "\\" in label):
        found = parse(f"${label}$", parsing_timeout=None) or found
    return list(found)


def compare(response: str, label: str) -> float:
    """1.0 when the answer in ``response`` equals ``label`` (the last boxed expression, else the last formula).

    Time is limited from outside, so math-verify's own alarms are off.

    Raises:
        ValueError: the label is no mathematical expression.
    """
    from math_verify import parse, verify

    expected = gold(label)
    if not expected:
        raise ValueError(
            f"the label {label!r} is no mathematical expression; use --rm-type exact-match or correct the row"
        )
    found = parse(response, parsing_timeout=None)
    return float(bool(found) and verify(expected, found, timeout_seconds=None))


if __name__ == "__main__":
    main()
