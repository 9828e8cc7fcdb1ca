"""``--rm-type exact-match``."""

import math
from decimal import Decimal
from typing import Any, ClassVar

from relax_data.types import Sample

from relax_rollout.errors import shown
from relax_rollout.rewards.base import Reward, RewardError


class ExactMatch(Reward):
    """1.0 when the response is the label, blanks at both ends aside, else 0.0.

    A label that is a number is met by each usual way to write it: 2.0 by ``2`` and ``2.0`` (a column of parquet with
    missing values has whole numbers as 2.0), true by ``true`` and ``True``.
    """

    NEEDS_LABEL: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__("--rm-type exact-match", max_concurrency=1)

    async def score(self, samples: list[Sample]) -> list[float]:
        """1 for a response that is one of the answers, without the space around it; else 0."""
        return [float(s.response.strip() in self._answers(s)) for s in samples]

    def _answers(self, sample: Sample) -> set[str]:
        found = answers(sample.prompt.label)
        if not found:
            raise RewardError(
                f"{sample.name}: {self.name} compares text, but the label is {shown(sample.prompt.label)}; give a "
                "label that is text or a number with --label-key, or compare with a function of your own "
                "(--custom-rm-path)"
            )
        return found


def answers(label: Any) -> set[str]:
    """The texts that meet a label; none when it is neither a text nor a finite number."""
    if isinstance(label, str):
        return {label.strip()}
    if isinstance(label, bool):
        return {str(label), str(label).lower()}
    if isinstance(label, int):  # of any size: not all are floats
        return {str(label)}
    if isinstance(label, float | Decimal) and math.isfinite(label):
        whole = {str(int(label))} if label == int(label) else set()
        return {str(label), *whole}
    return set()
