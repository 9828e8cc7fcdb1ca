"""The shape of the vision tower of Qwen2.5-VL (arXiv 2502.13923), from ``vision_config``. Needs no torch."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

PREFIX = "visual."
"""Before the names of the tower's tensors in the checkpoint, and for SGLang."""

_DEFAULTS: dict[str, int] = {
    "depth": 32,
    "hidden_size": 3584,
    "intermediate_size": 3420,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 3584,
}
"""What transformers takes for a key that is not there."""
_VIDEO_TOKEN = 151656
"""Likewise for ``video_token_id``."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class VisionShape:
    """Sizes of a vision tower, and the tokens that stand for its output.

    Attributes:
        config: ``vision_config`` as it was given; transformers builds the tower from it.
        sizes: its sizes by key, defaults filled in.
        image_token: id of the token that stands in a prompt for each piece of a picture.
        video_token: likewise of a video.
    """

    config: Mapping[str, Any] = dataclasses.field(repr=False)
    sizes: Mapping[str, int]
    image_token: int
    video_token: int

    @property
    def merge(self) -> int:
        """Patches in each direction that become one token."""
        return self.sizes["spatial_merge_size"]

    @property
    def patch_values(self) -> int:
        """Numbers that describe a patch: channels x frames x height x width."""
        s = self.sizes
        return s["in_channels"] * s["temporal_patch_size"] * s["patch_size"] ** 2

    @property
    def parameters(self) -> int:
        """All parameters of the tower."""
        return sum(math.prod(shape) for _, shape in self.tensors())

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name and shape of every tensor of the tower in the Hugging Face checkpoint."""
        s = self.sizes
        hidden, ffn, out, merged = s["hidden_size"], s["intermediate_size"], s["out_hidden_size"], self.merge**2
        frames, side = s["temporal_patch_size"], s["patch_size"]
        yield f"{PREFIX}patch_embed.proj.weight", (hidden, s["in_channels"], frames, side, side)
        linear = {
            "attn.qkv": (3 * hidden, hidden),
            "attn.proj": (hidden, hidden),
            "mlp.gate_proj": (ffn, hidden),
            "mlp.up_proj": (ffn, hidden),
            "mlp.down_proj": (hidden, ffn),
        }
        for block in range(s["depth"]):
            name = f"{PREFIX}blocks.{block}."
            yield f"{name}norm1.weight", (hidden,)
            yield f"{name}norm2.weight", (hidden,)
            for layer, shape in linear.items():
                yield f"{name}{layer}.weight", shape
                yield f"{name}{layer}.bias", shape[:1]
        yield f"{PREFIX}merger.ln_q.weight", (hidden,)
        for layer, rows in (("0", merged * hidden), ("2", out)):
            yield f"{PREFIX}merger.mlp.{layer}.weight", (rows, merged * hidden)
            yield f"{PREFIX}merger.mlp.{layer}.bias", (rows,)


def read_vision(config: Mapping[str, Any], hidden: int) -> VisionShape:
    """The vision tower that a ``config.json`` of Qwen2.5-VL describes.

    Args:
        config: the whole of it.
        hidden: size of the decoder's residual stream.

    Raises:
        ValueError: a value is missing, no number, or does not fit the decoder; the message names the key.
    """
    given = config.get("vision_config")
    if not isinstance(given, Mapping):
        raise ValueError("config.json: vision_config is missing; it describes the vision tower")
    sizes = {}
    for key, default in _DEFAULTS.items():
        value = given.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 10**6:
            raise ValueError(
                f"config.json: vision_config.{key} should be an integer from 1 on, not {str(value)[:40]!r}"
            )
        sizes[key] = value
    if sizes["out_hidden_size"] != hidden:
        raise ValueError(
            f"config.json: vision_config.out_hidden_size {sizes['out_hidden_size']} is not hidden_size {hidden}, which "
            "its pieces take the place of"
        )
    return VisionShape(
        config=given,
        sizes=sizes,
        image_token=_token(config, "image_token_id", None),
        video_token=_token(config, "video_token_id", _VIDEO_TOKEN),
    )


def _token(config: Mapping[str, Any], key: str, default: int | None) -> int:
    token = config.get(key, default)
    if not isinstance(token, int) or isinstance(token, bool) or token < 0:
        raise ValueError(f"config.json: {key} should be a token id, not {str(token)[:40]!r}")
    return token
