"""Values of users and readers as JSON values, so that they fit into checkpoints."""

import base64
import io
import pickle
import zoneinfo
from typing import Any

from relax_data.errors import describe

STATE_FORMAT = 3
"""Number of the format in which the state of a rollout is saved: source cursor, ledger with its open groups, drops not
reported yet. It goes up whenever a state written before cannot be read any more: 3 has the numbers of samples in a file
of arrays (:mod:`relax_data.prompts.saved_groups`), 2 had them as JSON."""

_BYTES, _OBJECT, _DICT = "__bytes__", "__object__", "__dict__"
OBJECT_TYPES = frozenset(
    {
        *("builtins.complex", "builtins.bytearray", "builtins.frozenset", "builtins.set", "builtins.range"),
        *("builtins.slice", "collections.OrderedDict", "decimal.Decimal", "fractions.Fraction", "uuid.UUID"),
        *("datetime.date", "datetime.datetime", "datetime.time", "datetime.timedelta", "datetime.timezone"),
        *("zoneinfo.ZoneInfo", "pytz._UTC", "pytz._p"),
        "pandas._libs.tslibs.timestamps._unpickle_timestamp",
        "pandas._libs.tslibs.timedeltas._timedelta_unpickle",
    }
)
"""Types beside those of JSON, and tuples, that values of the data may have in a checkpoint: what readers make of rows.
A pickle may name any function and have it called, so that nothing else is read from one."""
_TAGS = ({_BYTES}, {_OBJECT}, {_DICT})


def to_plain(value: Any, where: str, *, objects: bool = False) -> Any:
    """``value`` as what JSON holds; numpy scalars and arrays become numbers and lists, bytes base64 text.

    Args:
        where: what holds the value, for the message.
        objects: pickle what has no such form (decimals, dates, tuples, keys that are no text; :data:`OBJECT_TYPES`)
            instead of raising or turning it into what JSON has, so that :func:`from_plain` gives back exactly what was
            there.

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
    if objects and (plain := _pickled(value)) is not None:
        return plain
    raise ValueError(
        f"{where} holds a value of type {type(value).__name__}, which cannot be stored in a checkpoint; "
        "use numbers, text, lists, dicts or bytes"
    )


def _pickled(value: Any) -> dict[str, str] | None:
    """``value`` as a pickle that :func:`from_plain` reads; None when it would not."""
    try:
        text = base64.b64encode(pickle.dumps(value)).decode("ascii")
        _unpickled(text)
    except Exception:  # pickling raises what it likes
        return None
    return {_OBJECT: text}


def from_plain(value: Any) -> Any:
    """The inverse of :func:`to_plain`, as far as JSON keeps types. It runs no code that the value brings along.

    Raises:
        ValueError: an object in it is damaged, or of a type that is not in :data:`OBJECT_TYPES`.
    """
    if isinstance(value, dict):
        if set(value) == {_BYTES}:
            return base64.b64decode(value[_BYTES])
        if set(value) == {_OBJECT}:
            return _unpickled(value[_OBJECT])
        if set(value) == {_DICT}:
            value = value[_DICT]
        return {k: from_plain(v) for k, v in value.items()}
    if isinstance(value, list):
        return [from_plain(v) for v in value]
    return value


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" in OBJECT_TYPES:
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):
            return _time_zone_maker
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is not read from a checkpoint")


def _time_zone_maker(owner: object, name: str) -> Any:
    """``getattr`` as far as the pickle of a time zone needs it."""
    if owner is zoneinfo.ZoneInfo and name == "_unpickle":
        return getattr(owner, name)
    raise pickle.UnpicklingError(f"it asks for {name!r} of {owner!r}")


def _unpickled(text: str) -> Any:
    """The object that :func:`to_plain` pickled.

    Raises:
        ValueError: the bytes are damaged, or it is not of the types of :data:`OBJECT_TYPES`.
    """
    try:
        return _Unpickler(io.BytesIO(base64.b64decode(text))).load()
    except Exception as error:  # unpickling raises what it likes
        raise ValueError(f"a value of the data cannot be read back: {describe(error)}") from error


def check_format(state: object) -> None:
    """Refuses a rollout state of another format.

    Raises:
        ValueError: it was not written in ``STATE_FORMAT``; the message names both formats and the way out.
    """
    if not isinstance(state, dict):
        raise ValueError(f"the rollout state of the checkpoint is damaged: it is no object, but {str(state)[:40]!r}")
    found = state.get("format")
    if found is None and isinstance(state.get("loop"), dict):  # where format 1 had its number
        found = state["loop"].get("format")
    if found != STATE_FORMAT:
        raise ValueError(
            f"the rollout state of the checkpoint has format {found!r}, this version reads {STATE_FORMAT}: resume with "
            "the version that wrote it, or start a new run from the saved weights (--hf-checkpoint instead of --load)"
        )
