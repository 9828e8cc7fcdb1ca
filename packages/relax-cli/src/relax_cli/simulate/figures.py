"""The figures of the model: given, read from a run, or assumed; each says which."""

import dataclasses
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from relax_data.options import flag

from relax_cli.config.run_config import ConfigError
from relax_cli.simulate.measured import MeasuredRun, TooMuchAlike
from relax_cli.simulate.model import Rates
from relax_cli.simulate.settings import LONGEST, SimulateSettings
from relax_cli.simulate.steps import LENGTHS

_ASSUMED: dict[str, float | None] = {
    "num_gpus": 8,
    "rollout_num_gpus_per_engine": 1,
    "rollout_batch_size": 32,
    "n_samples_per_prompt": 8,
    "train_rate": None,
    "push_seconds": 1,
    "switch_seconds": 2,
    "sglang_server_concurrency": 512,
    "prompt_length": 0,
}
"""What stands for a figure that is not given when there is no run to read it from; None: it is needed."""


def assumed_half(context: float) -> float:
    """``--engine-half`` of a run whose rollouts do not tell: that of a model of 4 B parameters on an H200.

    A step of decoding took it 4.2 ms, and for each request 0.008 ms and 45 ns a token of its context, whose keys and
    values it reads (SGLang 0.5.17, 64 to 256 requests of up to 2048 tokens).

    Args:
        context: mean tokens of prompt and response that a request has while it runs.
    """
    return 4.2 / (0.008 + 45e-6 * context)


Draw = Callable[[random.Random], int]


@dataclasses.dataclass(frozen=True)
class Figure:
    """A number, or in words what it is, and where it comes from."""

    value: float | str
    source: str


class Figures:
    """All figures by the names of their options.

    Attributes:
        table: every figure with its source.
        draw: makes one response length.
        assumed: names of the figures that are neither given nor read.
        constant_rate: what ``engine_rate`` would be with an ``engine_half`` of 0, where that one is assumed.
        notes: in words, what of the run is left out.

    Raises:
        ConfigError: figures are missing or cannot be read; holds all problems.
    """

    def __init__(self, settings: SimulateSettings) -> None:
        self.table: dict[str, Figure] = {}
        self.draw: Draw = lambda _: 1
        self.assumed: list[str] = []
        self.constant_rate: float | None = None
        self._settings = settings
        run, problems = None, []
        if settings.from_run is not None:
            try:
                run = MeasuredRun(Path(settings.from_run).expanduser())
            except ValueError as error:
                raise ConfigError([str(error)]) from None
        self._run, self.notes = run, () if run is None else run.notes
        if run is not None and run.keeps_cache and settings.recompute_kv_cache_after_weight_updates:
            self.notes += (
                "The run kept keys and values over its pushes, and the rows compute them again: "
                "--no-recompute-kv-cache-after-weight-updates makes them as the run was.",
            )
        for read in (*((lambda name=name: self._find(name)) for name in _ASSUMED), self._lengths, self._engine):
            try:
                read()
            except ValueError as error:
                problems.append(str(error))
        numbers: dict[str, Any] = {
            name: found.value for name, found in self.table.items() if name != "response_lengths"
        }
        problems += (f"--from {settings.from_run}: {p}" for p in dataclasses.replace(settings, **numbers).problems())
        if problems:
            raise ConfigError(list(dict.fromkeys(problems)))
        if not self._is_given("prefill_rate"):
            prefill = 3 * self.number("train_rate") * self.number("rollout_num_gpus_per_engine")
            words = "assumed, 3 x --train-rate: a forward pass is a third of training"
            self.table["prefill_rate"] = Figure(prefill, words)
            self.assumed.append("prefill_rate")

    def number(self, name: str) -> float:
        """The figure of that option."""
        value = self.table[name].value
        assert not isinstance(value, str)
        return value

    def rates(self, **instead: float) -> Rates:
        """The speeds for the model.

        Args:
            instead: figures by name that stand for those of the table.
        """

        def number(name: str) -> float:
            return instead.get(name, self.number(name))

        return Rates(
            engine=number("engine_rate"),
            half=number("engine_half"),
            prefill=number("prefill_rate"),
            train=number("train_rate"),
            push_s=number("push_seconds"),
            switch_s=number("switch_seconds"),
            concurrency=int(number("sglang_server_concurrency")),
        )

    def _is_given(self, name: str) -> bool:
        value = getattr(self._settings, name)
        if value is not None:
            self.table[name] = Figure(value, flag(name))
        return value is not None

    def _find(self, name: str) -> None:
        if self._is_given(name):
            return
        found = self._run.value(name) if self._run is not None else None
        if found is not None:
            self.table[name] = Figure(found[0], f"the run: {found[1]}")
        elif self._run is None and (assumed := _ASSUMED[name]) is not None:
            self.table[name] = Figure(assumed, f"assumed; {flag(name)} sets it")
            self.assumed.append(name)
        else:
            raise ValueError(f"{flag(name)} is needed: give it, or --from RUN_DIR with a run that shows it")

    def _engine(self) -> None:
        rate, half = self._is_given("engine_rate"), self._is_given("engine_half")
        if rate and half:
            return
        if self._run is None:
            missing = [flag(n) for n, is_given in (("engine_rate", rate), ("engine_half", half)) if not is_given]
            what = "is needed too: give it" if len(missing) == 1 else "are needed: give both"
            raise ValueError(f"{' and '.join(missing)} {what}, or --from RUN_DIR with a run that shows it")
        try:
            *fitted, source = self._run.engine(rate=self._settings.engine_rate, half=self._settings.engine_half)
        except TooMuchAlike as error:
            self.constant_rate, *_ = self._run.engine(rate=None, half=0.0)
            prompt = self.number("prompt_length") if "prompt_length" in self.table else 0.0
            assumed = assumed_half(prompt + self._mean_length_running())
            *fitted, source = self._run.engine(rate=None, half=assumed)
            words = f"assumed, as of 4 B on an H200 with such lengths: {error}; --engine-half sets it"
            self.table["engine_half"] = Figure(assumed, words)
            self.assumed.append("engine_half")
        for name, value in zip(("engine_rate", "engine_half"), fitted, strict=True):
            self.table.setdefault(name, Figure(value, f"the run: {source}"))

    def _mean_length_running(self) -> float:
        """Tokens that a response has while it runs, in the mean: one that becomes long runs longer."""
        draws = random.Random(0)
        lengths = [self.draw(draws) for _ in range(1000)]
        return sum(n * n / 2 for n in lengths) / sum(lengths)

    def _lengths(self) -> None:
        given = self._settings
        if given.response_length_mean is not None and given.rollout_max_response_len is not None:
            mean, sigma, cap = given.response_length_mean, given.response_length_sigma, given.rollout_max_response_len
            middle = math.log(mean) - sigma**2 / 2
            self.draw = lambda r: max(1, min(cap, round(r.lognormvariate(middle, sigma))))
            words = f"log-normal, mean {mean:g}, sigma {sigma:g}, at most {cap}"
            self.table["response_lengths"] = Figure(words, "--response-length-mean")
            return
        if given.response_lengths is not None:
            counts, source = _read_lengths(Path(given.response_lengths)), "--response-lengths"
        elif self._run is not None:
            counts, source = self._run.lengths(), f"the run: histogram {LENGTHS}"
        else:
            raise ValueError(
                "response lengths are needed: give --response-length-mean and --rollout-max-response-len, "
                "--response-lengths FILE, or --from RUN_DIR"
            )
        values, weights = list(counts), list(counts.values())
        self.draw = lambda r: r.choices(values, weights)[0]
        mean = sum(value * n for value, n in counts.items()) / sum(weights)
        words = f"{sum(weights)} lengths, mean {mean:.0f}, longest {max(values)}"
        self.table["response_lengths"] = Figure(words, source)


def _read_lengths(path: Path) -> dict[int, int]:
    """Lengths of a text file and how often each occurs.

    Raises:
        ValueError: it cannot be read, or holds something else; the message names the word.
    """
    counts: dict[int, int] = {}
    try:
        words = path.expanduser().read_text(encoding="utf-8").split()
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"--response-lengths {path}: cannot be read: {why}") from None
    for place, word in enumerate(words, 1):
        if not word.isdecimal() or len(word) > 8 or not 1 <= int(word) <= LONGEST:
            raise ValueError(
                f"--response-lengths {path}: word {place} is {word[:40]!r}, not a length of 1 to {LONGEST}"
            )
        counts[int(word)] = counts.get(int(word), 0) + 1
    if not counts:
        raise ValueError(f"--response-lengths {path}: is empty; write lengths in tokens, separated by blanks or lines")
    return counts
