"""Puts the rows of whole groups into a plane, from which the ranks of the trainer fetch them.

    add(group)      the group is whole, scored and kept -> its rows go with those of others, 16 or more at once
    row_ids(groups) a step takes these groups           -> what is left goes too; the ids for the manifest
    forget(ids)     the step is trained                 -> its rows are cleared

The pictures of a prompt are one row, beside those of its responses.

The plane is transport: the groups stay in the ledger until they are trained. So a checkpoint needs nothing of the
plane, and after a resume the rows are put again. Puts run in threads, one at a time; generation goes on meanwhile.
"""

import asyncio
import itertools
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

from relax_data.plane.base import DataPlane
from relax_data.plane.rows import picture_row, sample_rows
from relax_data.types import PICTURE_COLUMNS, SampleGroup

ROWS_AT_ONCE = 16
"""A put of fewer rows takes as long: TransferQueue needs 8 ms for any."""
LOOK_S = 2.0
"""How often the plane is asked for a sign of life: a part of it that dies is named also when nobody uses it."""


class RowPublisher:
    """The rows of a run's groups in a plane. One object for one event loop.

    Attributes:
        on_failure: called when a put, a clear or the plane itself has failed; :meth:`check` raises why.
    """

    on_failure: Callable[[], None] = staticmethod(lambda: None)

    def __init__(self, plane: DataPlane) -> None:
        """Puts nothing yet."""
        self._plane = plane
        self._waiting: list[SampleGroup] = []
        self._ids: dict[int, list[int]] = {}
        self._picture_ids: dict[int, int] = {}
        self._putting = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None
        self._failed = asyncio.Event()
        self._put_s = 0.0

    # ------------------------------------------------------------------ rows

    def add(self, group: SampleGroup) -> None:
        """Takes a whole group, whose rows are put as soon as there are enough of them."""
        self._waiting.append(group)
        if self._rows_waiting >= ROWS_AT_ONCE:
            self._begin(self._put(ROWS_AT_ONCE))

    async def row_ids(self, groups: Sequence[SampleGroup]) -> list[int]:
        """Ids of the rows of these groups, which were added before; one a sample, all put when it returns.

        Raises:
            PlaneFailed: the plane broke; the message says which part of it.
            ValueError: a sample cannot be trained on; the message names it.
        """
        await self._put(1)
        self.check()
        return list(itertools.chain.from_iterable(self._ids[g.prompt.prompt_id] for g in groups))

    def picture_ids(self, groups: Sequence[SampleGroup]) -> list[int | None]:
        """For each sample of these groups, whose rows are put, the id of the row with the pictures of its prompt.

        None stands for a prompt without pictures; the list is empty when that are all.
        """
        found = [self._picture_ids.get(g.prompt.prompt_id) for g in groups for _ in g.samples]
        return found if any(i is not None for i in found) else []

    def forget(self, prompt_ids: Iterable[int]) -> None:
        """Clears the rows of groups that were trained, in the background."""
        trained = list(prompt_ids)
        ids = list(itertools.chain.from_iterable(self._ids.pop(i, []) for i in trained))
        ids += [self._picture_ids.pop(i) for i in trained if i in self._picture_ids]
        if ids:
            self._begin(asyncio.to_thread(self._plane.clear, ids))

    @property
    def _rows_waiting(self) -> int:
        return sum(len(g.samples) for g in self._waiting)

    async def _put(self, at_least: int) -> None:
        async with self._putting:
            while self._rows_waiting >= at_least:
                groups, self._waiting = self._waiting, []
                begin = time.perf_counter()
                try:
                    rows, pictures = await asyncio.to_thread(self._put_rows, groups)
                except Exception as error:
                    self._fail(error)  # at once: who waits for the lock would miss the ids of these groups
                    raise
                self._put_s += time.perf_counter() - begin
                ids = iter(rows)
                self._picture_ids |= pictures
                for group in groups:
                    self._ids[group.prompt.prompt_id] = list(itertools.islice(ids, len(group.samples)))

    def _put_rows(self, groups: Sequence[SampleGroup]) -> tuple[list[int], dict[int, int]]:
        """Ids of the rows of all samples, and by the prompt's id of those with pictures."""
        rows = self._plane.put(sample_rows(s for g in groups for s in g.samples))
        of_prompts = [(g.prompt.prompt_id, row) for g in groups if (row := picture_row(g.prompt)) is not None]
        if not of_prompts:
            return rows, {}
        ids = self._plane.put({name: [row[name] for _, row in of_prompts] for name in PICTURE_COLUMNS})
        return rows, {prompt_id: i for (prompt_id, _), i in zip(of_prompts, ids, strict=True)}

    def metrics(self) -> dict[str, float]:
        """Seconds of the puts since the last call, and rows of samples that the plane holds now."""
        seconds, self._put_s = self._put_s, 0.0
        return {"plane/put_s": seconds, "plane/rows": float(sum(map(len, self._ids.values())))}

    # ------------------------------------------------------------------ failures

    def watch(self) -> None:
        """Begins to ask the plane for a sign of life now and then."""
        self._begin(self._look())

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            await asyncio.to_thread(self._plane.check)

    def check(self) -> None:
        """Raises what has failed in the background, if something has."""
        if self._failure is not None:
            raise self._failure

    async def failure(self) -> None:
        """Waits until something fails, and raises it."""
        await self._failed.wait()
        self.check()

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self._failure = self._failure or error
        self._failed.set()
        self.on_failure()

    async def close(self) -> None:
        """Ends what runs in the background; the plane stays open."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
