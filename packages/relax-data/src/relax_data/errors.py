"""Errors that speak to the user about their data, errors of others as text, and hints for misspelt names."""

import difflib
from collections.abc import Iterable


class DataError(ValueError):
    """Data that cannot be used. The message names the file, the line or row, and the key, and what to do."""


def describe(error: BaseException) -> str:
    """``Type: message``, also of an error that cannot tell its message."""
    try:
        text = str(error)
    except Exception as e:
        text = f"(its message cannot be shown: {type(e).__name__})"
    return f"{type(error).__name__}: {text}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``; did you mean 'NAME'?`` with the known name that is nearest to ``name``; empty when none is near."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
