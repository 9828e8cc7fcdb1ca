"""Values of users and readers as plain JSON values, so that they fit into checkpoints and metrics."""

import base64
import pickle
from typing import Any

_BYTES, _OBJECT, _DICT = "__bytes__", "__object__", "__dict__"
_TAGS = ({_BYTES}, {_OBJECT}, {_DICT})


def to_plain(value: Any, where: str, *, objects: bool = False) -> Any:
    """``value`` as what JSON holds; numpy scalars and arrays become numbers and lists, bytes base64 text.

    Args:
        where: what holds the value, for the message.
        objects: pickle what has no such form (decimals, dates, tuples, keys that are no text) instead of raising or
            turning it into what JSON has, so that :func:`from_plain` gives back exactly what was there.

    Raises:
        ValueError: the value has no such form.
    """
    if value is None:
        return None
    # Subclasses such as numpy.float64 or enums print differently: reduce them to the base type.
    for base in (bool, int, float, str):
        if isinstance(value, base):
            return base(value)
    if isinstance(value, bytes | bytearray):
        return {_BYTES: base64.b64encode(bytes(value)).decode("ascii")}
    exact = not objects or (type(value) is dict and all(isinstance(k, str) for k in value)) or type(value) is list
    if isinstance(value, dict) and exact:
        inner = {str(k): to_plain(v, where, objects=objects) for k, v in value.items()}
        # A dict of the data that looks like one of ours must not be read as one.
        return {_DICT: inner} if set(inner) in _TAGS else inner
    if isinstance(value, list | tuple) and exact:
        return [to_plain(v, where, objects=objects) for v in value]
    if hasattr(value, "tolist"):
        return to_plain(value.tolist(), where, objects=objects)
    if objects:
        return {_OBJECT: base64.b64encode(pickle.dumps(value)).decode("ascii")}
    raise ValueError(
        f"{where} holds a value of type {type(value).__name__}, which cannot be stored in a checkpoint; "
        "use numbers, text, lists, dicts or bytes"
    )


def from_plain(value: Any) -> Any:
    """The inverse of :func:`to_plain`, as far as JSON keeps types. Reads only what we wrote: it may unpickle."""
    if isinstance(value, dict):
        if set(value) == {_BYTES}:
            return base64.b64decode(value[_BYTES])
        if set(value) == {_OBJECT}:
            return pickle.loads(base64.b64decode(value[_OBJECT]))
        if set(value) == {_DICT}:
            value = value[_DICT]
        return {k: from_plain(v) for k, v in value.items()}
    if isinstance(value, list):
        return [from_plain(v) for v in value]
    return value
