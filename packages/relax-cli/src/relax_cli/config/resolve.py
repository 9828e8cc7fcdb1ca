"""From the words of a command line to one checked :class:`RunConfig`.

Defaults < ``--config`` file < environment ``RELAX_<KEY>`` < command line are merged first, then what follows from other
options is derived, then everything is checked. All errors of one start are reported together.
"""

import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from relax_data.settings import DataSettings
from relax_profiling.settings import MemoryProfileSettings, SGLangProfileSettings, TrainProfileSettings
from relax_rollout.engines.sglang.settings import SGLangSettings
from relax_rollout.settings import EvalSettings, RewardSettings, RolloutSettings
from relax_train.settings import TrainSettings

from relax_cli.cluster.placement import Placement, make_placement
from relax_cli.config import files
from relax_cli.config import options as registry
from relax_cli.config.command_line import Given, Layer, Namespace, read_command_line, read_environment
from relax_cli.config.derive import derive, run_name
from relax_cli.config.schema import UNSET
from relax_cli.config.settings import ClusterSettings, DebugSettings, LoggingSettings, RunSettings
from relax_cli.config.suggest import nearest

_ONLY_THIS_COMMAND = ("config", "dry_run", "print_config")
"""Options that :func:`to_toml` leaves out: they say what this command does, not what the run is."""


class ConfigError(ValueError):
    """Everything that is wrong with one start.

    Attributes:
        problems: one message each, with the option, where it was given, and the fix.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = list(problems)
        super().__init__("\n".join(self.problems))


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """All settings of a run, resolved and checked. Picklable; needs no torch.

    Attributes:
        name: ``--tb-experiment-name``, or the one that was made for this run.
        run_dir: absolute ``runs/NAME``: logs, metrics, summary.
        trace_dir: absolute ``traces/NAME``: what the profilers write.
        placement: processes of the run; None when the run takes all GPUs of a Ray cluster it has not joined yet.
        given: names of the options that the user set, in snake_case. An SGLang server argument that was passed through
            stands there under its own name, and so does ``sglang_extra``.
        warnings: what is allowed but probably not meant.
        notes: what a real start would still need; only a plan (``--dry-run``, ``--print-config``) may have some.
    """

    data: DataSettings
    rollout: RolloutSettings
    reward: RewardSettings
    eval: EvalSettings
    sglang: SGLangSettings
    train: TrainSettings
    sglang_profile: SGLangProfileSettings
    train_profile: TrainProfileSettings
    memory_profile: MemoryProfileSettings
    cluster: ClusterSettings
    run: RunSettings
    logging: LoggingSettings
    debug: DebugSettings
    name: str
    run_dir: Path
    trace_dir: Path
    placement: Placement | None
    given: frozenset[str]
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        """The driver's current directory, which relative paths are relative to."""
        return self.run_dir.parent.parent

    def parts(self) -> list[Any]:
        """All settings objects, the trainer's one by one."""
        found: list[Any] = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, TrainSettings):
                found += [getattr(value, f.name) for f in dataclasses.fields(value)]
            elif hasattr(type(value), "TITLE"):
                found.append(value)
        return found

    def rank_tag(self, rank: int) -> dict[str, int]:
        """``{"rank", "dp", "tp", "pp"}`` of a trainer rank, for the names of its files."""
        assert self.placement is not None, "the number of GPUs must be known before ranks have places"
        return self.placement.rank_tag(rank)


def resolve(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> RunConfig:
    """Resolves ``relax train ARGV``.

    Args:
        argv: the words after ``relax train``.
        environ: environment to read ``RELAX_<KEY>`` from.

    Raises:
        ConfigError: anything is wrong with the options; holds all problems.
    """
    from relax_cli.checks.validate import problems_of, warnings_of

    namespace = registry.namespace()
    given, errors, failed, complete = _merge(argv, environ, namespace)
    values = {name: option.default for name, option in namespace.options.items()}
    values["sglang_extra"] = {}
    for name, item in given.items():
        if item.value is UNSET:
            continue
        if name in namespace.options:
            values[name] = item.value
        else:
            values["sglang_extra"][name.removeprefix("sglang_")] = item.value
    names = _names_given(given, namespace)
    meant = {name for wrong in failed for name in nearest(wrong, namespace.options, limit=1)}
    missing = [o for o in namespace.options.values() if o.required and o.name not in given]
    for option in missing:
        values[option.name] = ""
        if option.name not in failed | meant and complete:
            errors.append(f"{option.flag} is required: {option.help}")
    planning = bool(values["dry_run"] or values["print_config"])
    derive(values, names, planning=planning, environ=environ)
    config = _build(values, names)
    if complete:
        silent = failed | {option.name for option in missing}
        wrong, needed = problems_of(config, planning=planning)
        errors += _told(wrong, given, silent)
        needed = _told(needed, given, silent | meant)
        if planning:
            config = dataclasses.replace(config, notes=tuple(needed))
        else:
            errors += needed
    if errors:
        raise ConfigError(list(dict.fromkeys(errors)))
    return dataclasses.replace(config, warnings=tuple(warnings_of(config)))


def _merge(
    argv: Sequence[str], environ: Mapping[str, str], namespace: Namespace
) -> tuple[dict[str, Given], list[str], set[str], bool]:
    """(options given, errors, names that could not be read, whether the file could be read at all)."""
    command, environment = read_command_line(argv, namespace), read_environment(environ, namespace)
    path = command.values.get("config") or environment.values.get("config")
    file = (
        files.read_file(Path(os.path.expanduser(path.value)), namespace)
        if path and path.value is not UNSET
        else Layer()
    )
    layers = (file, environment, command)
    merged: dict[str, Given] = {}
    for layer in layers:
        merged.update(layer.values)
    failed = set().union(*(layer.failed for layer in layers))
    errors = [error for layer in layers for error in layer.errors]
    unreadable = "config" in failed or (bool(file.errors) and not file.failed and not file.values)
    return merged, errors, failed, not unreadable


def _names_given(given: Mapping[str, Given], namespace: Namespace) -> frozenset[str]:
    """Names that count as set: those that ``none`` takes back do not."""
    names = {name for name, item in given.items() if item.value is not UNSET}
    return frozenset(names | ({"sglang_extra"} if names - namespace.options.keys() else set()))


def _build(values: dict[str, Any], given: frozenset[str]) -> RunConfig:
    def make(cls: type) -> Any:
        arguments = {}
        for field in dataclasses.fields(cls):
            part = registry.part_class(cls, field.name)
            arguments[field.name] = make(part) if part else values[field.name]
        return cls(**arguments)

    settings = {name: make(cls) for name, cls in registry.attributes(RunConfig).items()}
    name = values["tb_experiment_name"] or run_name()
    here = Path.cwd()
    return RunConfig(
        **settings,
        name=name,
        run_dir=here / "runs" / name,
        trace_dir=here / "traces" / name,
        placement=make_placement(settings["cluster"], settings["train"].parallel, settings["sglang"]),
        given=given,
    )


def _told(problems: Sequence[str], given: Mapping[str, Given], silent: set[str]) -> list[str]:
    """Problems as they are reported: with the place of options that stand in a file or in the environment.

    A problem about an option whose own value could not be read only repeats that error, and is left out.
    """
    told = []
    for problem in problems:
        mentioned = {word.replace("-", "_") for word in re.findall(r"--([a-z0-9][a-z0-9-]*)", problem)}
        if mentioned & silent:
            continue
        places = [
            f"--{name.replace('_', '-')} from {given[name].origin}"
            for name in sorted(mentioned & given.keys())
            if given[name].origin != "command line"
        ]
        told.append(problem + (f" [{', '.join(places)}]" if places else ""))
    return told


def fit(config: RunConfig, available_gpus: int) -> RunConfig:
    """The configuration once the cluster is known: with its ``placement``, checked against model and batch.

    Args:
        available_gpus: GPUs of the cluster that the run has joined; 0 puts the run on CPU.

    Raises:
        ConfigError: the options do not fit the cluster.
    """
    from relax_cli.checks.validate import placement_problems

    placement = make_placement(config.cluster, config.train.parallel, config.sglang, available_gpus=available_gpus)
    fitted = dataclasses.replace(config, placement=placement)
    problems = placement_problems(fitted, available_gpus)
    if problems:
        raise ConfigError(problems)
    return fitted


def to_toml(config: RunConfig) -> str:
    """The options of a run as TOML for ``--config``: those that were given, and all others as comments.

    Reading the text back gives the same settings and the same ``given``.
    """
    namespace = registry.namespace()
    lines = [
        "# Options of `relax train`. A comment shows a default, or what was derived from other options.",
        '# "none" is what nobody set; where something follows from that at the start, it stands behind.',
    ]
    for part in config.parts():
        lines += ["", f"# {type(part).TITLE}"]
        for field in dataclasses.fields(part):
            value = getattr(part, field.name)
            if field.name == "sglang_extra":
                lines += [f"sglang_{k} = {files.to_toml(v)}" for k, v in sorted(value.items())]
            elif field.name in namespace.options and field.name not in _ONLY_THIS_COMMAND:
                line = f"{field.name} = {files.to_toml(value)}"
                how = _derivation(config, field) if value is None else ""
                lines.append(line if field.name in config.given else f"# {line}{how}")
    return "\n".join(lines) + "\n"


_DEFAULT = re.compile(r"\b(?:[Dd]efault:?|by default) (.+?)(?:[.;](?= )|\.?$)")


def _derivation(config: RunConfig, field: dataclasses.Field[Any]) -> str:
    """What an option that is not set comes to be once the run starts, as its help says; empty when it stays unset."""
    from relax_cli.checks.lengths import context_lengths

    if field.name == "rollout_max_context_len" and (longest := context_lengths(config).trained) is not None:
        return f"  # here {longest} tokens, from the model and --max-tokens-per-gpu"
    found = _DEFAULT.search(field.metadata["help"])
    return f"  # by default {found[1]}" if found else ""
