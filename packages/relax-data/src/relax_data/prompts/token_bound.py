"""Fewest tokens that a text can have, told without tokenising it.

A tokenizer takes 300 bytes and a microsecond a character, so a prompt of 10 MB that the length limit will drop would
first cost gigabytes. No token of a byte-level BPE stands for more characters than its own text has, so a text of ``n``
characters has at least ``n / longest`` tokens.
"""

import json
import math
import unicodedata
from typing import Any

_KEEPS_ALL = ("Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous")
_ONE_CHARACTER = {"Regex": "[\\s\\S]"}


def characters_a_token(tokenizer: Any) -> tuple[int, bool] | None:
    """Most characters that a token of this tokenizer stands for, and whether they are counted after NFC.

    None when it cannot be told: a slow tokenizer, one that leaves characters out, or one whose unknown token stands for
    texts of any length.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    state = json.loads(backend.to_str())
    added = state.get("added_tokens") or []
    steps = _flat(state.get("pre_tokenizer"), "pretokenizers")
    normalizer, model = state.get("normalizer"), state["model"]
    if normalizer is not None and normalizer.get("type") != "NFC":
        return None
    if any(token.get("lstrip") or token.get("rstrip") for token in added):
        return None  # such a token stands for the blanks beside it too
    for step in steps:
        kept = step["type"] in ("ByteLevel", "Digits") or (step["type"] == "Split" and step["behavior"] in _KEEPS_ALL)
        if not kept:
            return None
    longest = max((len(token["content"]) for token in added), default=1)
    if model["type"] == "BPE" and any(step["type"] == "ByteLevel" for step in steps) and _has_all_bytes(model["vocab"]):
        return max(longest, *map(len, model["vocab"])), normalizer is not None
    # Each character is a token, known or not.
    single = len(steps) == 1 and (steps[0].get("behavior"), steps[0].get("pattern")) == ("Isolated", _ONE_CHARACTER)
    if single and model["type"] == "WordLevel" and model.get("unk_token") in model["vocab"]:
        return longest, normalizer is not None
    return None


def fewest_tokens(text: str, bound: tuple[int, bool]) -> int:
    """A number of tokens that the text has in any case.

    Args:
        bound: of :func:`characters_a_token`.
    """
    longest, composed = bound
    if composed and not text.isascii():
        text = unicodedata.normalize("NFC", text)
    return math.ceil(len(text) / longest)


def _flat(step: dict[str, Any] | None, parts: str) -> list[dict[str, Any]]:
    if step is None:
        return []
    return list(step[parts]) if step["type"] == "Sequence" else [step]


def _has_all_bytes(vocabulary: dict[str, int]) -> bool:
    """Whether each byte has a token: those of a byte without one would be left out."""
    from tokenizers.pre_tokenizers import ByteLevel

    return all(letter in vocabulary for letter in ByteLevel.alphabet())
