"""Values of users and readers as plain JSON values, so that they fit into checkpoints and metrics."""

import base64
from typing import Any

_BYTES = "__bytes__"


def to_plain(value: Any, where: str) -> Any:
    """``value`` as what JSON holds; numpy scalars and arrays become numbers and lists, bytes base64 text.

    Raises:
        ValueError: the value has no such form; the message starts with ``where``.
    """
    if value is None or isinstance(value, bool | int | float | str):
        # Subclasses such as numpy.float64 or enums print differently: reduce them to the base type.
        for base in (bool, int, float, str):
            if isinstance(value, base):
                return base(value)
        return None
    if isinstance(value, dict):
        return {str(k): to_plain(v, where) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(v, where) for v in value]
    if isinstance(value, bytes | bytearray):
        return {_BYTES: base64.b64encode(bytes(value)).decode("ascii")}
    if hasattr(value, "tolist"):
        return to_plain(value.tolist(), where)
    raise ValueError(
        f"{where} holds a {type(value).__name__}, which cannot be stored in a checkpoint; "
        "use numbers, text, lists, dicts or bytes"
    )


def from_plain(value: Any) -> Any:
    """The inverse of :func:`to_plain`, as far as JSON keeps types: bytes are bytes again."""
    if isinstance(value, dict):
        if set(value) == {_BYTES}:
            return base64.b64decode(value[_BYTES])
        return {k: from_plain(v) for k, v in value.items()}
    if isinstance(value, list):
        return [from_plain(v) for v in value]
    return value
