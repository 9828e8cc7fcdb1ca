"""Reading the end of a server's log."""

import re
from pathlib import Path

_ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_TAIL_BYTES = 64 << 10


def last_lines(path: str | Path | None, count: int = 20) -> list[str]:
    """The last ``count`` lines that are not empty, without colour codes; empty when there is no log."""
    if path is None:
        return []
    try:
        with open(path, "rb") as f:
            f.seek(0, 2)
            f.seek(max(0, f.tell() - _TAIL_BYTES))
            text = f.read().decode(errors="replace")
    except OSError:
        return []
    # A progress bar redraws its line with carriage returns: only its last state is of interest.
    lines = [_ESCAPES.sub("", line).rstrip().rpartition("\r")[2] for line in text.split("\n")]
    return [line for line in lines if line.strip()][-count:]


def last_words(path: str | Path | None, count: int = 20) -> str:
    """The last lines as the end of an error message; says so when there is nothing."""
    lines = last_lines(path, count)
    if not lines:
        return f"Its log {path} is empty." if path is not None else "Its log is not known."
    return f"Last lines of {path}:\n" + "\n".join("  " + line for line in lines)
