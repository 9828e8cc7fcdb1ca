"""Looks through the opcodes of a pickle before anything is built from them.

A pickle is a program: 13 bytes can ask for a table of 32 GB. This check knows the opcodes that plain data needs, and
holds every number among them against the length of the file, so that what unpickling costs is in proportion to it.
The opcodes are those of the standard library's ``pickletools``.
"""

import re

# A dictionary with one entry takes some 250 bytes of memory and five of a file. Torch's snapshots have a list or a
# dictionary in 70 bytes.
_BYTES_A_CONTAINER = 6
_FEW = 1 << 16

_SCALAR = (
    rb"(?:[N\x88\x89]|K.|M..|J.{4}|G.{8}"
    rb"|\x8a(?:\x00|\x01.|\x02..|\x03.{3}|\x04.{4}|\x05.{5}|\x06.{6}|\x07.{7}|\x08.{8}|\x09.{9})"
    rb"|I-?[0-9]{1,20}\n|L-?[0-9]{1,20}L\n|F[0-9.e+\-naif]{1,40}\n)"
)
# Tuples hold scalars only. One of tuples can be a key: hashing it may never end, or overflow the stack.
_TUPLE = rb"(?:\)|%s\x85|%s{2}\x86|%s{3}\x87|\(%s*+t)" % ((_SCALAR,) * 4)
# What needs no look: references to the memo, its next entry, lists and dictionaries, scalars.
_HARMLESS = re.compile(rb"(?s)(?:h.|[\x94\]}aesuld]|j.{4}|q.|%s|%s|\(|g[0-9]{1,20}\n)*+" % (_TUPLE, _SCALAR))
_LINE = re.compile(rb"(?s)[^\n]*\n")
_TEXT_LENGTH = {0x8C: 1, ord("X"): 4, 0x8D: 8}
# Those that name, build or call something: INST, GLOBAL, OBJ, REDUCE, BUILD, NEWOBJ, NEWOBJ_EX, EXT.
_CODE = frozenset(b"icoRb\x81\x92\x82\x83\x84")
_STACK_GLOBAL, _FRAME, _PROTO, _LONG1, _LONG4 = 0x93, 0x95, 0x80, 0x8A, 0x8B


def check_opcodes(data: bytes) -> None:
    """Passes pickles of plain data whose cost is in proportion to their length.

    Plain data is text, numbers, lists, dictionaries, and tuples of numbers.

    Raises:
        ValueError: for any other, in words that follow "not read, because".
    """
    if data.count(b"]") + data.count(b"}") + data.count(b"(l") + data.count(b"(d") > (
        _FEW + len(data) // _BYTES_A_CONTAINER
    ):
        raise ValueError("it is made of empty lists and dictionaries")
    texts: list[slice] = []
    at = 0
    while True:
        found = _HARMLESS.match(data, at)
        assert found is not None  # it matches the empty text
        at = found.end()
        if at >= len(data):
            raise ValueError("it is cut off")
        opcode = data[at]
        at += 1
        if opcode == ord("."):
            return
        if opcode in _TEXT_LENGTH:
            start = at + _TEXT_LENGTH[opcode]
            at = start + int.from_bytes(data[at:start], "little")
            texts = [*texts[-1:], slice(start, at)]
        else:
            at = _check_other(data, opcode, at, texts)
        if at > len(data):
            raise ValueError("it is cut off")


def _check_other(data: bytes, opcode: int, at: int, texts: list[slice]) -> int:
    """Where the next opcode begins after one that is rare in a snapshot, or a reason not to read it."""
    if opcode == _PROTO:
        return at + 1
    if opcode == _FRAME:
        if at + 8 + int.from_bytes(data[at : at + 8], "little") > len(data):
            raise ValueError("it is cut off")
        return at + 8
    if opcode == ord("r"):
        _check_memo(int.from_bytes(data[at : at + 4], "little"), at)
        return at + 4
    if opcode in (_LONG1, _LONG4):  # a whole number of more than nine bytes
        width = 1 if opcode == _LONG1 else 4
        return at + width + int.from_bytes(data[at : at + width], "little")
    if opcode in b"pVILF":
        line = _LINE.match(data, at)
        if line is None:
            raise ValueError("it is cut off")
        if opcode == ord("p"):
            digits = line.group().strip()
            _check_memo(int(digits) if digits.isdigit() and len(digits) < 20 else 1 << 64, at)
        return line.end()
    raise ValueError(_refusal(data, opcode, at, texts))


def _refusal(data: bytes, opcode: int, at: int, texts: list[slice]) -> str:
    """Why an opcode is none of plain data. ``texts`` are the last two texts before it, ``at`` is behind it."""
    if opcode == _STACK_GLOBAL or opcode in _CODE:
        names = [data[t] for t in texts] if opcode == _STACK_GLOBAL else data[at : at + 400].split(b"\n")[:2]
        named = ".".join(name.decode("utf-8", "replace")[:80] for name in names)
        what = named if opcode in b"ci\x93" and named else "a class or a function"
        return f"it asks for {what}; a memory snapshot holds plain data only"
    if opcode in b"PQ":
        return "it refers to objects outside of it"
    if opcode in b"t\x85\x86\x87":
        return "it holds a tuple of something else than numbers"
    return f"the opcode {opcode:#04x} before byte {at} is none of a memory snapshot"


def _check_memo(index: int, at: int) -> None:
    """Refuses an entry of the memo beyond the number of bytes so far: Python makes room for all entries below it."""
    if index > at:
        raise ValueError(f"entry {index} of its memo is beyond what the {at} bytes before it can hold")
