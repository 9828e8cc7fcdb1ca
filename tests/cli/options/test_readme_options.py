"""What the package's README says of options is so."""

import re
import shlex
from pathlib import Path

import pytest
from relax_cli.config.resolution import resolve

README = (Path(__file__).parents[3] / "packages" / "relax-cli" / "README.md").read_text(encoding="utf-8")


def examples(place: str) -> list[str]:
    """The examples in the table of the places where options can stand."""
    (row,) = (line for line in README.splitlines() if line.startswith(f"| {place} |"))
    return re.findall(r"`([^`]*=[^`]*|--[^`]*)`", row.split("|")[2])


@pytest.mark.parametrize("example", examples("command line"))
def test_each_example_of_the_command_line_is_accepted_alone(workspace: Path, start: list[str], example: str) -> None:
    words = shlex.split(example)
    name = words[0].removeprefix("--").removeprefix("no-").replace("-", "_")
    assert name in resolve([*start, *words], {}).given


@pytest.mark.parametrize("example", examples("environment"))
def test_each_example_of_the_environment_is_accepted_alone(workspace: Path, start: list[str], example: str) -> None:
    (word,) = shlex.split(example)
    variable, value = word.split("=", 1)
    assert variable.removeprefix("RELAX_").lower() in resolve(start, {variable: value}).given
