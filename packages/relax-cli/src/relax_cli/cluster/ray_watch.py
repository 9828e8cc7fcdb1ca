"""Notices that a process is gone without which Ray cannot go on, and says so before Ray ends the driver without a word.

A driver that has lost its raylet hears some 16 s later that its actors are dead; one that has lost the GCS goes on for
60 s, and then Ray ends it from inside, with exit code 1 and no summary. A thread looks after both meanwhile: on this
machine at the processes, in a cluster that was joined at what Ray's public calls tell.

Ray is imported inside the functions: ``relax train --help`` must not pay for it.
"""

import contextlib
import ctypes
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

import psutil
from relax_rollout.engines.sglang.log import last_lines
from relax_rollout.engines.sglang.process import SUPERVISOR

from relax_cli.cluster.waits import StopFlag

LOOK_EVERY_S = 0.02
"""Often: the next call that writes to a dead raylet may end this process. Two small files of /proc are read."""
ASK_EVERY_S = 2.0
"""A cluster that was joined is asked over the network."""
UNWIND_S = 25.0
"""How long the run may take to end by itself once Ray is lost; a call of Ray's may be stuck. Ray ends it after 60 s."""
GCS_SILENCE_S = 40.0
REFUSALS = 3
DOUBT_S = 40.0
"""Ray needs some 30 s to give up a node that does not answer."""
JOIN_S = 10.0
END_S = 20.0
GRACE_S = 10.0
"""How long supervisors of engines and Python's resource trackers have to put their things in order."""
_PR_SET_CHILD_SUBREAPER = 36


class RayLost(RuntimeError):
    """Ray cannot go on; the message says what died, with the last lines of its log."""


def adopt_orphans(yes: bool = True) -> None:
    """Makes processes whose parent dies, below this one, children of this one: Linux lets nobody else find them."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(yes), 0, 0, 0)


class LocalProcesses:
    """The vital processes of a Ray that this process has started."""

    def __init__(self, processes: Collection[psutil.Process], logs: Path) -> None:
        """Takes them while they run.

        Args:
            logs: folder in which Ray keeps ``<name>.out`` and ``<name>.err``.
        """
        self._names: Mapping[psutil.Process, str] = {process: process.name() for process in processes}
        self._logs = logs

    def look(self) -> RayLost | None:
        """The error once one of them has ended."""
        for process, name in self._names.items():
            if not _runs(process):
                return RayLost(
                    f"Ray's process {name} (pid {process.pid}) has ended{_how(process.pid)}. "
                    f"Nothing goes on without it. {self._last_words(name)}"
                )
        return None

    def _last_words(self, name: str) -> str:
        for path in (self._logs / f"{name}.err", self._logs / f"{name}.out"):
            if lines := last_lines(path, 5):
                return f"Last lines of its {path.name}:\n" + "\n".join("  " + line for line in lines)
        return "Its log is empty."


class JoinedCluster:
    """A Ray cluster that goes on after the run: its GCS, and the node that this process is on."""

    def __init__(self) -> None:
        """Asks the connected Ray where both are."""
        import ray

        context = ray.get_runtime_context()
        self._node_id = context.get_node_id()
        host, _, port = context.gcs_address.rpartition(":")
        self._gcs = (host.strip("[]"), int(port))
        self._refused, self._answered = 0, time.monotonic()
        self._raylet = self._find_raylet()

    @property
    def answers(self) -> bool:
        """Whether the GCS did not refuse in the last look; who asks Ray then would wait for it."""
        return not self._refused

    def look(self) -> RayLost | None:
        """The error once the GCS or this machine's raylet is gone."""
        if self._raylet is not None and not _runs(self._raylet):
            return RayLost(
                f"the raylet of this machine (pid {self._raylet.pid}) has ended. Nothing goes on without it. Its log "
                "is raylet.out in the folder of the cluster's logs, by default /tmp/ray/session_latest/logs."
            )
        return self._look_at_gcs() or self._look_at_node()

    def _look_at_gcs(self) -> RayLost | None:
        try:
            socket.create_connection(self._gcs, timeout=5).close()
        except ConnectionRefusedError:
            self._refused += 1
        except OSError:
            pass  # busy or unreachable: only the time tells
        else:
            self._refused, self._answered = 0, time.monotonic()
        silent = time.monotonic() - self._answered
        if self._refused < REFUSALS and silent < GCS_SILENCE_S:
            return None
        where = "{}:{}".format(*self._gcs)
        what = f"nothing listens at {where} any more" if self._refused else f"{where} was silent for {silent:.0f} s"
        return RayLost(
            f"the GCS of the Ray cluster is gone: {what}. Nothing goes on without it. Its log is gcs_server.out on the "
            "head node, by default in /tmp/ray/session_latest/logs."
        )

    def _look_at_node(self) -> RayLost | None:
        import ray

        if not self.answers:
            return None
        for node in ray.nodes():
            if node["NodeID"] == self._node_id and not node["Alive"]:
                return RayLost(f"the Ray cluster has given up this machine: {node.get('DeathReasonMessage') or node}")
        return None

    def _find_raylet(self) -> psutil.Process | None:
        import ray

        names = {n["RayletSocketName"] for n in ray.nodes() if n["NodeID"] == self._node_id}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.name() == "raylet" and any(name in word for name in names for word in process.cmdline()):
                    return process
        return None  # another machine's view, or no right to look


@contextlib.contextmanager
def watched(
    look: Callable[[], RayLost | None],
    stop: StopFlag,
    tell: Callable[[RayLost], None],
    on_stuck: Callable[[RayLost], None],
    every_s: float = LOOK_EVERY_S,
    doubtful: Callable[[], bool] = lambda: False,
) -> Iterator[None]:
    """Inside, a thread looks; what it finds is put into ``stop``, where every wait of the driver notices it.

    Args:
        look: gives the error once Ray is lost.
        stop: takes the error.
        tell: says so to the user, at once: any call of Ray may end the process now.
        every_s: seconds between two looks.
        doubtful: whether the last look could not tell; one that follows an error is repeated then.
        on_stuck: called in the thread when the body is still there :data:`UNWIND_S` after that.
    """
    done = threading.Event()

    def watch() -> None:
        while not done.wait(every_s):
            lost = look()
            if lost is not None:
                tell(lost)
                stop.broken = lost
                if not done.wait(UNWIND_S):
                    on_stuck(lost)
                return

    thread = threading.Thread(target=watch, name="ray-watch", daemon=True)
    thread.start()
    try:
        yield
    except Exception:
        # Actors die with Ray, and whoever waits for one may hear of that first.
        done.set()
        thread.join(JOIN_S)
        give_up = time.monotonic() + DOUBT_S
        while stop.broken is None:
            lost = look()
            if lost is not None:
                tell(lost)
                stop.broken = lost
            elif not doubtful() or stop.requested or time.monotonic() > give_up:
                break
            else:
                time.sleep(min(every_s, 1.0))
        raise
    finally:
        done.set()
        thread.join(JOIN_S)


def end_local(before: Collection[psutil.Process]) -> None:
    """Ends a local Ray that is lost, with all of its workers; returns when they are gone.

    An engine's supervisor ends by itself when its actor is gone, and removes what the engine has left.

    Args:
        before: children of this process that are not Ray's.
    """
    start = time.monotonic()
    spared = {p.pid for p in before}
    while time.monotonic() - start < END_S:
        left = [p for p in psutil.Process().children(recursive=True) if p.pid not in spared and _runs(p)]
        if not left:
            return
        patient = time.monotonic() - start < GRACE_S
        in_order = _end_by_themselves(left) if patient else set()
        for process in left:
            if process.pid not in in_order:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        time.sleep(0.1)


def _end_by_themselves(processes: Collection[psutil.Process]) -> set[int]:
    """Pids of the trees of supervisors, and of Python's resource trackers."""
    found: set[int] = set()
    for process in processes:
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            if str(SUPERVISOR) in words:
                found |= {process.pid, *(p.pid for p in process.children(recursive=True))}
            elif any("multiprocessing.resource_tracker" in word for word in words):
                found.add(process.pid)
    return found


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _how(pid: int) -> str:
    """How a child has ended, which its parent has not asked for yet; empty when that is not known."""
    with contextlib.suppress(OSError):
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is not None and ended.si_code == os.CLD_EXITED:
            return f" with exit code {ended.si_status}"
        if ended is not None and ended.si_status == signal.SIGKILL:
            return ", killed (SIGKILL), as the system does when memory runs out: see `dmesg`"
        if ended is not None:
            return f" by signal {ended.si_status}"
    return ""
