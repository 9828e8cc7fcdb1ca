"""Turns values and errors of the user's functions into text for messages, which never fails, and plain values."""

from typing import Any

from relax_data.errors import describe
from relax_data.serialization import to_plain

__all__ = ["describe", "shown", "to_plain"]


def shown(value: Any, limit: int = 200) -> str:
    """``repr`` of a value, cut to ``limit`` characters, also of one that has none."""
    try:
        text = repr(value)
    except Exception as e:
        text = f"a {type(value).__name__} that cannot be shown ({type(e).__name__})"
    return text if len(text) <= limit else text[:limit] + "..."
