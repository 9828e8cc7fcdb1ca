"""The data plane over TransferQueue, for rollout and trainers in different processes and on different nodes.

What TransferQueue 0.1.11 needs of us is all in this file:

- Waiting is ours: its own waiting mode sleeps in the request loop of its controller and holds up everyone's writes, so
  it is always run in polling mode.
- Starting with too few Ray CPUs hangs for ever, so they are counted first.
- A storage unit that died keeps its callers waiting for 200 s, three times over. Its limits are lowered before it is
  imported, and every call has a deadline of ours. The rows of a dead unit are lost: that is :class:`PlaneFailed`, and
  the run goes on from the checkpoint, whose ledger knows which prompts to generate again.
- Rows come in the order of reused internal indexes: :class:`relax_data.plane.sampler.OldestFirst` puts them in order.
- Values travel as bytes in jagged uint8 tensors: shape, dtype and empty arrays of a row come back as they were, which
  columns of tensors of unequal or no length do not guarantee.
"""

import asyncio
import concurrent.futures
import itertools
import os
import pickle
import secrets
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

from relax_data.plane.base import (
    Columns,
    PlaneClosed,
    PlaneError,
    PlaneFailed,
    Rows,
    check_take,
    not_there,
    row_count,
    waiting_for,
)

_ANSWER_SECONDS = 20
_CALL_SECONDS = 60.0
_LOOK_SECONDS = 5.0
_POLL_SECONDS = (0.005, 0.1)
CONTROLLER, NAMESPACE = "TransferQueueController", "transfer_queue"
"""Name of its actor in a Ray cluster, and the namespace of Ray that the name is in."""


class TransferQueuePlane:
    """A :class:`relax_data.plane.base.DataPlane` over TransferQueue. Ray must be running.

    The first process starts TransferQueue (one controller and ``units`` storage units, a Ray CPU each); others that
    make a plane of the same Ray cluster join it. There is one TransferQueue in a cluster; planes with different names
    live in it side by side.

    Args:
        name: of the plane, the same in all processes that use it.
        units: storage units (``--num-data-storage-units``).
        call_seconds: deadline of one call to TransferQueue.

    Raises:
        PlaneError: TransferQueue is not installed, Ray is not running, or too few Ray CPUs are free.
    """

    def __init__(self, name: str = "relax", *, units: int = 1, call_seconds: float = _CALL_SECONDS):
        self._tq = _start(units)
        self._client = self._tq.get_client()
        self._parts = _parts(len(self._client.storage_manager.storage_unit_infos))
        self._partition, self._control = f"{name}/rows", f"{name}/control"
        self._call_seconds = call_seconds
        self._writer = secrets.randbits(32)
        self._counter = itertools.count()

    def put(self, columns: Columns) -> list[int]:
        """Writes rows to the storage units; returns their ids, which rise."""
        n = row_count(columns)
        if "closed" in self._signals():
            raise PlaneClosed("the plane was closed: no more rows can be put")
        ids = [self._new_id() for _ in range(n)]
        if n:
            self._write(ids, {**columns, _ID: ids}, create=True)
        return ids

    def _new_id(self) -> int:
        """An id that rises with time and is unique over all writers without asking anyone."""
        return time.time_ns() << 64 | self._writer << 32 | (next(self._counter) & 0xFFFFFFFF)

    def add(self, ids: Sequence[int], columns: Columns) -> None:
        """Writes columns of rows that are there."""
        if row_count(columns) != len(ids):
            raise ValueError(f"{len(ids)} ids but {row_count(columns)} values a column")
        self._signals()
        if ids:
            self._write(list(ids), columns, create=False)

    def take(self, consumer: str, columns: Sequence[str], n: int, *, timeout: float) -> Rows:
        """Asks until enough rows have all of ``columns``; see :meth:`relax_data.plane.base.DataPlane.take`."""
        check_take(columns, n, timeout)
        deadline = time.monotonic() + timeout
        pause, longest = _POLL_SECONDS
        while True:
            closed = "closed" in self._signals()
            wanted = n
            if closed:
                ready, lacking = self._left(consumer, columns)
                if not ready and not lacking:
                    raise PlaneClosed(f"no row is left for consumer {consumer!r}")
                if not lacking:
                    wanted = min(n, ready)
            if (rows := self._fetch(consumer, columns, wanted)) is not None:
                return rows
            if time.monotonic() + pause > deadline:
                raise TimeoutError(waiting_for(consumer, columns, n, timeout, *self._left(consumer, columns)))
            time.sleep(pause)
            pause = min(longest, 1.5 * pause)

    def fetch(self, ids: Sequence[int], columns: Sequence[str]) -> Rows:
        """Reads rows by id; see :meth:`relax_data.plane.base.DataPlane.fetch`."""
        if not ids:
            return Rows([], {c: [] for c in columns})
        keys = _keys(ids)
        meta = self._call("fetch", self._client.async_kv_retrieve_meta(keys, self._partition, create=False))
        if meta.size != len(ids):
            raise PlaneError(not_there(self._missing(ids)))
        if lacking := [c for c in columns if c not in meta.field_names]:
            raise PlaneError(f"row {ids[0]} has no column {lacking[0]!r} yet")
        return self._read("fetch", meta.select_fields([*dict.fromkeys(columns), _ID]), columns, ids)

    def check(self) -> None:
        """Asks the actors of TransferQueue, through Ray; see :meth:`relax_data.plane.base.DataPlane.check`."""
        if broken := self._broken(self._call_seconds):
            raise PlaneFailed(f"TransferQueue failed: {broken}. {_LOST}")
        self._signals()

    def clear(self, ids: Sequence[int]) -> None:
        """Forgets rows in all storage units."""
        if not ids:
            return
        meta = self._call("clear", self._client.async_kv_retrieve_meta(_keys(ids), self._partition, create=False))
        if meta.size:
            self._call("clear", self._client.async_clear_samples(meta))

    def close(self) -> None:
        """Tells every process of the plane that no more rows come."""
        self._signal("closed", "")

    def fail(self, reason: str) -> None:
        """Tells every process of the plane why it ended."""
        self._signal("failed", reason)

    def save(self, path: str | Path) -> None:
        """Writes all planes of the cluster into the folder ``path``, which all nodes must see."""
        self._guarded("save", lambda: self._tq.save_checkpoint(Path(path)))

    def load(self, path: str | Path) -> None:
        """Restores the folder of :meth:`save`; the number of storage units must be the same."""
        self._guarded("load", lambda: self._tq.load_checkpoint(Path(path)))
        self._call("load", self._client.async_reset_consumption(self._partition))

    def __len__(self) -> int:
        return len(self._call("count", self._client.async_kv_list(self._partition)).get(self._partition, {}))

    def _write(self, ids: list[int], columns: Columns, *, create: bool) -> None:
        keys = _keys(ids)
        meta = self._call("write", self._client.async_kv_retrieve_meta(keys, self._partition, create=create))
        if meta.size != len(ids):
            raise PlaneError(not_there(self._missing(ids)))
        self._call("write", self._client.async_put(data=_packed(columns, len(ids)), metadata=meta))

    def _missing(self, ids: Sequence[int]) -> list[int]:
        there = self._call("status", self._client.async_kv_list(self._partition)).get(self._partition, {})
        return [i for i, key in zip(ids, _keys(ids), strict=True) if key not in there]

    def _fetch(self, consumer: str, columns: Sequence[str], n: int) -> Rows | None:
        fields = [*dict.fromkeys(columns), _ID]
        meta = self._call(
            "take",
            self._client.async_get_meta(
                data_fields=fields, batch_size=n, partition_id=self._partition, mode="fetch", task_name=consumer
            ),
        )
        if not meta.size:
            return None
        return self._read("take", meta, columns)

    def _read(self, what: str, meta: Any, columns: Sequence[str], ids: Sequence[int] | None = None) -> Rows:
        """Gets rows from the storage units, in the order of ``ids``, or else the oldest first."""
        data = self._call(what, self._client.async_get_data(meta))
        place = {row: k for k, row in enumerate(_unpacked(data[_ID]))}
        # The columns of several storage units are put together in the order of the units.
        order = sorted(place) if ids is None else list(ids)
        found = {name: _unpacked(data[name]) for name in columns}
        return Rows(order, {c: [found[c][place[i]] for i in order] for c in columns})

    def _left(self, consumer: str, columns: Sequence[str]) -> tuple[int, int]:
        """Rows that the consumer has not had: how many are ready, and how many lack a column."""
        # Without any row of the partition yet, TransferQueue has no status to tell.
        index, produced = self._call("status", self._client.async_get_production_status(list(columns), self._partition))
        if index is None or produced is None or not len(index):
            there = self._call("status", self._client.async_kv_list(self._partition)).get(self._partition, {})
            return 0, len(there)
        taken: set[int] = set()
        # Asked apart, so others may have put or cleared rows in between: the two go together by index.
        known, consumed = self._call("status", self._client.async_get_consumption_status(consumer, self._partition))
        if known is not None and consumed is not None:
            taken = {int(i) for i, c in zip(known.tolist(), consumed.tolist(), strict=True) if c}
        complete = produced.reshape(len(index), -1).bool().all(dim=1).tolist()
        left = [c for i, c in zip(index.tolist(), complete, strict=True) if int(i) not in taken]
        return sum(left), len(left) - sum(left)

    def _signal(self, name: str, reason: str) -> None:
        meta = self._call("signal", self._client.async_kv_retrieve_meta([name], self._control, create=True))
        meta.update_custom_meta([{"reason": reason}])
        self._call("signal", self._client.async_put(data=_packed({"signal": [reason]}, 1), metadata=meta))

    def _signals(self) -> dict[str, str]:
        signals = self._call("status", self._client.async_kv_list(self._control)).get(self._control, {})
        # A key is there a moment before what was written under it.
        reasons = {name: tags["reason"] for name, tags in signals.items() if "reason" in tags}
        if "failed" in reasons:
            raise PlaneFailed(reasons["failed"])
        return reasons

    def _call(self, what: str, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Runs a coroutine of the client on the client's own loop, under our deadline."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._client._loop)

        def result() -> Any:
            try:
                return future.result(self._call_seconds)
            except concurrent.futures.TimeoutError:
                future.cancel()
                raise

        return self._guarded(what, result)

    def _guarded(self, what: str, call: Any) -> Any:
        try:
            return call()
        except concurrent.futures.TimeoutError:
            reason = f"no answer within {self._call_seconds:.0f} s"
        except (RuntimeError, OSError, ValueError, KeyError) as error:
            # The client wraps whatever happens in these; its text says which storage unit did not answer.
            reason = str(error)
        who = self._broken(_LOOK_SECONDS)
        raise PlaneFailed(f"TransferQueue failed during {what}: {f'{who} ({reason})' if who else reason}. {_LOST}")

    def _broken(self, seconds: float) -> str:
        """Names the parts that have died, as soon as one has, or else those that do not answer within ``seconds``.

        Empty when all are well. A part that waits for a dead one itself does not answer, and is not waited for.
        """
        import ray

        dead = [name for name, part in self._parts.items() if part is None]
        asked = {part.__ray_ready__.remote(): name for name, part in self._parts.items() if part is not None}
        silent, give_up = list(asked), time.monotonic() + seconds
        while silent and not dead:
            answered, silent = ray.wait(silent, num_returns=1, timeout=max(0.0, give_up - time.monotonic()))
            if not answered:
                return ", ".join(f"{asked[ref]} does not answer" for ref in silent)
            # Those that died together with the first one are named too.
            together, silent = ray.wait(silent, num_returns=len(silent), timeout=0) if silent else ([], [])
            for ref in (*answered, *together):
                try:
                    ray.get(ref)
                except ray.exceptions.RayError:
                    dead.append(asked[ref])
        return ", ".join(f"{name} has died" for name in dead)

    def shutdown(self) -> None:
        """Stops TransferQueue, for all planes of the cluster when this process started it."""
        self._tq.close()


_ID = "_relax_id"
_LOST = "When a storage unit died its rows are lost: restart the run from its last checkpoint (--load)"


def _parts(units: int) -> dict[str, Any]:
    """The actors of the TransferQueue that runs, by name; None for one that has died."""
    import ray

    found: dict[str, Any] = {}
    for name in [f"TransferQueueStorageUnit#{k}" for k in range(units)]:
        try:
            found[name] = ray.get_actor(name)
        except ValueError:
            found[name] = None
    # They have their names in the namespace of the Ray job that made them: a process of another job sees none.
    if not any(found.values()):
        found = {}
    return {CONTROLLER: ray.get_actor(CONTROLLER, namespace=NAMESPACE), **found}


def _start(units: int) -> Any:
    """Imports and starts TransferQueue, or joins the one that runs in this Ray cluster."""
    for name, value in (
        ("TQ_SIMPLE_STORAGE_SEND_RECV_TIMEOUT", _ANSWER_SECONDS),
        ("TQ_SIMPLE_STORAGE_MAX_ATTEMPTS", 1),
        ("TQ_SIMPLE_STORAGE_PROBE_TIMEOUT", 2),
        # Its 8 threads are a warning a call where there are fewer cores (of which the count here may be twice as many).
        ("TQ_NUM_THREADS", max(1, min(8, (os.cpu_count() or 1) // 2))),
    ):
        os.environ.setdefault(name, str(value))
    try:
        import ray
        import transfer_queue
        from omegaconf import OmegaConf
    except ImportError as error:
        raise PlaneError(f"TransferQueue is missing ({error}): pip install 'relax-data[transferqueue]'") from error
    if units < 1:
        raise ValueError(f"units is {units}: --num-data-storage-units must be at least 1")
    if not ray.is_initialized():
        raise PlaneError("TransferQueue needs a running Ray: call ray.init first")
    try:
        ray.get_actor(CONTROLLER, namespace=NAMESPACE)
    except ValueError:
        free = ray.available_resources().get("CPU", 0.0)
        if free < units + 1:
            raise PlaneError(
                f"TransferQueue needs {units + 1} Ray CPUs (one for its controller, one a storage unit) and "
                f"{free:.0f} are free: lower --num-data-storage-units or give Ray more CPUs"
            ) from None
    from relax_data.plane.sampler import OldestFirst

    transfer_queue.init(
        OmegaConf.create(
            {
                "controller": {"polling_mode": True, "sampler": OldestFirst()},
                "backend": {"SimpleStorage": {"num_data_storage_units": units}},
            },
            flags={"allow_objects": True},
        )
    )
    return transfer_queue


def _keys(ids: Sequence[int]) -> list[str]:
    return [str(i) for i in ids]


def _packed(columns: Columns, n: int) -> Any:
    """A TensorDict with one jagged uint8 tensor a column."""
    import torch
    from tensordict import TensorDict

    def tensor(value: Any) -> "torch.Tensor":
        return torch.frombuffer(bytearray(pickle.dumps(value, protocol=5)), dtype=torch.uint8)

    return TensorDict(
        {
            name: torch.nested.as_nested_tensor([tensor(v) for v in values], layout=torch.jagged)
            for name, values in columns.items()
        },
        batch_size=[n],
    )


def _unpacked(column: Any) -> list[Any]:
    return [pickle.loads(row.numpy().data) for row in column.unbind()]
