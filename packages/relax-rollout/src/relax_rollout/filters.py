"""Filters decide whether a scored group is trained on (``--dynamic-sampling-filter-path``)."""

import traceback
from collections.abc import Callable
from typing import Any

from relax_data.hooks import is_async, load_function
from relax_data.types import SampleGroup, equal_rewards

from relax_rollout.errors import describe, shown

FilterResult = bool | tuple[bool, str]
GroupFilter = Callable[[SampleGroup], FilterResult]
"""True keeps the group, False drops it; a tuple adds the reason under which it is counted."""

_FLAG = "--dynamic-sampling-filter-path"


def reward_nonzero_std(group: SampleGroup) -> tuple[bool, str]:
    """Keeps groups whose rewards differ; the others have no advantage, so nothing could be learned from them.

    Dynamic sampling of DAPO (arXiv 2503.14476, section 3.2). Rewards that differ by rounding only are equal, as they
    are for the advantages (:func:`relax_data.types.equal_rewards`). The reason holds the common reward, which tells
    prompts that are too hard from those that are too easy.
    """
    rewards = group.rewards
    if equal_rewards(rewards):
        return False, f"equal_rewards_{rewards[0]:.1f}"
    return True, ""


def load_filter(path: str) -> GroupFilter:
    """The filter named by ``module:function``.

    Raises:
        ValueError: it cannot be imported, or is an async function.
    """
    function = load_function(_FLAG, path)
    if is_async(function):
        raise ValueError(f"{_FLAG} {path!r} is an async function; a filter is a plain one: def keep(group) -> bool")
    return function


def judge(group: SampleGroup, group_filter: GroupFilter | None) -> tuple[bool, str]:
    """Whether ``group`` is kept, and if not, the reason it is counted under.

    Raises:
        ValueError: the filter raised or returned something else; the message names it and the prompt's row.
    """
    if group_filter is None:
        return True, ""
    name = getattr(group_filter, "__qualname__", repr(group_filter))
    try:
        result: Any = group_filter(group)
    except KeyboardInterrupt:
        raise
    except BaseException as e:  # a filter may call sys.exit(), too
        raise ValueError(
            f"{group.prompt.source}: the filter {name} ({_FLAG}) raised {describe(e)}\n{traceback.format_exc()}"
        ) from e
    keep, reason = result if isinstance(result, tuple) and len(result) == 2 else (result, "filter")
    # numpy booleans are no bool.
    if type(keep).__name__ not in ("bool", "bool_"):
        raise ValueError(
            f"{group.prompt.source}: the filter {name} ({_FLAG}) returned {shown(result)}; "
            "it must return a bool, or a tuple of a bool and a reason"
        )
    return bool(keep), (reason if isinstance(reason, str) else shown(reason)) or "filter"
