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

from relax_cli.checks.validate import placement_problems, problems_of, warnings_of
from relax_cli.cluster.placement import make_placement
from relax_cli.config import files, options
from relax_cli.config.command_line import (
    MOST_SUGGESTIONS,
    Given,
    Layer,
    Namespace,
    read_command_line,
    read_environment,
)
from relax_cli.config.derive import derive, run_name
from relax_cli.config.mode_switch import switch_mode
from relax_cli.config.run_config import ConfigError, RunConfig
from relax_cli.config.schema import UNSET
from relax_cli.config.suggest import nearest


def resolve(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> RunConfig:
    """Resolves ``relax train ARGV``.

    Args:
        argv: the words after ``relax train``.
        environ: environment to read ``RELAX_<KEY>`` from.

    Raises:
        ConfigError: anything is wrong with the options; holds all problems.
    """
    namespace = options.namespace()
    given, errors, failed, complete, switched = _merge(argv, environ, namespace)
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
    few = sorted(failed)[:MOST_SUGGESTIONS]
    meant = {name for wrong in few for name in nearest(wrong, namespace.options, limit=1)}
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
        file = given.get("config")
        if complete and file and file.value is not UNSET:
            errors = files.with_script_hint(errors, Path(file.value), given)
        raise ConfigError(list(dict.fromkeys(errors)))
    return dataclasses.replace(config, warnings=(*switched, *warnings_of(config)))


def _merge(
    argv: Sequence[str], environ: Mapping[str, str], namespace: Namespace
) -> tuple[dict[str, Given], list[str], set[str], bool, list[str]]:
    """(options given, errors, names that could not be read, whether the file could be read at all, warnings)."""
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
    switched = switch_mode(layers, merged)
    failed = set().union(*(layer.failed for layer in layers))
    errors = [error for layer in layers for error in layer.errors]
    unreadable = "config" in failed or (bool(file.errors) and not file.failed and not file.values)
    return merged, errors, failed, not unreadable, switched


def _names_given(given: Mapping[str, Given], namespace: Namespace) -> frozenset[str]:
    """Names that count as set: those that ``none`` takes back do not."""
    names = {name for name, item in given.items() if item.value is not UNSET}
    return frozenset(names | ({"sglang_extra"} if names - namespace.options.keys() else set()))


def _build(values: dict[str, Any], given: frozenset[str]) -> RunConfig:
    def make(cls: type) -> Any:
        arguments = {}
        for field in dataclasses.fields(cls):
            part = options.part_class(cls, field.name)
            arguments[field.name] = make(part) if part else values[field.name]
        return cls(**arguments)

    settings = {name: make(cls) for name, cls in options.attributes(RunConfig).items()}
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
    placement = make_placement(config.cluster, config.train.parallel, config.sglang, available_gpus=available_gpus)
    fitted = dataclasses.replace(config, placement=placement)
    problems = placement_problems(fitted, available_gpus)
    if problems:
        raise ConfigError(problems)
    return fitted
