"""Values and texts that are often read wrong, drawn from a seeded generator."""

import gzip
import random
import struct
from typing import Any

NUMBERS: tuple[Any, ...] = (
    *(0, -1, 1, 2, 2**31, 2**31 - 1, 2**63, 2**64, -(2**63), 10**30, 10**400, 0.5, 1e308, 1e-300),
    *(float("inf"), float("-inf"), float("nan"), True, False, None),
)
TEXTS = (
    *("", " ", "a", "nan", "none", "null", "true", "1e999", "0x10", "-", "--", "~", "~nobody/x", "/", ".", ".."),
    *(
        "\0",
        "\ud83d",
        "\U0001f600",
        "é",
        "a\nb",
        "\\",
        '"',
        "'",
        "${x}",
        "${config_dir}",
        "{rollout_id}",
        "{0!r:>999999}",
    ),
    *("x" * 300, "9" * 5000, "[" * 2000, "{" * 2000, "@[5:2]", "a.jsonl@[0:1]", "hf://", "hf://a/b?c", "http://[::1"),
    *("os:system", "json:dumps", "<image>", "$x$", "\\boxed{", "####", "1/0", "10^10^10"),
)


def value(rng: random.Random, depth: int = 0) -> Any:
    """Any value of JSON, and NaN, infinities and integers of any size."""
    kind = rng.random()
    if kind < 0.35:
        return rng.choice(NUMBERS)
    if kind < 0.75 or depth > 3:
        return rng.choice(TEXTS)
    if kind < 0.88:
        return [value(rng, depth + 1) for _ in range(rng.randrange(4))]
    return {key(rng): value(rng, depth + 1) for _ in range(rng.randrange(4))}


def key(rng: random.Random) -> str:
    """A key of the objects that we read, or any text."""
    known = ("role", "content", "type", "text", "image", "name", "tool_calls", "value", "ground_truth")
    return rng.choice(known) if rng.random() < 0.7 else rng.choice(TEXTS)


def changed(rng: random.Random, tree: Any, depth: int = 0) -> Any:
    """The tree with a value or a few put in place of its own, or taken away."""
    if rng.random() < (0.1 if depth == 0 else 0.25) or not isinstance(tree, dict | list) or not tree:
        return value(rng)
    if isinstance(tree, list):
        i = rng.randrange(len(tree))
        return [changed(rng, item, depth + 1) if j == i else item for j, item in enumerate(tree)]
    chosen = rng.choice(list(tree))
    if rng.random() < 0.2:
        return {k: v for k, v in tree.items() if k != chosen}
    return {k: changed(rng, v, depth + 1) if k == chosen else v for k, v in tree.items()}


def damaged(rng: random.Random, content: bytes, pieces: tuple[bytes, ...] = ()) -> bytes:
    """The bytes cut, flipped, repeated, spliced, or with one of ``pieces`` put between."""
    data = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        at = rng.randrange(len(data) + 1)
        kind = rng.randrange(6)
        if kind == 0:
            del data[at:]
        elif kind == 1 and at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 2:
            end = min(len(data), at + rng.randrange(1, 60))
            data[at:at] = data[at:end] * rng.choice((1, 2, 50))
        elif kind == 3:
            del data[at : at + rng.randrange(1, 200)]
        elif kind == 4 and pieces:
            data[at:at] = rng.choice(pieces) * rng.choice((1, 1, 1, 200))
        else:
            data[at:at] = rng.randbytes(rng.randrange(1, 9))
    return bytes(data)


def packed(rng: random.Random, content: bytes) -> bytes:
    """The content compressed, and sometimes damaged after that."""
    content = gzip.compress(content, 1)
    return damaged(rng, content) if rng.random() < 0.3 else content


PICKLE_PIECES = (
    *(b"r" + struct.pack("<I", n) for n in (0, 300, 1 << 20, 1 << 27, 1 << 31)),
    *(b"\x95" + struct.pack("<Q", n) for n in (0, 9, 1 << 40)),
    *(op + struct.pack("<I", n) for op in (b"X", b"\x8b", b"B") for n in (0, 3, 1 << 31)),
    *(b"\x8d" + struct.pack("<Q", n) for n in (0, 1 << 40)),
    *(b"p134217728\n", b"g0\n", b"2", b"0", b"1", b"(", b"t", b"\x85", b"\x86", b"\x87", b")", b"]", b"}", b"l", b"d"),
    *(b"cos\nsystem\n", b"R", b"\x93", b"Q", b"P0\n", b"e", b"u", b"s", b"a", b"h\x00", b"j\x00\x00\x00\x00", b"."),
)
TRACE_PIECES = (
    *(b"{},", b"}, {", b"}]", b"]", b"[", b"{", b'"', b"\\", b"NaN", b",", b"\\ud83d", b'"traceEvents": ['),
    *(b'{"ph":"X"},', b'{"ts": 1e999},', b'"args": [{"a": 1}, {"b": 2}],', b"9" * 400, b"[" * 600, b" " * 5000),
)
