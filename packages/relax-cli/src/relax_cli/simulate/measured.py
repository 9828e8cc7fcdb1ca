"""The figures of a run that has taken place, out of its ``metrics.jsonl`` and ``config.toml``."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from relax_profiling.timeline.read import read_timeline

from relax_cli.config.files import read_file
from relax_cli.config.options import namespace
from relax_cli.run.folder import METRICS, TIMELINE
from relax_cli.simulate.steps import LENGTHS, of_last_mode, read_steps

_TRAINER = ("time/fetch", "time/log_probs", "time/ref_log_probs", "time/train", "time/train_wait")
_ALIKE = 0.01
"""Least sine squared of the angle between two columns of equations that tell two unknowns apart."""


class TooMuchAlike(ValueError):
    """The rollouts of a run do not tell how the rate of an engine rises with the number of its requests."""


def _folder_problem(folder: Path) -> str | None:
    """What keeps a place from being the folder of a run with steps, and what to name instead."""
    if folder.is_file():
        return f"it is a file; name the folder of a run, {folder.parent if folder.name == METRICS else 'runs/NAME'}"
    if not folder.is_dir():
        return "there is no such folder; name the folder of a run, runs/NAME"
    if (folder / METRICS).is_file() and (folder / "config.toml").is_file():
        return None
    if (folder / "config.toml").is_file():
        return f"there is no {METRICS} in it yet; wait until the run has logged its first step"
    missing = "config.toml" if (folder / METRICS).is_file() else METRICS
    runs = sorted(path.parent for path in folder.glob(f"*/{METRICS}"))
    instead = f"a run in it, for example {runs[0]}" if runs else "the folder of a run, runs/NAME"
    return f"there is no {missing} in it; name {instead}"


class MeasuredRun:
    """A run that has trained steps. The first one, in which everything warms up, is left out if there are others.

    Args:
        folder: the run's.

    Attributes:
        notes: in words, what of the run is left out.

    Raises:
        ValueError: it is no folder of a run, or nothing was trained in it; the message says what is missing.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if (problem := _folder_problem(folder)) is not None:
            raise ValueError(f"--from {folder}: {problem}")
        layer = read_file(folder / "config.toml", namespace())
        if layer.errors:
            raise ValueError(f"--from {folder}: {layer.errors[0]}")
        self._options = {name: option.default for name, option in namespace().options.items()}
        self._options |= {name: given.value for name, given in layer.values.items() if name in self._options}
        try:
            steps, skipped = read_steps(folder / METRICS)
        except OSError as error:
            raise ValueError(f"--from {folder}: {METRICS} cannot be read: {error.strerror}") from None
        trained = [step for step in steps if step.number("time/step") and step.number("train/total_tokens")]
        if not trained:
            raise ValueError(
                f"--from {folder}: {METRICS} holds no step that was trained; wait for the first ones, or name a run "
                "that trains" + (f". {skipped}" if skipped else "")
            )
        used, mixed = of_last_mode(trained)
        self._is_async = bool(self._options["fully_async"])
        if used[-1].is_async != self._is_async:
            names = ("colocate", "fully async")
            raise ValueError(
                f"--from {folder}: config.toml is of a start as {names[self._is_async]}, and the last step in "
                f"{METRICS} is of {names[used[-1].is_async]}; wait for the first step of that start"
            )
        if self._is_async and self._options["actor_num_gpus_per_node"] is None:
            self._options["actor_num_gpus_per_node"] = self._gpus_taken()
        self.steps = used[1:] or used
        first = None
        if self.steps[0] is trained[0]:
            first = "The run has trained one step, in which everything warms up: its figures are those of a slow one."
        self.notes = tuple(note for note in (skipped, mixed, first) if note)

    def _gpus_taken(self) -> int | None:
        """GPUs of a node that trained, where the run chose them itself; 0 on CPU, None without a timeline."""
        try:
            steps, _ = read_timeline(self.folder / TIMELINE)
        except OSError:
            return None
        if not steps:
            return None
        setup = steps[-1].run
        return 0 if setup.device == "cpu" else setup.train_gpus // self._options["actor_num_nodes"]

    @property
    def keeps_cache(self) -> bool:
        """Whether its responses kept keys and values over a push of weights."""
        return self._is_async and not self._options["recompute_kv_cache_after_weight_updates"]

    def value(self, name: str) -> tuple[float, str] | None:
        """The figure of an option of ``relax simulate``, and what it was read from; None when a run has no such figure.

        Raises:
            ValueError: the run should have it and does not tell it.
        """
        readers: dict[str, Callable[[], tuple[float, str] | None]] = {
            "num_gpus": self._num_gpus,
            "train_rate": self._train_rate,
            "push_seconds": self._push_seconds,
            "switch_seconds": self._switch_seconds,
            "prompt_length": self._prompt_length,
        }
        if name in readers:
            return readers[name]()
        setting = self._options.get(name)
        return None if setting is None else (setting, "config.toml")

    def lengths(self) -> dict[int, int]:
        """Response lengths of all steps, and how often each occurred.

        Raises:
            ValueError: they were not logged.
        """
        counts: Counter[int] = Counter()
        for step in self.steps:
            counts.update(step.lengths())
        if not counts:
            raise self._lacks(f"histogram {LENGTHS}", "--response-lengths or --response-length-mean")
        return counts

    def engine(self, *, rate: float | None, half: float | None) -> tuple[float, float, str]:
        """Rate of an engine, the requests at which it has half of it, and how well both explain the run.

        See :func:`fit_engine`.

        Args:
            rate: the first one, where it is known.
            half: the second one, where it is known.

        Raises:
            TooMuchAlike: the run would tell one of them if the other one were known.
            ValueError: the run does not tell it.
        """
        points = self._busy_points() if self._is_async else self._rollout_points()
        try:
            rate, half = fit_engine(points, rate=rate, half=half)
        except TooMuchAlike:
            raise
        except ValueError as error:
            raise ValueError(f"--from {self.folder}: {error}") from None
        off = sum(abs(s - (tokens + half * longest) / rate) for tokens, longest, s in points) / sum(
            p[2] for p in points
        )
        what = "the time with requests of" if self._is_async else "time/generate of"
        several = "s" * (len(points) > 1)
        return rate, half, f"{what} {len(points)} rollout{several}, of which it is off by {off:.0%}"

    def _rollout_points(self) -> list[tuple[float, float, float]]:
        """Of each rollout of colocate, whose requests start together: see :func:`fit_engine`."""
        points: list[tuple[float, float, float]] = []
        for step in self.steps:
            lengths = step.lengths()
            tokens = sum(length * n for length, n in lengths.items())
            generated, seconds = step.number("rollout/tokens") or 0.0, step.number("time/generate")
            # The time of a rollout says how fast the engines are, if it generated what was trained and nothing else.
            same = abs(tokens - generated) <= 0.02 * tokens and not step.number("rollout/kept_tokens")
            if tokens and same and seconds:
                points.append((tokens / self._parts()[1], max(lengths), seconds))
        if not points:
            what = f"step that generated just what it trained (no over-sampling, no filter) with {LENGTHS}"
            raise self._lacks(what, "--engine-rate and --engine-half")
        return points

    def _busy_points(self) -> list[tuple[float, float, float]]:
        """Of each step of a run whose engines generate all the time, while they had requests.

        With ``k`` requests the tokens take ``(tokens + half * tokens / k) / rate`` seconds: as
        :func:`fit_engine` has it, where the longest response has ``tokens / k`` tokens.
        """
        points, engines = [], self._parts()[1]
        for step in self.steps:
            tokens, seconds = step.number("rollout/tokens"), step.number("time/step")
            busy, running = step.number("async/engine_busy_share"), step.number("async/running_requests_mean")
            if tokens and seconds and busy and running:
                points.append((tokens / engines, tokens / engines / (running / busy), busy * seconds))
        if not points:
            what = "step with rollout/tokens, async/engine_busy_share and async/running_requests_mean above 0"
            raise self._lacks(what, "--engine-rate and --engine-half")
        return points

    def _parts(self) -> tuple[int, int]:
        """(GPUs that train, engines). What runs on CPU counts as one GPU a node."""
        nodes, each = self._options["actor_num_nodes"], self._options["actor_num_gpus_per_node"]
        per_engine = self._options["rollout_num_gpus_per_engine"]
        serving = [found for step in self.steps if (found := step.number("engines/serving")) is not None]
        engines, flags = int(max(serving, default=0)), "--num-gpus, --train-rate, --engine-rate and --engine-half"
        if each is None and engines and not self._is_async:
            return engines * per_engine, engines
        if each is None and engines:
            raise ValueError(f"--from {self.folder}: config.toml has no actor_num_gpus_per_node; give {flags}")
        # One step may have been logged while all engines restarted; not every one.
        if not engines and (serving or each is None or self._is_async):
            raise self._lacks("engines/serving" + " above 0" * bool(serving), flags)
        train = nodes * max(1, each)
        return train, engines or max(1, train // per_engine)

    def _num_gpus(self) -> tuple[float, str]:
        train, engines = self._parts()
        rollout = engines * self._options["rollout_num_gpus_per_engine"]
        return train + rollout * self._is_async, "config.toml and engines/serving"

    def _train_rate(self) -> tuple[float, str]:
        self._mean("time/train", "--train-rate")  # the main part, which no step lacks
        seconds = sum(map(self._sum, _TRAINER))
        gpus, _ = self._parts()
        return self._sum("train/total_tokens") / seconds / gpus, f"train/total_tokens / seconds of training / {gpus}"

    def _push_seconds(self) -> tuple[float, str]:
        mean = self._mean("time/weight_update", "--push-seconds")
        if not self._is_async:
            return mean, "mean of time/weight_update"
        rest = (self._sum("time/pause") + self._sum("time/resume")) / len(self.steps)
        return mean + rest, "mean of time/pause + weight_update + resume"

    def _switch_seconds(self) -> tuple[float, str]:
        if self._is_async:
            if self._options["actor_num_gpus_per_node"] == 0:
                return 0.0, "on CPU nothing changes sides"
            raise ValueError(
                f"--from {self.folder}: a run of --fully-async on GPUs does not show how long colocate takes to change "
                "sides; give --switch-seconds, for instance from a short colocate run, or 0 to leave it out"
            )
        spent = self._sum("time/sleep_wake") + self._sum("time/other")
        return spent / len(self.steps), "mean of time/sleep_wake + time/other"

    def _prompt_length(self) -> tuple[float, str]:
        samples, tokens = self._mean("train/samples", "--prompt-length"), self._sum("train/total_tokens")
        responses = self._mean("rollout/response_length", "--prompt-length")
        prompt = max(0.0, tokens / (samples * len(self.steps)) - responses)
        return prompt, "train/total_tokens / train/samples - rollout/response_length"

    def _sum(self, name: str) -> float:
        return math.fsum(step.number(name) or 0.0 for step in self.steps)

    def _mean(self, name: str, instead: str) -> float:
        if any(step.number(name) is None for step in self.steps):
            raise self._lacks(name, instead)
        return self._sum(name) / len(self.steps)

    def _lacks(self, what: str, instead: str) -> ValueError:
        return ValueError(f"--from {self.folder}: {METRICS} has no {what}; give {instead}")


def fit_engine(
    points: Sequence[tuple[float, float, float]], *, rate: float | None, half: float | None
) -> tuple[float, float]:
    """The two constants of ``rate(k) = rate * k / (k + half)``.

    A request gets ``rate / (k + half)`` tokens a second. When all of a rollout start together, and ``k(i)`` of them
    have more than ``i`` tokens, token ``i`` of all takes ``(k(i) + half) / rate`` seconds, and the whole rollout
    ``(tokens + half * longest) / rate``.

    Args:
        points: of each rollout: tokens of one engine, tokens of the longest response, seconds.
        rate: tokens/s with very many requests, where it is known.
        half: requests with half of that, where it is known.

    Raises:
        TooMuchAlike: no constant is known, and the rollouts do not tell both.
        ValueError: what is known cannot be.
    """
    tokens, longest, seconds = (math.fsum(column) for column in zip(*points, strict=True))
    if half is None and rate is not None:
        half = (rate * seconds - tokens) / longest
        if half < 0:
            raise ValueError(
                f"--engine-rate {rate:g} is too low: an engine generated {tokens / seconds:.0f} tokens/s; give more "
                "than that, or leave it out"
            )
    if half is not None:
        return (tokens + half * longest) / seconds if rate is None else rate, half
    # Least squares of seconds = a * tokens + b * longest.
    tt, tl, ll, ts, ls = (math.fsum(p[i] * p[j] for p in points) for i, j in ((0, 0), (0, 1), (1, 1), (0, 2), (1, 2)))
    determinant = tt * ll - tl * tl
    if determinant > _ALIKE * tt * ll:
        a, b = (ts * ll - ls * tl) / determinant, (ls * tt - ts * tl) / determinant
        if a > 0 and b >= 0:
            return 1 / a, b / a
    who = "a single rollout does" if len(points) == 1 else "rollouts that are so much alike do"
    raise TooMuchAlike(f"{who} not tell it")
