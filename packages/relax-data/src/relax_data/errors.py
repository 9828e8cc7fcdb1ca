"""Errors that speak to the user about their data, and errors of others as text."""


class DataError(ValueError):
    """Data that cannot be used. The message names the file, the line or row, and the key, and what to do."""


def describe(error: BaseException) -> str:
    """``Type: message``, also of an error that cannot tell its message."""
    try:
        text = str(error)
    except Exception as e:
        text = f"(its message cannot be shown: {type(e).__name__})"
    return f"{type(error).__name__}: {text}"
