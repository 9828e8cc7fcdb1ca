"""Ends of a response that a request alone does not see: at the seam of an interrupted sample, and beside an abort.

An engine looks for stop strings in what it generated itself. When a sample goes on from the tokens that it had, a stop
string that begins before the seam and ends behind it is seen by nobody. And an abort that meets a request in the turn
in which the response ends is answered as an abort, although nothing is left to generate.
"""

import json
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

Decode = Callable[[Sequence[int]], str]


def end_token_ids(tokenizer: Any, hf_checkpoint: str | Path | None = None) -> frozenset[int]:
    """Tokens that end a sequence for the engine: of the tokenizer, ``config.json`` and ``generation_config.json``.

    Args:
        tokenizer: transformers tokenizer of the model.
        hf_checkpoint: Hugging Face folder of the model; None: the tokenizer's alone.
    """
    own = getattr(tokenizer, "eos_token_id", None)
    found = {own} if isinstance(own, int) else set[int]()
    if hf_checkpoint is not None:
        for path in (Path(hf_checkpoint) / "config.json", Path(hf_checkpoint) / "generation_config.json"):
            config = json.loads(path.read_bytes()) if path.is_file() else {}
            for part in (config, config.get("text_config") or {}):
                ids = part.get("eos_token_id")
                found.update([ids] if isinstance(ids, int) else ids or ())
    return frozenset(found)


def cut_at_seam(before: Sequence[int], new: Sequence[int], stops: Iterable[str], decode: Decode) -> int | None:
    """Number of ``new`` tokens up to the one that ends a stop string which begins in ``before``; None without one.

    Args:
        before: response tokens of the requests before, up to the last that no engine sampled (a tool's).
        new: tokens of the request that went on.
        stops: stop strings.
        decode: text of tokens.
    """
    stops = [stop for stop in stops if len(stop) > 1]
    if not stops or not before or not new:
        return None
    longest = max(map(len, stops))
    tail = list(before[-longest:])  # a token has a character at least, but for a few that have none
    for n in range(1, len(new) + 1):
        text = decode([*tail, *new[:n]])
        if any(stop in text for stop in stops):
            return n
        if len(decode(new[:n])) >= longest:
            return None  # what follows begins behind the seam: the engine looks for it
    return None


def ends_response(tokens: Sequence[int], ends: Collection[int], stops: Iterable[str], decode: Decode) -> bool:
    """Whether the last of ``tokens`` ends a response, so that an abort came too late.

    Args:
        tokens: of the response, since the last that no engine sampled.
        ends: tokens that end a sequence, and those of ``--rollout-stop-token-ids``.
        stops: stop strings.
        decode: text of tokens.
    """
    if not tokens:
        return False
    if tokens[-1] in ends:
        return True
    stops = list(stops)
    if not stops:
        return False
    text = decode(tokens[-max(map(len, stops)) :])
    return any(stop in text for stop in stops)
