"""Starts Ray on this machine: says what it waits for, notices a process of Ray that died, and tries once more.

``ray.init`` starts the processes and then waits, in one call that no signal interrupts, for the raylet to register. A
raylet that died meanwhile (on a busy machine its helpers may not start in the time that it gives them) is waited for
like one that is slow. So this module waits in its place.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import psutil

from relax_cli.cluster.kill_cleanup import KillCleanUp

START_DEADLINE_S = 300.0
"""How long the raylet may take: a busy laptop with a cold disk needs minutes for the imports of Ray's processes."""
REMIND_S = 30.0
VITAL = ("gcs_server", "raylet")
"""Processes that Ray cannot do without, as the system names them."""


class RayStartError(RuntimeError):
    """Ray did not start here; the message says why and what to do."""


class _Died(Exception):
    """A vital process ended while Ray started. No RuntimeError: that one ``ray.init`` takes for "not yet"."""


def start_local(ray: Any, note: Callable[[str], None], clean_up: KillCleanUp | None = None, **options: Any) -> None:
    """``ray.init`` for a Ray of this run alone.

    Args:
        note: takes a line for the user.
        clean_up: is told of Ray's processes and folder, for the case that this process is killed.
        options: of ``ray.init``.

    Raises:
        RayStartError: it failed twice, or took longer than :data:`START_DEADLINE_S`.
    """
    for attempt in (1, 2):
        before = set(psutil.Process().children())
        try:
            with _waiting_aloud(note), _registration_watched(before), _started_apart(clean_up):
                # Without an address Ray would join any cluster that runs, or once ran, on this machine.
                ray.init(address="local", **options)
            return
        except Exception as error:
            ray.shutdown()
            end_new_processes(before)
            reason = str(error).strip() or repr(error)
            if attempt == 2 or isinstance(error, TimeoutError):
                raise RayStartError(
                    f"Ray did not start on this machine: {reason}. Its logs are in {_logs()}. The usual causes are a "
                    "machine too busy or too short of memory for Ray's own processes, or a full disk under /tmp: make "
                    "room and start again, or start Ray yourself (`ray start --head`) and join it with --ray-address."
                ) from error
            note(f"Ray did not start ({reason}; logs in {_logs()}): trying once more")


@contextlib.contextmanager
def _waiting_aloud(note: Callable[[str], None]) -> Iterator[None]:
    """Says every :data:`REMIND_S` that Ray is still starting. From a thread: the start itself is one call."""
    done, start = threading.Event(), time.monotonic()

    def remind() -> None:
        while not done.wait(REMIND_S):
            note(f"waiting for Ray to start on this machine ({time.monotonic() - start:.0f} s; logs in {_logs()})")

    thread = threading.Thread(target=remind, name="ray-start", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


@contextlib.contextmanager
def _registration_watched(before: set[psutil.Process]) -> Iterator[None]:
    """Inside, ``ray.init`` asks for its node only once that has registered; until then the wait is ours.

    Args:
        before: children of this process that are not Ray's.
    """
    from ray._private import services
    from ray._raylet import GcsClient  # type: ignore[attr-defined]  # compiled
    from ray.exceptions import RpcError

    get_node, give_up = services.get_node, time.monotonic() + START_DEADLINE_S

    def wait_and_get(gcs_address: str, node_id: str) -> Any:
        client = None
        while True:
            for process in set(psutil.Process().children()) - before:
                if _is_dead(process):
                    raise _Died(f"its process {process.name()} ended while it started")
            # A GCS without processor time for an answer is slow, not dead: that one the loop above notices.
            with contextlib.suppress(RpcError):
                client = client or GcsClient(address=gcs_address)
                if node_id in {node.hex() for node in client.get_all_node_info(timeout=10)}:
                    return get_node(gcs_address, node_id)
            if time.monotonic() > give_up:
                raise TimeoutError(f"the raylet did not register within {START_DEADLINE_S:.0f} s")
            time.sleep(0.2)

    services.get_node = wait_and_get
    try:
        yield
    finally:
        services.get_node = get_node


@contextlib.contextmanager
def _started_apart(clean_up: KillCleanUp | None) -> Iterator[None]:
    """Inside, Ray's processes are started outside the process group of this one, and whoever cleans up hears of them.

    A batch system or ``timeout`` signals the whole group. The run finishes its step then and saves it, which it cannot
    without Ray. When this process ends, the kernel ends Ray's, whatever their group.
    """
    from ray._private import services

    popen = services.ConsolePopen

    class Apart(popen):  # type: ignore[misc, valid-type]
        def __init__(self, words: Sequence[str], *rest: Any, **options: Any) -> None:
            if clean_up is not None:
                clean_up.starts(words)
                options["env"] = {**(options.get("env") or os.environ), **clean_up.environment}
            super().__init__(words, *rest, **{"process_group": 0, **options})

    services.ConsolePopen = Apart  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        services.ConsolePopen = popen  # type: ignore[misc]


def _is_dead(process: psutil.Process) -> bool:
    try:
        return process.name() in VITAL and process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False  # whoever reaped it knows


def end_new_processes(before: Collection[psutil.Process]) -> None:
    """Ends what a failed start has left, so that the next one finds the machine as it was.

    Args:
        before: children of this process that are not Ray's.
    """
    processes = _new_processes(before)
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=10)


def _new_processes(before: Collection[psutil.Process]) -> set[psutil.Process]:
    """Children that are not in ``before``, and all below them; what the others have started is not Ray's."""
    found = set(psutil.Process().children()) - set(before)
    for child in list(found):
        with contextlib.suppress(psutil.NoSuchProcess):
            found |= set(child.children(recursive=True))
    return found


def _logs() -> str:
    """Folder of the logs of the Ray that was started last."""
    from ray._common.utils import get_default_ray_temp_dir

    return os.path.realpath(os.path.join(get_default_ray_temp_dir(), "session_latest", "logs"))
