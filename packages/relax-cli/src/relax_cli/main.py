"""The command `relax`: finds the sub-command and imports only what it needs."""

import sys
from collections.abc import Callable, Sequence

from relax_cli.config.suggest import did_you_mean

_USAGE = """usage: relax COMMAND [options]

commands:
  train     train a language model with reinforcement learning (relax train --help)
  simulate  say what a step of each mode would take: colocate, partial rollout, fully async (a model)
  doctor    say what this machine has, what is missing, and how to fix it
  report    read the timeline and traces of a run and say where the time and the memory went
  profile   profile a running SGLang server, merge traces, look at snapshots

options:
  -h, --help   show this help and exit
  --version    show the version and exit
"""

_MOST_PROBLEMS = 50
"""Problems of one start that are written out."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `relax ARGV`.

    Returns:
        the exit code: 0, 2 when the options are wrong, 130 after Ctrl-C, else what the sub-command says.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    commands: dict[str, Callable[[list[str]], int]] = {
        "train": train,
        "simulate": _simulate,
        "doctor": _doctor,
        "report": lambda rest: _profiling(["report", *rest], "relax"),
        "profile": lambda rest: _profiling(rest, "relax profile"),
    }
    if not words or words[0] in ("-h", "--help"):
        print(_USAGE, end="")
        return 0
    if words[0] == "--version":
        from importlib.metadata import version

        print(f"relax {version('relax-cli')}")
        return 0
    command = commands.get(words[0])
    if command is None:
        print(f"relax: no command {words[0]!r}{did_you_mean(words[0], commands)}", file=sys.stderr)
        print(_USAGE, end="", file=sys.stderr)
        return 2
    try:
        return command(words[1:])
    except KeyboardInterrupt:  # before a run takes the signals over
        return 130


def train(argv: list[str]) -> int:
    """`relax train`: resolves and checks the options, then plans, prints or runs."""
    if "-h" in argv or "--help" in argv:
        print(train_help(), end="")
        return 0
    from relax_cli.config.export import to_toml
    from relax_cli.config.resolution import resolve
    from relax_cli.config.run_config import ConfigError

    try:
        config = resolve(argv)
    except ConfigError as error:
        _report("train", error.problems)
        return 2
    if config.run.print_config:
        print(to_toml(config), end="")
        return 0
    if config.run.dry_run:
        from relax_cli.checks.plan import plan_text

        print(plan_text(config), end="")
        return 0
    for warning in config.warnings:
        print(f"relax train: warning: {warning}", file=sys.stderr)
    from relax_cli.checks.file_checks import nothing_left

    if (done := nothing_left(config)) is not None:
        print(f"relax train: nothing is left to do: {done}")
        return 0
    from relax_cli.run.launch import run

    return run(config)


def train_help() -> str:
    """The text of `relax train --help`."""
    from relax_rollout.engines.sglang.settings import SGLangSettings

    from relax_cli.config.command_line import Command, help_text
    from relax_cli.config.options import namespace, settings_classes
    from relax_cli.config.settings import RunSettings

    notes = {
        RunSettings: "Options come from defaults, then --config FILE, then the environment (RELAX_LR=1e-6), then the "
        "command line.",
        SGLangSettings: "Every other argument of SGLang's server is --sglang-<name>, for example "
        "--sglang-attention-backend triton.",
    }
    command = Command(
        "relax train [--config FILE] [options]",
        "Trains a language model with reinforcement learning: SGLang generates, Megatron-core trains.",
        "`relax doctor` says what this machine has.",
    )
    return help_text(settings_classes(), namespace().options, notes, command)


def _simulate(argv: list[str]) -> int:
    from relax_cli.config.run_config import ConfigError
    from relax_cli.simulate.command import main as simulate

    try:
        return simulate(argv)
    except ConfigError as error:
        _report("simulate", error.problems)
        return 2


def _report(command: str, problems: Sequence[str]) -> None:
    count = "1 error" if len(problems) == 1 else f"{len(problems)} errors"
    print(f"relax {command}: {count}, nothing was started", file=sys.stderr)
    for problem in problems[:_MOST_PROBLEMS]:
        print(f"  - {problem}", file=sys.stderr)
    if len(problems) > _MOST_PROBLEMS:
        print(f"  ... and {len(problems) - _MOST_PROBLEMS} more", file=sys.stderr)


def _doctor(argv: list[str]) -> int:
    from relax_cli.checks.doctor import main as doctor

    return doctor(argv)


def _profiling(argv: list[str], program: str) -> int:
    from relax_profiling.cli import main as profiling

    return profiling(argv, program=program)


if __name__ == "__main__":
    sys.exit(main())
