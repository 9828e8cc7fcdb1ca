"""Qwen2.5-VL (arXiv 2502.13923): the decoder of Qwen2.5 behind a vision tower, with positions in three dimensions.

``config.json`` has the keys of the decoder either at the top, as in the published models, or in ``text_config``, as
transformers 5 writes them. The rotary embedding is Qwen2's; its frequencies are divided among time, height and width
(``mrope_section``).
"""

import dataclasses
from typing import Any

from relax_train.models.architectures.base import ATTENTION_OUT, QKV, QKV_BIAS, Architecture, integer
from relax_train.models.architectures.rope_keys import rope_of
from relax_train.models.shape import Config, ModelShape
from relax_train.models.vision.shape import read_vision


def _text(config: Config) -> dict[str, Any]:
    """The keys of the decoder, the sections of its rotary embedding left out."""
    text = {**config, **(config.get("text_config") or {})}
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(rope := text.get(key), dict):
            rope = {name: value for name, value in rope.items() if name != "mrope_section"}
            for name in ("type", "rope_type"):
                if rope.get(name) == "mrope":  # of Qwen2.5-VL before transformers 5: the plain frequencies
                    rope[name] = "default"
            text[key] = rope
    text["sliding_window"] = text.get("sliding_window") if text.get("use_sliding_window") else None
    return text


def _sections(config: Config) -> Any:
    return rope_of({**config, **(config.get("text_config") or {})}).get("mrope_section")


class _Qwen25VL(Architecture):
    def problems(self, config: Config) -> list[str]:
        """Lists what the decoder's keys ask for that is not built."""
        return super().problems(_text(config))

    def shape(self, config: Config) -> ModelShape:
        """The shape of the decoder, with the vision tower.

        Raises:
            ValueError: a value is missing, no integer, absurd or not supported; the message names the key.
        """
        shape = super().shape(_text(config))
        sections = _sections(config)
        whole = isinstance(sections, list | tuple) and all(isinstance(n, int) and n > 0 for n in sections)
        if not whole or len(sections) != 3 or 2 * sum(sections) != shape.head_dim:
            raise ValueError(
                f"config.json: mrope_section {str(sections)[:40]} should be three numbers whose sum is half of the "
                f"size of a head, {shape.head_dim // 2}"
            )
        integer(config, "image_token_id", least=0)
        rope = dataclasses.replace(shape.rope, sections=tuple(sections))
        return dataclasses.replace(shape, rope=rope, vision=read_vision(config, shape.hidden))


QWEN2_5_VL = _Qwen25VL(
    model_type="qwen2_5_vl",
    class_name="Qwen2_5_VLForConditionalGeneration",
    attention=(QKV, QKV_BIAS, ATTENTION_OUT),
    rope_types=("default",),
    reads_pictures=True,
    defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
    models=("Qwen2.5-VL",),
    tried=("0.4 M of `examples/shapes`, CPU", "0.2 B, random, one H200"),
)
