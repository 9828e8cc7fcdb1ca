"""The words of a command line, for tests that start from a working one and change it."""

from collections.abc import Sequence


def changed(words: Sequence[str], changes: Sequence[str]) -> list[str]:
    """``words`` with the options of ``changes`` in place of their own: an option stands once on a command line."""
    instead = {_name(word) for word in changes if word.startswith("--")}
    kept: list[str] = []
    keeps = True
    for word in words:
        if word.startswith("--"):
            keeps = _name(word) not in instead
        if keeps:
            kept.append(word)
    return [*kept, *changes]


def _name(flag: str) -> str:
    return flag.partition("=")[0].removeprefix("--").removeprefix("no-")
