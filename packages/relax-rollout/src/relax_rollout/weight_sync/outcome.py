"""How a push ends on all ranks when engines can fail one by one."""

import dataclasses
from collections.abc import Mapping, Sequence

from relax_data.types import WeightVersion

from relax_rollout.weight_sync.base import PushReport, WeightPushFailed
from relax_rollout.weight_sync.ranks import Ranks


def conclude(
    ranks: Ranks,
    version: WeightVersion,
    *,
    engines: Sequence[str],
    report: PushReport,
    failed: Mapping[str, str],
    failure: str | None,
) -> PushReport:
    """The report of a push, with what all ranks know; collective.

    Args:
        ranks: the trainer's.
        version: that was pushed.
        engines: names of those that were to get it.
        report: what this rank sent.
        failed: why engines of this rank did not get it.
        failure: why this rank could not go on itself.

    Raises:
        WeightPushFailed: on every rank, when one could not go on, or no engine has the version.
    """
    told = ranks.everyones((failure, dict(failed)))
    known = {name: why for _, failures in told for name, why in failures.items()}
    merged = {name: known[name] for name in engines if name in known}
    why = "; ".join(f"{name}: {text}" for name, text in merged.items())
    for rank, (error, _) in enumerate(told):
        if error is not None:
            raise WeightPushFailed(
                f"rank {rank} could not push weights of version {version}, and its engines refuse to generate until "
                f"they are pushed again as a whole. {error}"
            )
    if len(merged) == len(engines):
        raise WeightPushFailed(f"weights of version {version} did not reach any engine. {why or 'There is none.'}")
    return dataclasses.replace(report, failed=merged)
