"""Finds the rank that the others wait for: the collectives of several ranks, matched one by one."""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence

from relax_profiling.analysis.breakdown import step_spans
from relax_profiling.trace.load import Collective, Trace

# These end at the same time on every rank, whatever its clock says.
_SYNCHRONISING = frozenset(
    {"allreduce", "allgather", "_allgather_base", "reduce_scatter", "_reduce_scatter_base", "alltoall", "all_to_all"}
)
# Clocks of one host agree to microseconds; those of two hosts are set by NTP.
_SAME_CLOCK_US = 1000.0


@dataclasses.dataclass(frozen=True)
class RankWaits:
    """One rank among its peers.

    Attributes:
        collectives: matched with at least one other rank.
        last: in how many of them it arrived last.
        waits: microseconds that it spent inside collectives until the last rank arrived.
        delays: microseconds by which it, arriving last, came later than the last but one.
        clock_offset: microseconds that its clock is ahead of the first rank's, as far as collectives tell.
    """

    collectives: int
    last: int
    waits: float
    delays: float
    clock_offset: float = 0.0


@dataclasses.dataclass(frozen=True)
class RankTrace:
    """The trace of one rank, under the label of the rank. ``number`` is the caller's, to know it again by."""

    label: str
    trace: Trace
    number: int

    @property
    def start(self) -> float:
        """Microseconds since the epoch, on the rank's clock."""
        return self.trace.base + self.trace.first

    @property
    def end(self) -> float:
        """Microseconds since the epoch, on the rank's clock."""
        return self.trace.base + self.trace.last


def match_recordings(traces: Sequence[RankTrace]) -> tuple[list[list[RankTrace]], list[str]]:
    """Groups the traces of one run and target that were recorded together: they overlap in time.

    Returns:
        The groups, also those of one rank; and in words, which ranks recorded the same steps at times so far apart that
        their clocks must differ. Nothing tells then which of their collectives belong together.
    """
    groups: list[list[RankTrace]] = []
    for item in sorted(traces, key=lambda t: t.start):
        same = groups and groups[-1][-1]
        if same and item.start < same.end and item.label not in {t.label for t in groups[-1]} and _may_pair(item, same):
            groups[-1].append(item)
        else:
            groups.append([item])
    numbers: dict[str, int] = {}
    alike: dict[tuple[str, ...], list[list[RankTrace]]] = {}
    for group in groups:
        first = group[0]
        numbers[first.label] = numbers.get(first.label, 0) + 1
        alike.setdefault(_steps(first) or (f"recording {numbers[first.label]}",), []).append(group)
    return groups, [said for same_steps in alike.values() for said in _clocks_apart(same_steps)]


def _clocks_apart(groups: list[list[RankTrace]]) -> list[str]:
    """What is to be said of groups that recorded the same steps."""
    said = []
    reference = groups[0]
    for group in groups[1:]:
        if {t.label for t in group} & {t.label for t in reference}:
            continue  # a rank recorded these steps twice: two launches in one folder
        a, b = reference[0], group[0]
        if _keyed(a.trace).keys() & _keyed(b.trace).keys():
            said.append(
                f"{b.label} begins {(b.start - a.start) / 1e6:.3f} s after {a.label}, which had ended by then: their "
                "clocks differ by more than the recording, and the two are not compared"
            )
    return said


def _steps(rank: RankTrace) -> tuple[str, ...]:
    return tuple(name for name, _, _ in step_spans(rank.trace))


def _may_pair(a: RankTrace, b: RankTrace) -> bool:
    """Whether the marks of two traces do not speak against one recording."""
    first, second = set(_steps(a)), set(_steps(b))
    return not first or not second or bool(first & second)


Key = tuple[str, str, str, int]


def _keyed(trace: Trace) -> dict[Key, Collective]:
    """Collectives by what they are and their number among their like, which is the same on all ranks of a group."""
    counts: dict[tuple[str, str, str], int] = {}
    keyed: dict[Key, Collective] = {}
    for c in trace.collectives:
        like = (c.kind, c.group, c.members)
        n = counts.get(like, 0)
        counts[like] = n + 1
        keyed[(*like, n)] = c
    return keyed


def clock_offsets(traces: Mapping[str, Trace]) -> dict[str, float]:
    """Microseconds by which each rank's clock is ahead of the first one's; 0 where collectives do not tell.

    A rank that shares no group with the first is told by a third one: with tensor and data parallelism no group may
    hold all ranks.
    """
    keyed = {
        label: {key: c.end for key, c in _keyed(trace).items() if c.kind in _SYNCHRONISING}
        for label, trace in traces.items()
    }
    offsets: dict[str, float] = {}
    for first in traces:
        if first in offsets:
            continue
        offsets[first] = 0.0
        known = [first]
        for label in known:  # grows while it is gone through
            for other in traces:
                shared = () if other in offsets else keyed[label].keys() & keyed[other].keys()
                if not shared:
                    continue
                ahead = traces[other].base - traces[label].base
                middle = ahead + statistics.median(keyed[other][key] - keyed[label][key] for key in shared)
                offsets[other] = offsets[label] + (middle if abs(middle) > _SAME_CLOCK_US else 0.0)
                known.append(other)
    return offsets


def rank_waits(traces: Mapping[str, Trace]) -> dict[str, RankWaits]:
    """Compares the ranks of one recording; empty when fewer than two of them share collectives.

    Args:
        traces: label of a rank -> its trace.
    """
    offsets = clock_offsets(traces)
    arrivals: dict[Key, list[tuple[float, str, float]]] = {}
    for label, trace in traces.items():
        shift = trace.base - offsets[label]
        for key, c in _keyed(trace).items():
            arrivals.setdefault(key, []).append((shift + c.start, label, c.end - c.start))
    matched = {label: 0 for label in traces}
    last = dict(matched)
    waits = {label: 0.0 for label in traces}
    delays = dict(waits)
    for ranks in arrivals.values():
        if len(ranks) < 2:
            continue
        ranks.sort()
        latest, label, _ = ranks[-1]
        last[label] += 1
        delays[label] += latest - ranks[-2][0]
        for start, who, duration in ranks:
            matched[who] += 1
            waits[who] += min(latest - start, duration)
    return {
        label: RankWaits(matched[label], last[label], waits[label], delays[label], offsets[label])
        for label in traces
        if matched[label]
    }
