"""``--custom-rm-path module:function``."""

import asyncio
from collections.abc import Sequence
from typing import Any

from relax_data.hooks import is_async, load_function
from relax_data.types import Sample

from relax_rollout.concurrency import in_thread
from relax_rollout.rewards.base import Reward


class CustomReward(Reward):
    """A function of the user: ``f(sample) -> float | dict``, with ``per_group`` ``f(samples) -> list``; plain or async.

    A plain function runs in threads, so that a slow one does not hold up generation: up to ``max_concurrency`` calls
    at the same time. Signals (``signal.alarm``) do not work there.
    """

    def __init__(self, path: str, *, max_concurrency: int, reward_key: str | None, per_group: bool) -> None:
        super().__init__(
            f"--custom-rm-path {path}", max_concurrency=max_concurrency, reward_key=reward_key, per_group=per_group
        )
        self._function = load_function("--custom-rm-path", path)
        self._async = is_async(self._function)

    async def score(self, samples: list[Sample]) -> Sequence[Any]:
        """Calls the user's function, in a thread unless it is async."""
        argument = samples if self.per_group else samples[0]
        if self._async:
            result = await self._function(argument)
        else:
            result = await in_thread(self._function, argument)
            if asyncio.iscoroutine(result):  # a plain function that returns a coroutine, such as a partial
                result = await result
        return result if self.per_group else [result]
