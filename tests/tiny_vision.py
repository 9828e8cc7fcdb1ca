"""A tiny Qwen2.5-VL: model, tokenizer and processor, made without a network. For tests, and for checks as scripts."""

from pathlib import Path
from typing import Any

VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
"""Tokens that Qwen2.5-VL writes around and for pictures."""
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: "
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ c['text'] }}{% endif %}"
    "{% endfor %}{% endif %}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


def vision_tokenizer() -> Any:
    """The character tokenizer with Qwen's marks of pictures and a template that writes them."""
    from char_tokenizer import char_tokenizer

    tokenizer = char_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(VISION)})
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def media_tokens(tokenizer: Any) -> list[int]:
    """The tokens that stand for pictures and for videos."""
    ids: list[int] = tokenizer.convert_tokens_to_ids(list(VISION[2:]))
    return ids


def save_processor(folder: Path) -> Any:
    """Writes tokenizer and image processor; pictures are cut into patches of 14 x 14 pixels, 2 x 2 give a token."""
    from transformers import Qwen2_5_VLProcessor, Qwen2VLImageProcessor
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

    size = {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 16}
    processor = Qwen2_5_VLProcessor(
        Qwen2VLImageProcessor(size=size),
        vision_tokenizer(),
        Qwen2VLVideoProcessor(size=size),
        chat_template=TEMPLATE,
    )
    processor.save_pretrained(folder)
    return processor


def vision_model(tokenizer: Any, **changes: Any) -> Any:
    """A random ``Qwen2_5_VLForConditionalGeneration`` of seed 0 with matrices large enough that pictures matter."""
    import torch
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    ids = dict(zip(VISION, tokenizer.convert_tokens_to_ids(list(VISION)), strict=True))
    text = dict(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=2,
        eos_token_id=1,
        pad_token_id=0,
        max_position_embeddings=512,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
        tie_word_embeddings=False,
    )
    vision = dict(
        depth=2,
        hidden_size=32,
        intermediate_size=64,
        num_heads=2,
        out_hidden_size=64,
        fullatt_block_indexes=[1],
        window_size=56,
    )
    config = Qwen2_5_VLConfig(
        text_config=text | changes,
        vision_config=vision,
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        tie_word_embeddings=changes.get("tie_word_embeddings", False),
        dtype="float32",
    )
    torch.manual_seed(0)
    model = Qwen2_5_VLForConditionalGeneration(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.1)
    return model
