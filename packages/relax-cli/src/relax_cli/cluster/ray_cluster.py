"""Starts a local Ray or joins one, and reserves the places that a run needs.

Ray is imported inside the functions: ``relax train --help`` must not pay for it.
"""

import contextlib
import dataclasses
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from relax_cli.cluster.local_ray import START_DEADLINE_S, start_local

log = logging.getLogger(__name__)

PLACEMENT_DEADLINE_S = 300.0
"""How long a run waits for the cluster to have room for it."""


@dataclasses.dataclass(frozen=True)
class Slot:
    """One reserved place: a GPU (or, on a CPU machine, a core) on some node of the cluster."""

    bundle: int
    """Index of the bundle in the placement group."""
    node_id: str
    node_ip: str
    gpu_id: str | None
    """What CUDA_VISIBLE_DEVICES calls the GPU on its node; None on a CPU machine."""


@contextlib.contextmanager
def connected(address: str | None, *, min_cpus: int, note: Callable[[str], None] = log.warning) -> Iterator[None]:
    """Surrounds the run with a Ray connection; a local Ray ends with it, a joined cluster goes on.

    Args:
        address: ``--ray-address``; None starts Ray here.
        min_cpus: logical CPUs a local Ray must offer. They only steer placement: the processes of a colocate run take
            turns, so more of them than cores is fine.
        note: takes lines for the user while Ray starts.

    Raises:
        RayStartError: Ray did not start on this machine.
        ValueError: no cluster answers at ``address``.
        SystemExit: SIGINT or SIGTERM came while it connected; the code is its number.
    """
    # Ray's uv hook would ship the project to the workers and start each of them through `uv run` again.
    os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
    # Where images switch byte code off, each of the processes of a run would compile torch's 900 modules for itself.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    # Ray listens on every interface by default; with this a local Ray stays on 127.0.0.1 (works on Linux, whatever
    # its name says).
    if address is None:
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    elif _has_ray_token():
        # `ray start` asks for the token where there is one, but a driver with an explicit address would not send it.
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Ray gives its own processes 60 s to start, which a busy laptop with a cold disk needs for their imports alone.
    os.environ.setdefault("RAY_raylet_start_wait_time_s", f"{START_DEADLINE_S:.0f}")
    # A local Ray authenticates with a token of its own accord; it need not say so at every start.
    logging.getLogger("ray._private.authentication.authentication_token_setup").setLevel(logging.ERROR)
    with _ending_at_once():
        import ray

        try:
            _connect(ray, address, min_cpus, note)
        except BaseException:
            ray.shutdown()
            raise
    try:
        yield
    finally:
        ray.shutdown()


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


def _connect(ray: Any, address: str | None, min_cpus: int, note: Callable[[str], None]) -> None:
    common: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": False}
    if address is None:
        start_local(
            ray,
            note,
            include_dashboard=False,
            num_cpus=max(min_cpus, os.cpu_count() or 1),
            object_store_memory=_object_store_bytes(),
            **common,
        )
        return
    try:
        ray.init(address=address, **common)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ValueError(
            f"--ray-address {address}: no Ray cluster answers there ({error}). Start one with `ray start --head`, or "
            "leave the flag out to run on this machine alone. If there is one, give this machine its token "
            "(RAY_AUTH_TOKEN, or ~/.ray/auth_token)."
        ) from error


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


def reserve(n_slots: int, *, gpus: bool, stop: "StopFlag | None" = None) -> tuple[Any, list[Slot]]:
    """Reserves ``n_slots`` places and sorts them by node, then GPU, so that neighbours in the list share a node.

    Returns:
        Ray's placement group, and its slots in rank order.

    Raises:
        ValueError: the cluster has too few GPUs, or no room within :data:`PLACEMENT_DEADLINE_S`.
        StopRequested: the user asked the run to end.
    """
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    if gpus and cluster_gpus() < n_slots:
        raise ValueError(
            f"the run needs {n_slots} GPUs but the Ray cluster has {cluster_gpus()}: lower --actor-num-nodes or "
            "--actor-num-gpus-per-node, or join a larger cluster with --ray-address."
        )
    bundle = {"CPU": 1.0, "GPU": 1.0} if gpus else {"CPU": 1.0}
    group = placement_group([bundle] * n_slots, strategy="PACK")
    give_up = time.monotonic() + PLACEMENT_DEADLINE_S
    while not group.wait(1):
        stopped = stop is not None and stop.requested
        if not stopped and time.monotonic() < give_up:
            continue
        remove_placement_group(group)
        if stopped:
            raise StopRequested("room in the cluster")
        raise ValueError(
            f"waited {PLACEMENT_DEADLINE_S:.0f} s for {n_slots} bundles of {bundle}: the cluster offers "
            f"{ray.available_resources()}. Is another run holding it?"
        )

    @ray.remote(num_cpus=0.1, num_gpus=0.1 if gpus else 0)
    def where() -> tuple[str, str, str | None]:
        context = ray.get_runtime_context()
        ids = ray.get_gpu_ids()
        return context.get_node_id(), ray.util.get_node_ip_address(), str(ids[0]) if ids else None

    places = [where.options(**strategy(group, i)).remote() for i in range(n_slots)]
    found = wait_for(places, "the reserved places to answer", stop=stop, deadline_s=PLACEMENT_DEADLINE_S)
    slots = [Slot(i, *place) for i, place in enumerate(found)]
    return group, sorted(slots, key=lambda s: (s.node_ip, s.node_id, int(s.gpu_id or 0), s.bundle))


def strategy(group: Any, bundle: int) -> dict[str, Any]:
    """Ray options that put an actor or task into one bundle."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    return {
        "scheduling_strategy": PlacementGroupSchedulingStrategy(
            placement_group=group, placement_group_bundle_index=bundle, placement_group_capture_child_tasks=False
        )
    }


class StopRequested(Exception):
    """The user asked the run to end (SIGINT or SIGTERM) and the current wait was given up."""


@dataclasses.dataclass
class StopFlag:
    """Set by a signal handler, looked at by every wait of the driver."""

    grace_s: float = 6.0
    """How long the step in progress may still take after the signal."""
    total_s: float = 8.0
    """When the last actor is to be told to go; ending Ray itself takes another second or two."""
    stepping: bool = False
    """The start is over: there is a step that may be worth finishing."""
    signal_number: int | None = None
    at: float = 0.0

    def set(self, signal_number: int) -> None:
        if self.signal_number is None:
            self.signal_number, self.at = signal_number, time.monotonic()

    @property
    def requested(self) -> bool:
        return self.signal_number is not None

    @property
    def expired(self) -> bool:
        """True when nothing is to be finished any more."""
        return self.requested and (not self.stepping or time.monotonic() - self.at > self.grace_s)

    def left(self, seconds: float) -> float:
        """``seconds``, or what a requested stop leaves of them; never less than one."""
        return min(seconds, max(1.0, self.at + self.total_s - time.monotonic())) if self.requested else seconds


def wait_for(
    refs: Any,
    what: str,
    *,
    stop: StopFlag | None = None,
    deadline_s: float,
    remind_s: float = 60.0,
    status: Callable[[], str] | None = None,
) -> Any:
    """``ray.get`` that says what it waits for, ends at a deadline and gives way to a stop request.

    Args:
        refs: one object reference or a list of them.
        what: completes "waiting for ..." in messages.
        deadline_s: seconds after which the wait is an error.
        remind_s: seconds between two messages of a long wait.
        status: asked for the details of such a message.

    Raises:
        TimeoutError: the deadline passed.
        StopRequested: a stop was requested and its grace time is over.
    """
    import ray

    many = isinstance(refs, list)
    pending = list(refs) if many else [refs]
    start = time.monotonic()
    reminded = start
    values: dict[Any, Any] = {}
    while pending:
        done, pending = ray.wait(pending, num_returns=len(pending), timeout=0.25)
        for ref in done:
            try:
                values[ref] = ray.get(ref)  # raises at once what one of many raised, instead of waiting for the others
            except ray.exceptions.RayActorError as error:  # it says which process died, not what it was doing
                error.add_note(f"The run was waiting for {what}.")
                raise
        now = time.monotonic()
        if not pending:
            break
        if stop is not None and stop.expired:
            raise StopRequested(what)
        if now - start > deadline_s:
            raise TimeoutError(f"waited {now - start:.0f} s for {what}: giving up")
        if now - reminded >= remind_s:
            details = f": {status()}" if status is not None else ""
            log.warning("still waiting for %s (%.0f s)%s", what, now - start, details)
            reminded = now
    return [values[ref] for ref in refs] if many else values[refs]
