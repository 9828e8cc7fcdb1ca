"""Protocol of a reward, as the rollout loop uses it, and what all rewards share."""

import abc
import asyncio
import contextlib
import math
import traceback
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Protocol

from relax_data.types import Sample, SampleGroup

from relax_rollout.concurrency import LoopLocal, gather_or_cancel, guarded
from relax_rollout.errors import describe, shown, to_plain

CALL_TIMEOUT_S = 600.0
"""Seconds that one reward call may take before the run stops with an error that names it."""


class RewardError(ValueError):
    """A reward could not be computed; the message names the sample and the function, the cause is chained."""


class RewardFunction(Protocol):
    """Scores samples: sets ``reward`` and ``reward_info`` of every sample that has no reward yet."""

    @property
    def per_group(self) -> bool:
        """True when it must see all samples of a group at once, so it is only called with whole groups."""
        ...

    async def __call__(self, target: SampleGroup | Sample) -> None:
        """Scores one sample, or all of a group.

        Raises:
            RewardError: naming the sample, the function and the traceback.
        """
        ...

    async def close(self) -> None:
        """Ends its workers and connections; it may be used again afterwards."""
        ...


class Reward(abc.ABC):
    """Base of our rewards: concurrency, deadline, error messages, and the reward out of a dict."""

    NEEDS_LABEL: ClassVar[bool] = False

    def __init__(
        self, name: str, *, max_concurrency: int, reward_key: str | None = None, per_group: bool = False
    ) -> None:
        self.name = name
        self._reward_key = reward_key
        self._per_group = per_group
        self._permits = LoopLocal(lambda: asyncio.Semaphore(max_concurrency))
        self._timeout_s = CALL_TIMEOUT_S

    @property
    def per_group(self) -> bool:
        """Whether ``score`` takes all responses to a prompt at once."""
        return self._per_group

    @abc.abstractmethod
    async def score(self, samples: list[Sample]) -> Sequence[Any]:
        """Raw rewards (number or dict) of the samples: one sample, or a whole group when ``per_group``."""

    async def __call__(self, target: SampleGroup | Sample) -> None:
        """Scores a sample, or a group, and stores the rewards in its samples."""
        samples = [target] if isinstance(target, Sample) else target.samples
        if self.per_group:
            assert isinstance(target, SampleGroup), f"{self.name} scores whole groups"
            if any(s.reward is None for s in samples):
                await self._score(samples)
        else:
            await gather_or_cancel(self._score([s]) for s in samples if s.reward is None)

    async def close(self) -> None:  # noqa: B027 - most rewards have nothing to end
        """Ends its workers and connections."""

    async def _score(self, samples: list[Sample]) -> None:
        for sample in samples:
            if self.NEEDS_LABEL and sample.prompt.label is None:
                raise RewardError(
                    f"{sample.name}: {self.name} compares with the label, but the row has none; "
                    "give its key with --label-key"
                )
        async with self._permits.get():
            with self._errors_of(samples):
                raw = await asyncio.wait_for(guarded(self.score, samples), self._timeout_s)
        if not isinstance(raw, list | tuple) or len(raw) != len(samples):
            what = f"{len(raw)} rewards" if isinstance(raw, list | tuple) else f"a {type(raw).__name__}"
            raise RewardError(
                f"{self._names(samples)}: {self.name} returned {what} for {len(samples)} samples; "
                "with --group-rm it must return a list with one reward for each sample"
            )
        for sample, value in zip(samples, raw, strict=True):
            sample.reward, sample.reward_info = self._split(sample, value)

    @contextlib.contextmanager
    def _errors_of(self, samples: list[Sample]) -> Iterator[None]:
        try:
            yield
        except RewardError:
            raise
        except Exception as e:
            if type(e) is TimeoutError and not e.args:  # of wait_for; the function's own say more
                what = f"did not answer within {self._timeout_s:.0f} s"
            else:
                what = f"raised {describe(e)}\n" + "".join(traceback.format_exception(e)).rstrip()
            raise RewardError(f"{self._names(samples)}: {self.name} {what}") from e

    def _split(self, sample: Sample, value: Any) -> tuple[float, dict[str, Any]]:
        """The reward and the further values of what the function returned for ``sample``."""
        info: dict[str, Any] = {}
        if isinstance(value, dict):
            info = {str(k): v for k, v in value.items()}
            if self._reward_key is None:
                raise RewardError(
                    f"{sample.name}: {self.name} returned a dict with {', '.join(info) or 'nothing'}; "
                    "say with --reward-key which entry is the reward"
                )
            if self._reward_key not in info:
                raise RewardError(
                    f"{sample.name}: {self.name} returned a dict without --reward-key {self._reward_key!r}; "
                    f"it has {', '.join(info) or 'nothing'}"
                )
            value = info.pop(self._reward_key)
            try:
                info = {k: to_plain(v, f"entry {k!r}") for k, v in info.items()}
            except (ValueError, RecursionError) as e:
                raise RewardError(f"{sample.name}: {self.name} returned a dict of which {e}") from None
        elif self._reward_key is not None:
            raise RewardError(
                f"{sample.name}: {self.name} returned {shown(value)}, but --reward-key {self._reward_key!r} needs a "
                "dict; remove the flag or return a dict"
            )
        return self._number(sample, value), info

    def _number(self, sample: Sample, value: Any) -> float:
        """``value`` as a float: a Python, numpy or torch number, or a bool; a text that holds one is none."""
        try:
            reward = None if isinstance(value, str | bytes | bytearray) else float(value)
        except OverflowError:
            reward = math.inf
        except Exception:  # __float__ of the user's object
            reward = None
        if reward is None:
            raise RewardError(f"{sample.name}: {self.name} returned {shown(value)}, which is no number; return a float")
        if not math.isfinite(reward):
            raise RewardError(f"{sample.name}: {self.name} returned {shown(value)}; a reward must be finite")
        return reward

    @staticmethod
    def _names(samples: list[Sample]) -> str:
        return samples[0].name if len(samples) == 1 else f"{samples[0].prompt.source} ({len(samples)} responses)"
