"""The table of reward types: ``--rm-type`` takes the names that stand here.

A new reward type is a builder here and one line in :data:`REWARDS`; the first line of the builder's docstring is its
help. What a builder needs is imported when it is called, so that the settings can read the table without any of it.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from relax_rollout.rewards.base import Reward


class RewardOptions(Protocol):
    """Settings that a builder may read, the part of :class:`relax_rollout.settings.RewardSettings` about scoring."""

    @property
    def reward_max_concurrency(self) -> int:
        """Responses that are scored at a time."""
        ...

    @property
    def reward_key(self) -> str | None:
        """Key of the reward in what a reward returns, when that is an object."""
        ...


RewardBuilder = Callable[[RewardOptions], "Reward"]


def exact_match(settings: RewardOptions) -> "Reward":
    """1 when the response is the label, blanks at both ends aside."""
    from relax_rollout.rewards.exact_match import ExactMatch

    return ExactMatch()


def math(settings: RewardOptions) -> "Reward":
    """1 when math-verify finds the answer equal to the label; in worker processes, with a time limit."""
    from relax_rollout.rewards.math import MathReward

    return MathReward(max_workers=settings.reward_max_concurrency)


REWARDS: dict[str, RewardBuilder] = {"exact-match": exact_match, "math": math}
"""By the name for ``--rm-type``: what builds the reward."""


def _exact_match_label(label: Any) -> str | None:
    from relax_rollout.rewards.exact_match import answers

    return None if answers(label) else "compares text, and this is neither a text nor a number"


def _math_label(label: Any) -> str | None:
    from relax_rollout.rewards.math_labels import LabelError, label_text, read_label

    text = label_text(label)
    if text is None:
        return "compares with a text or a number, and this is neither"
    try:
        read_label(text)
    except LabelError as error:
        return f"cannot compare with it: {error}"
    return None


LABEL_PROBLEMS: dict[str, Callable[[Any], str | None]] = {"exact-match": _exact_match_label, "math": _math_label}
"""By the reward types that need a label: what is wrong with one, or None. It is asked before a run starts."""
