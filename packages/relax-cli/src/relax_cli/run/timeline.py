"""The timeline of a run: one line a step in ``timeline.jsonl``, which ``relax report`` draws.

A line is a JSON object; times without "epoch" are seconds after ``start``::

    step      rollout id
    start     of the step, seconds since the epoch: the line of the step before
    end       of the step: this line
    seconds   that count as the step (``time/step``); an evaluation between two steps is not among them
    run       mode, GPUs and limits of this launch, for advice
    phases    [name, begin, end] of what the driver did, in order
    reprefilled  tokens of which keys and values were computed again, for each that was generated
    engines   by name: seconds and mean number of requests in each state, and intervals [state, begin, end]

An engine's time is that from the samples of the step before to those of this one, so it may begin before ``start``; the
clock is that of the rollout worker's node. A run that is resumed appends; of a step that comes again the later line
counts.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relax_cli.run.folder import ends_a_line

if TYPE_CHECKING:
    from relax_rollout.engines.usage import EngineTime

    from relax_cli.config.run_config import RunConfig


class TimelineFile:
    """Appends to the timeline. What goes wrong with it, for instance a full disk, is told once and ends no run."""

    def __init__(self, path: Path, setup: Mapping[str, Any], note: Callable[[str], None]) -> None:
        """Touches nothing yet.

        Args:
            path: of the file, in the run directory.
            setup: see :func:`setup_of`.
            note: takes a line for the user.
        """
        self._path, self._setup, self._note = path, dict(setup), note
        self._begun = self._broken = False

    def write(
        self,
        step: int,
        spans: Sequence[tuple[str, float, float]],
        usage: "Mapping[str, EngineTime]",
        *,
        began: float,
        seconds: float,
        reprefilled: float = 0.0,
    ) -> None:
        """Appends the line of a step that ends now.

        Args:
            step: rollout id.
            spans: name, begin and end of the driver's phases, seconds of ``time.perf_counter()``.
            usage: what each engine did since the step before.
            began: when the step began, of the same clock.
            seconds: that count as the step.
            reprefilled: tokens of which keys and values were computed again, for each that was generated.
        """
        if self._broken:
            return
        end = time.time()
        shift = end - time.perf_counter()  # a jump of the wall clock inside a step moves all of the step
        start = began + shift
        line = {
            "step": step,
            "start": round(start, 3),
            "end": round(end - start, 3),
            "seconds": round(seconds, 6),
            "run": self._setup,
            "phases": [[name, round(a + shift - start, 3), round(b + shift - start, 3)] for name, a, b in spans],
            "reprefilled": round(reprefilled, 3),
            "engines": {name: _engine(spent, start) for name, spent in usage.items()},
        }
        try:
            text = json.dumps(line, separators=(",", ":")) + "\n"
            if not self._begun and self._path.exists() and not ends_a_line(self._path):
                text = "\n" + text  # an earlier start was killed while it wrote
            with self._path.open("a", encoding="utf-8") as file:
                file.write(text)
            self._begun = True
        except OSError as error:
            self._broken = True
            self._note(f"the timeline ends before step {step}, {self._path} cannot be written: {error}")


def _engine(spent: "EngineTime", start: float) -> dict[str, Any]:
    means = {state: spent.request_s[state] / s if s else 0.0 for state, s in spent.seconds.items()}
    return {
        "seconds": {state: round(s, 6) for state, s in spent.seconds.items()},
        "running": {state: round(mean, 3) for state, mean in means.items()},
        "intervals": [[state, round(a - start, 3), round(b - start, 3)] for state, a, b in spent.intervals],
    }


def setup_of(config: "RunConfig") -> dict[str, Any]:
    """Mode, GPUs and limits of a run, which the advice calculates with."""
    placement, rollout = config.placement, config.rollout
    assert placement is not None, "the number of GPUs is known before a run starts"
    return {
        "mode": config.cluster.mode,
        "device": placement.device,
        "train_gpus": placement.train_ranks,
        "train_unit": placement.tp * placement.pp * placement.cp * max(1, config.cluster.actor_num_nodes),
        "engine_gpus": placement.engines * placement.gpus_per_engine,
        "gpus_per_engine": placement.gpus_per_engine,
        "rollout_batch_size": rollout.rollout_batch_size,
        "over_sampling_batch_size": rollout.submitted_prompts,
        "max_staleness": config.cluster.max_staleness,
        "partial_rollout": rollout.partial_rollout,
        "keeps_cache": not rollout.recompute_kv_cache_after_weight_updates,
        "weight_sync": config.cluster.weight_sync or ("group" if config.cluster.fully_async else ""),
    }
