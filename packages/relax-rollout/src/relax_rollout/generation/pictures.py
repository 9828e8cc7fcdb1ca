"""What an engine gets of a prompt with pictures, and which responses to it an engine cannot go on behind.

SGLang makes text of the tokens of a request with pictures, and looks in it for the marks of pictures and videos: each
must have a file. A mark that the model wrote itself has none: SGLang 0.5.17 refuses one of a video, and never answers
where one of a picture is.
"""

from collections.abc import Callable, Sequence
from typing import Any

from relax_data.multimodal.images import picture_uris
from relax_data.types import Prompt, Sample

Decode = Callable[[Sequence[int]], str]


def engine_ids(prompt: Prompt) -> list[int]:
    """The prompt's tokens as the engine gets them: one for each picture, which it expands itself."""
    if "engine_ids" not in prompt.features:
        return prompt.input_ids
    ids: list[int] = prompt.features["engine_ids"].tolist()
    return ids


def pictures(prompt: Prompt) -> dict[str, Any]:
    """What an engine gets beside the tokens: the pictures as files, or what the row holds where none were read."""
    uris = picture_uris(prompt.features)
    return {**prompt.multimodal, "image": uris} if uris else prompt.multimodal


def can_go_on(sample: Sample, decode: Decode) -> bool:
    """Whether an engine can generate behind the tokens that ``sample`` has.

    Args:
        decode: text of tokens, special ones too.

    Returns:
        False when the prompt has pictures and the response a mark of a picture or a video: its token, or its text.
    """
    media = sample.prompt.features.get("media_tokens")
    if media is None or not sample.tokens:
        return True
    ids: list[int] = media.tolist()
    if not set(ids).isdisjoint(sample.tokens):
        return False
    text = decode(sample.tokens)
    return not any(mark in text for mark in (decode([token]) for token in ids) if mark)
