"""The fields of an event that the analysers use, read straight from the text.

Most of a trace is text that nobody asks for: strides, grids, occupancy. A typed decoder checks and skips it without
making objects of it, which takes about half the time of a dictionary an event.
"""

from typing import Any

import msgspec

from relax_profiling.trace.reader import Event


class Arguments(msgspec.Struct, gc=False):
    """The part of an event's ``args`` that is read; shapes and types stay text until an operator needs them."""

    correlation: Any = None
    device: Any = None
    name: Any = None
    dims: msgspec.Raw = msgspec.field(default=msgspec.Raw(b""), name="Input Dims")
    types: msgspec.Raw = msgspec.field(default=msgspec.Raw(b""), name="Input type")
    collective: Any = msgspec.field(default=None, name="Collective name")
    group: Any = msgspec.field(default=None, name="Process Group Description")
    group_name: Any = msgspec.field(default=None, name="Process Group Name")
    group_size: Any = msgspec.field(default=None, name="Group size")
    members: Any = msgspec.field(default=None, name="Process Group Ranks")
    allocated: Any = msgspec.field(default=None, name="Total Allocated")
    device_type: Any = msgspec.field(default=None, name="Device Type")
    device_id: Any = msgspec.field(default=None, name="Device Id")


NO_ARGUMENTS = Arguments()


class Fields(msgspec.Struct, gc=False):
    """The part of an event that is read. Times in microseconds; one without a time has NaN."""

    name: str = ""
    ts: float = float("nan")
    dur: float = 0.0
    cat: str | None = None
    ph: str | None = None
    pid: Any = None
    tid: Any = None
    args: Arguments | None = None


_decoder = msgspec.json.Decoder(list[Fields])


def read_fields(text: bytes) -> list[Fields]:
    """The events of a JSON list.

    Raises:
        ValueError: when one of them is damaged or has a field of another type.
    """
    try:
        return _decoder.decode(text)
    except (msgspec.MsgspecError, RecursionError) as e:
        raise ValueError(str(e)) from e


def fields_of(event: Event) -> Fields:
    """The fields of an event that could only be read as a dictionary; a number may be written as text.

    Raises:
        ValueError: when a field has a wrong type.
    """
    arguments = event.get("args")
    if isinstance(arguments, dict):
        text = {
            k: msgspec.Raw(msgspec.json.encode(arguments[k])) for k in ("Input Dims", "Input type") if k in arguments
        }
        event = {**event, "args": {**arguments, **text}}
    try:
        return msgspec.convert(event, Fields, strict=False)
    except msgspec.MsgspecError as e:
        raise ValueError(str(e)) from e
