"""Starts a local Ray or joins one.

Ray is imported inside the functions: ``relax train --help`` must not pay for it.
"""

import atexit
import contextlib
import logging
import os
import re
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from relax_cli.cluster.kill_cleanup import KillCleanUp, move_logs, remove_session
from relax_cli.cluster.local_ray import START_DEADLINE_S, VITAL, end_new_processes, start_local
from relax_cli.cluster.nodes import NodeLost, RunNodes
from relax_cli.cluster.ray_watch import (
    ASK_EVERY_S,
    JoinedCluster,
    LocalProcesses,
    RayLost,
    adopt_orphans,
    end_local,
    watched,
)
from relax_cli.cluster.waits import StopFlag, StopRequested

log = logging.getLogger(__name__)

KNOCK_S = 5.0
"""How long a cluster that is named by host and port may take to accept a connection."""
_HOST_AND_PORT = re.compile(r"(?P<host>[^/]+):(?P<port>\d{1,5})")


@contextlib.contextmanager
def connected(
    address: str | None,
    *,
    min_cpus: int,
    note: Callable[[str], None] = log.warning,
    stop: StopFlag | None = None,
    tell: Callable[[RayLost], None] | None = None,
    logs: Path | None = None,
    remove: Path | None = None,
) -> Iterator[RunNodes]:
    """Surrounds the run with a Ray connection; a local Ray ends with it, a joined cluster goes on.

    Gives the nodes of the run, which are looked after once they are known there.

    Args:
        address: ``--ray-address``; None starts Ray here.
        min_cpus: logical CPUs a local Ray must offer. They only steer placement: the processes of a colocate run take
            turns, so more of them than cores is fine.
        note: takes lines for the user while Ray starts.
        stop: is told when Ray is lost (:class:`relax_cli.cluster.ray_watch.RayLost`).
        tell: says to the user that Ray is lost, from a thread; by default ``note`` does.
        logs: folder that the logs of a local Ray are moved to after a failure; None leaves them where Ray has them.
        remove: file that is removed when this process is killed while a local Ray runs, beside what is Ray's.

    Raises:
        RayStartError: Ray did not start on this machine.
        ValueError: no cluster answers at ``address``.
        SystemExit: SIGINT or SIGTERM came while it connected; the code is its number.
    """
    _set_environment(address)
    stop = stop or StopFlag()
    clearing = contextlib.nullcontext() if address is not None else KillCleanUp(logs, remove)
    with clearing as clean_up, contextlib.ExitStack() as stack:
        before = psutil.Process().children()
        with _ending_at_once():
            stack.enter_context(_messages_logged())
            import ray

            there_before = _session_folder(ray)
            try:
                with _without_crash_handler():
                    _connect(ray, address, min_cpus, note, clean_up)
            except BaseException as error:
                ray.shutdown()
                if isinstance(error, SystemExit) and clean_up is not None:  # nobody will want the logs of that Ray
                    end_new_processes(before)
                    for folder in clean_up.sessions:
                        remove_session(folder)
                raise
        session = _session_folder(ray) if address is None else None
        if session == there_before:  # whoever started that Ray ends it
            session = None
        failed, nodes = True, RunNodes()
        try:
            watch = _watched(session, before, address, stop, tell or (lambda lost: note(str(lost))), nodes)
            with watch:
                yield nodes
            failed = False
        except StopRequested:
            failed = False
            raise
        finally:
            _disconnect(ray, stop, before, local=session is not None, failed=failed)
            # Of a run that failed Ray's own logs stay: they may be what explains it.
            if session is not None and failed and logs is not None:
                move_logs(session / "logs", logs)
            if session is not None and (not failed or logs is not None):
                remove_session(session)


@contextlib.contextmanager
def _without_crash_handler() -> Iterator[None]:
    """Inside, Ray puts no handler of its own into this process that writes the stack of its library, for SIGTERM too.

    That one would print it to the terminal of a run that is told to stop, and end it by SIGABRT. Workers have it.
    """
    from ray._private import ray_constants

    before = ray_constants.RAY_DISABLE_FAILURE_SIGNAL_HANDLER  # of the environment when Ray was imported
    ray_constants.RAY_DISABLE_FAILURE_SIGNAL_HANDLER = True
    try:
        yield
    finally:
        ray_constants.RAY_DISABLE_FAILURE_SIGNAL_HANDLER = before


@contextlib.contextmanager
def _messages_logged() -> Iterator[None]:
    """Inside, what Ray tells the driver of its processes goes to the log, and not between the lines for the user.

    Whoever waits for one of them hears of its end anyway, and says it in words of ours.
    """
    from ray._private import worker

    tell = worker.print_to_stdstream

    def to_log(data: Mapping[str, Any], ignore_prefix: bool) -> None:
        for line in data["lines"]:
            log.info("Ray: %s", line)

    worker.print_to_stdstream = to_log
    try:
        yield
    finally:
        worker.print_to_stdstream = tell


def _set_environment(address: str | None) -> None:
    """Sets what Ray reads from the environment, of this process and of those that it starts."""
    # Ray's uv hook would ship the project to the workers and start each of them through `uv run` again.
    os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
    # Where images switch byte code off, each of the processes of a run would compile torch's 900 modules for itself.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    # Ray listens on every interface by default; with this a local Ray stays on 127.0.0.1 (works on Linux, whatever
    # its name says).
    if address is None:
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        # A driver that cannot reach its raylet ends without a word when this process is dead: so let it be the driver.
        os.environ.setdefault("RAY_RAYLET_PID", str(os.getpid()))
        if "ray" not in sys.modules:  # it reads the token once
            # Ray would write one token for all times into the home folder, where the umask may let others read it.
            os.environ["RAY_AUTH_MODE"], os.environ["RAY_AUTH_TOKEN"] = "token", secrets.token_hex(32)
    elif _has_ray_token():
        # `ray start` asks for the token where there is one, but a driver with an explicit address would not send it.
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Ray gives its own processes 60 s to start, which a busy laptop with a cold disk needs for their imports alone.
    os.environ.setdefault("RAY_raylet_start_wait_time_s", f"{START_DEADLINE_S:.0f}")
    # A local Ray authenticates with a token of its own accord; it need not say so at every start.
    logging.getLogger("ray._private.authentication.authentication_token_setup").setLevel(logging.ERROR)


def _watched(
    session: Path | None,
    before: Collection[psutil.Process],
    address: str | None,
    stop: StopFlag,
    tell: Callable[[RayLost], None],
    nodes: RunNodes,
) -> contextlib.AbstractContextManager[None]:
    """Looks after Ray's own processes and, in a cluster, the nodes of the run.

    Nobody does for a local Ray that somebody else has started in this process.
    """

    def end(lost: RayLost) -> None:
        if session is not None:
            end_local(before)
        os._exit(1)

    if session is not None:
        adopt_orphans()
        vital = [p for p in psutil.Process().children() if p not in before and p.name() in VITAL]
        return watched(LocalProcesses(vital, session / "logs").look, stop, tell, end)
    if address is None:
        return contextlib.nullcontext()
    cluster = JoinedCluster()

    def look() -> RayLost | None:
        return cluster.look() or (nodes.look() if cluster.answers else None)

    return watched(look, stop, tell, end, ASK_EVERY_S, lambda: nodes.doubtful)


def _disconnect(ray: Any, stop: StopFlag, before: Collection[psutil.Process], *, local: bool, failed: bool) -> None:
    """Leaves Ray, and ends it where it is ours."""
    if stop.broken is None or isinstance(stop.broken, NodeLost):
        ray.shutdown()
    else:
        # It would wait for whoever is gone, or crash: now, and when Python ends.
        atexit.register(_leave, int(failed) if stop.signal_number is None else 128 + stop.signal_number)
        if local:
            end_local(before)
    if local:
        adopt_orphans(False)


def _leave(code: int) -> None:
    """Ends the process without what Ray would do in its end."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _session_folder(ray: Any) -> Path | None:
    """Folder of the logs and sockets of a local Ray."""
    node = ray._private.worker._global_node
    return None if node is None else Path(node.get_session_dir_path())


@contextlib.contextmanager
def _ending_at_once() -> Iterator[None]:
    """Inside, SIGINT and SIGTERM also raise SystemExit with their number; afterwards the handlers are what they were.

    ``ray.init`` can wait for minutes; and the handler for SIGTERM that it puts in the place of the caller's, which does
    just that, would stay there.
    """
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def end(number: int, frame: FrameType | None) -> None:
        handler = handlers[signal.Signals(number)]
        if callable(handler):
            handler(number, frame)
        sys.exit(number)

    for number in handlers:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _connect(
    ray: Any, address: str | None, min_cpus: int, note: Callable[[str], None], clean_up: KillCleanUp | None
) -> None:
    common: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": False}
    if address is None:
        start_local(
            ray,
            note,
            clean_up,
            include_dashboard=False,
            num_cpus=max(min_cpus, os.cpu_count() or 1),
            object_store_memory=_object_store_bytes(),
            **common,
        )
        return
    try:
        _knock(address)
        ray.init(address=address, **common)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ValueError(
            f"--ray-address {address}: no Ray cluster answers there ({error}). Start one with `ray start --head`, or "
            "leave the flag out to run on this machine alone. If there is one, give this machine its token "
            "(RAY_AUTH_TOKEN, or ~/.ray/auth_token)."
        ) from error


def _knock(address: str) -> None:
    """Returns when something listens at an address of the form ``host:port``, and at once for any other.

    Where nothing does, Ray would wait for minutes, in code that no signal interrupts.

    Raises:
        ConnectionError: nothing has accepted a connection for :data:`KNOCK_S`.
    """
    found = _HOST_AND_PORT.fullmatch(address)
    if found is None:
        return
    place, end = (found["host"].strip("[]"), int(found["port"])), time.monotonic() + KNOCK_S
    while True:
        try:
            socket.create_connection(place, timeout=max(0.1, end - time.monotonic())).close()
            return
        except (OSError, OverflowError) as error:  # a number that is no port overflows
            if time.monotonic() + 1.0 > end or isinstance(error, OverflowError):
                raise ConnectionError(str(error)) from error
        time.sleep(1.0)


def _has_ray_token() -> bool:
    """Whether this user has a token of Ray's authentication."""
    if os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH"):
        return True
    return os.path.isfile(os.path.expanduser("~/.ray/auth_token"))


def _object_store_bytes() -> int:
    """A tenth of the free shared memory, between 128 MiB and 8 GiB: batches are the largest objects we store."""
    stats = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else os.statvfs("/tmp")
    free = stats.f_bavail * stats.f_frsize
    return int(min(max(free // 10, 128 << 20), 8 << 30))


def cluster_gpus() -> int:
    """GPUs that the connected cluster has in all."""
    import ray

    return int(ray.cluster_resources().get("GPU", 0))
