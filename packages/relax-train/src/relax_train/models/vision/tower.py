"""The vision tower, which is transformers' own module, and its output in the decoder's input.

Every tensor-parallel and context-parallel rank of the first pipeline stage runs the whole tower on the pictures of its
micro-batch and takes the pieces whose tokens it holds. Gradients of a tower that is trained are therefore parts, which
megatron-core adds up as those of norms: over data- and context-parallel ranks always, over tensor-parallel ranks with
sequence parallelism, where each of them holds other tokens.
"""

from typing import Any

import torch

from relax_train.backend.mcore import PackedSeqParams, TransformerConfig
from relax_train.models.vision.places import Pictures
from relax_train.models.vision.shape import VisionShape


def build_tower(vision: VisionShape, config: TransformerConfig, *, trained: bool) -> torch.nn.Module:
    """The tower in the decoder's precision; its weights are undefined until they are loaded.

    Args:
        vision: its shape.
        config: the decoder's.
        trained: whether it gets gradients.
    """
    from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

    tower: torch.nn.Module = Qwen2_5_VisionTransformerPretrainedModel._from_config(
        Qwen2_5_VLVisionConfig(**vision.config), attn_implementation="sdpa"
    )
    tower.requires_grad_(trained)
    for parameter in tower.parameters():  # not the frequencies of its rotary embedding, which stay in float32
        parameter.data = parameter.data.to(config.params_dtype)
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # megatron reads it
    return tower


def decoder_inputs(gpt: Any, tokens: torch.Tensor, pictures: Pictures, packed: PackedSeqParams) -> dict[str, Any]:
    """What a stage of the decoder gets beside a row's tokens when the row has pictures.

    Args:
        gpt: megatron-core's model, with the tower as ``vision_tower`` on the first stage.
        tokens: int64 ``[1, local]``.
        pictures: of the row.
        packed: of the row; gets the positions, which every stage's attention reads.

    Returns:
        ``decoder_input`` ``[local, 1, hidden]`` (of sequence-parallel ranks their part) on the first stage, nothing on
        the others.
    """
    device = tokens.device
    packed._relax_positions = torch.from_numpy(pictures.positions).to(device, non_blocking=True)
    if not gpt.pre_process:
        return {}
    hidden = gpt.embedding(input_ids=tokens, position_ids=torch.zeros_like(tokens))
    slots, pieces = torch.from_numpy(pictures.slots).to(device), torch.from_numpy(pictures.pieces).to(device)
    if hidden.size(0) != tokens.size(1):
        first = torch.distributed.get_rank(gpt.embedding.tp_group) * hidden.size(0)
        here = (slots >= first) & (slots < first + hidden.size(0))
        slots, pieces = slots[here] - first, pieces[here]
    if not slots.numel():  # the tokens of all pictures are on other ranks
        return {"decoder_input": hidden}
    parameter = next(gpt.vision_tower.parameters())
    embedded = gpt.vision_tower(
        torch.from_numpy(pictures.pixel_values).to(device, parameter.dtype),
        grid_thw=torch.from_numpy(pictures.image_grid_thw).to(device),
    ).pooler_output
    merged: torch.Tensor = hidden.index_copy(0, slots, embedded[pieces, None].to(hidden.dtype))
    return {"decoder_input": merged}
