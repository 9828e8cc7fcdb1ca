"""``--rm-type exact-match``."""

from typing import ClassVar

from relax_data.types import Sample

from relax_rollout.rewards.base import Reward


class ExactMatch(Reward):
    """1.0 when the response is the label, blanks at both ends aside, else 0.0."""

    NEEDS_LABEL: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__("--rm-type exact-match", max_concurrency=1)

    async def score(self, samples: list[Sample]) -> list[float]:
        return [float(s.response.strip() == str(s.prompt.label).strip()) for s in samples]
