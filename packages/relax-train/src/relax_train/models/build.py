"""The model: a megatron-core GPT built from a Hugging Face configuration.

What others build on (all of it inside ``with DeviceContext():`` of :mod:`relax_train.backend.device`)::

    parallel = setup_parallel(settings.parallel, seed=settings.model.seed)       # relax_train.backend.parallel
    model = build_model(settings, parallel)                                     # DDP-wrapped; weights not yet set
    load_hf_weights(model, settings.model.hf_checkpoint)                      # relax_train.models.hf_mapping
    optimizer = build_optimizer(settings, model, total_steps=...)             # relax_train.backend.optimizer
    for chunk in model.chunks: chunk(tokens, position_ids, None, packed_seq_params=...)
    optimizer.zero_grad(); ...schedule...; result = optimizer.step()          # also the learning-rate schedule

``build_model(settings, parallel, trainable=False)`` gives a model without gradient buffers (a reference model).

A chunk takes one packed row: ``tokens`` and ``position_ids`` int64 ``[1, tokens of this context-parallel rank]``
(``position_ids`` is not used by rotary embedding but megatron wants it), ``packed_seq_params`` with
``qkv_format="thd"`` and ``cu_seqlens_q = cu_seqlens_kv`` int32 on the device: the borders of the documents in the FULL
row, before context parallelism, each document padded to a multiple of ``2 * cp`` (:func:`zigzag_positions` of
:mod:`relax_train.models.context_parallel` says which positions a rank holds), the row of a rank to a multiple of TP
with sequence parallelism. Without ``labels`` the last stage returns logits ``[1, tokens, padded_vocab_size / tp]``, cut
over the tensor-parallel ranks by vocabulary; columns beyond ``vocab_size`` hold :data:`PADDING_LOGIT`, so that a
softmax ignores them.

Gradients are sums: with ``calculate_per_token_loss`` megatron adds up what ``loss_func`` returns first over
micro-batches, data- and context-parallel ranks, and divides by the sum of what it returns second.
"""

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F

from relax_train.backend.device import default_dtype, has_cuda
from relax_train.backend.device_context import DeviceContext
from relax_train.backend.mcore import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    GPTModel,
    TransformerConfig,
)
from relax_train.backend.parallel import ParallelState
from relax_train.models.experts import use_grouped_products
from relax_train.models.layers import stage_spec
from relax_train.settings import TrainSettings
from relax_train.settings.model import MODEL_TYPES, SHAPE_KEYS, read_hf_config

PADDING_LOGIT = -1e30
"""Logit of vocabulary entries that exist only to make the vocabulary divisible; its softmax is exactly 0."""


@dataclasses.dataclass(eq=False)
class Model:
    """One model on this rank.

    Attributes:
        chunks: what a forward-backward schedule calls: DDP-wrapped when trainable, bare GPTModel otherwise.
        config: megatron-core's; the schedules read their hooks from it.
        hf_config: the transformers configuration it was built from.
        hf_folder: folder of that configuration (tokenizer files are copied from there).
        config_json: that configuration as its file had it; a save needs nothing of the folder.
        vocab_size: entries of the vocabulary, as in the Hugging Face checkpoint.
        padded_vocab_size: the same, raised to a multiple of the tensor-parallel size.
        tied: whether the output layer shares the weights of the input embedding.
        trainable: whether it has gradient buffers.
    """

    chunks: list[Any]
    config: TransformerConfig
    parallel: ParallelState
    hf_config: Any
    hf_folder: str
    config_json: dict[str, Any]
    vocab_size: int
    padded_vocab_size: int
    tied: bool
    trainable: bool

    @property
    def gpt(self) -> list[GPTModel]:
        """The chunks without their DDP wrapper."""
        return [chunk.module if self.trainable else chunk for chunk in self.chunks]

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the parameters."""
        dtype: torch.dtype = self.config.params_dtype
        return dtype


def load_hf_config(folder: str) -> Any:
    """The transformers configuration of a folder.

    Raises:
        ValueError: it asks for something this package does not build; the message names the key.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, local_files_only=True)

    def refuse(what: str) -> None:
        raise ValueError(f"{folder}/config.json: {what} is not supported; use a Qwen2, Qwen3 or Qwen3-MoE checkpoint")

    if config.model_type not in MODEL_TYPES:
        refuse(f"model_type {config.model_type!r}")
    if config.hidden_act != "silu":
        refuse(f"hidden_act {config.hidden_act!r}")
    if getattr(config, "use_sliding_window", False):
        refuse("use_sliding_window")
    if getattr(config, "attention_bias", False):
        refuse("attention_bias")
    if getattr(config, "quantization_config", None):  # its numbers mean nothing without the scales beside them
        refuse("quantization_config")
    rope_theta(config)
    return config


def rope_theta(hf_config: Any) -> float:
    """Base of the rotary embedding, from ``rope_parameters`` (transformers 5) or ``rope_theta`` (before).

    Raises:
        ValueError: the embedding is scaled (yarn, linear, ...).
    """
    parameters = getattr(hf_config, "rope_parameters", None) or getattr(hf_config, "rope_scaling", None) or {}
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind != "default":
        raise ValueError(
            f"config.json: rope type {kind!r} is not supported; remove it to train at the model's native context length"
        )
    theta = parameters.get("rope_theta", getattr(hf_config, "rope_theta", None))
    if theta is None:
        raise ValueError("config.json: neither rope_parameters.rope_theta nor rope_theta is there; add one of them")
    return float(theta)


_ARCHITECTURE = (
    *SHAPE_KEYS,
    "rms_norm_eps",
    "num_experts_per_tok",
    "norm_topk_prob",
    "decoder_sparse_step",
    "mlp_only_layers",
)


def check_same_architecture(hf_config: Any, folder: str) -> None:
    """Refuses weights that the model of ``hf_config`` could load but would not compute with as they were trained.

    Raises:
        ValueError: the configuration in ``folder`` differs; the message names the keys.
    """
    other = load_hf_config(folder)
    pairs = {key: (getattr(hf_config, key, None), getattr(other, key, None)) for key in _ARCHITECTURE}
    pairs["rope_theta"] = (rope_theta(hf_config), rope_theta(other))
    differing = [f"{key} {b!r} instead of {a!r}" for key, (a, b) in pairs.items() if (a or None) != (b or None)]
    if differing:
        raise ValueError(f"{folder}/config.json has {', '.join(differing)}: the models must have the same architecture")


def expert_layers(hf_config: Any) -> list[bool]:
    """For each layer, whether its MLP is a mixture of experts."""
    if hf_config.model_type != "qwen3_moe":
        return [False] * hf_config.num_hidden_layers
    dense, step = set(hf_config.mlp_only_layers or ()), hf_config.decoder_sparse_step
    return [
        i not in dense and hf_config.num_experts > 0 and (i + 1) % step == 0 for i in range(hf_config.num_hidden_layers)
    ]


def _moe_options(hf_config: Any) -> dict[str, Any]:
    layers = expert_layers(hf_config)
    if not any(layers):
        return {}
    return {
        "num_moe_experts": hf_config.num_experts,
        "moe_router_topk": hf_config.num_experts_per_tok,
        "moe_ffn_hidden_size": hf_config.moe_intermediate_size,
        "moe_layer_freq": [int(flag) for flag in layers],
        "moe_grouped_gemm": False,
        # Softmax over the chosen experts is softmax over all, renormalised.
        "moe_router_pre_softmax": not hf_config.norm_topk_prob,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_dtype": "fp32",
    }


def transformer_config(settings: TrainSettings, parallel: ParallelState, hf_config: Any) -> TransformerConfig:
    """megatron-core's configuration of the model."""
    options, dtype = settings.parallel, default_dtype(settings.model.bf16)
    heads = hf_config.num_attention_heads
    return TransformerConfig(
        num_layers=hf_config.num_hidden_layers,
        hidden_size=hf_config.hidden_size,
        ffn_hidden_size=hf_config.intermediate_size,
        num_attention_heads=heads,
        num_query_groups=hf_config.num_key_value_heads or heads,
        kv_channels=getattr(hf_config, "head_dim", None) or hf_config.hidden_size // heads,
        normalization="RMSNorm",
        layernorm_epsilon=hf_config.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=hf_config.model_type == "qwen2",
        qk_layernorm=hf_config.model_type in ("qwen3", "qwen3_moe"),
        attention_dropout=0.0,
        hidden_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=parallel.tp_size,
        pipeline_model_parallel_size=parallel.pp_size,
        context_parallel_size=parallel.cp_size,
        expert_model_parallel_size=parallel.ep_size,
        expert_tensor_parallel_size=parallel.etp_size,
        sequence_parallel=options.sequence_parallel,
        variable_seq_lengths=parallel.pp_size > 1,
        batch_p2p_sync=has_cuda(),
        calculate_per_token_loss=True,
        # Although every weight comes from a checkpoint: megatron marks how a weight is cut while it initialises it.
        perform_initialization=True,
        use_cpu_initialization=not has_cuda(),
        recompute_granularity=options.recompute_granularity,
        recompute_method=options.recompute_method,
        recompute_num_layers=options.recompute_num_layers,
        # "allgather" refuses sequences of varying length, also in a dense model.
        moe_token_dispatcher_type="alltoall",
        # Fused kernels of apex and TransformerEngine.
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        cross_entropy_loss_fusion=False,
        **_moe_options(hf_config),
    )


def _mask_padding(layer: torch.nn.Module, padding: int) -> None:
    """Makes the output layer give its last ``padding`` local columns :data:`PADDING_LOGIT`."""

    def hook(_: torch.nn.Module, __: Any, output: Any) -> None:
        output[0][..., -padding:] = PADDING_LOGIT  # in place: logits are the largest tensor there is

    layer.register_forward_hook(hook)


def build_model(
    settings: TrainSettings, parallel: ParallelState, *, folder: str | None = None, trainable: bool = True
) -> Model:
    """Builds this rank's part of the model; its weights are undefined until they are loaded.

    Args:
        folder: Hugging Face folder whose configuration is built; default ``--hf-checkpoint``.
        trainable: False leaves out gradient buffers (a reference model).

    Raises:
        ValueError: the model or the parallel sizes are not supported; the message names what.
    """
    folder = folder or settings.model.hf_checkpoint
    hf_config = load_hf_config(folder)
    problems = settings.parallel.model_problems(hf_config.to_dict(), parallel.world_size)
    if problems:
        raise ValueError("; ".join(problems))
    vocab = hf_config.vocab_size
    padded = -(-vocab // parallel.tp_size) * parallel.tp_size
    layers = expert_layers(hf_config)
    per_stage = len(layers) // parallel.pp_size
    first = parallel.pp_rank * per_stage
    with DeviceContext():
        config = transformer_config(settings, parallel, hf_config)
        gpt = GPTModel(
            config=config,
            transformer_layer_spec=stage_spec(
                config, layers[first : first + per_stage], rope_theta=rope_theta(hf_config)
            ),
            vocab_size=padded,
            max_sequence_length=hf_config.max_position_embeddings,
            pre_process=parallel.is_first_stage,
            post_process=parallel.is_last_stage,
            position_embedding_type="none",  # PackedAttention rotates, all documents of a row at once
            share_embeddings_and_output_weights=bool(hf_config.tie_word_embeddings),
        ).to(parallel.device)
        use_grouped_products(gpt)
        if parallel.is_last_stage and padded > vocab and parallel.tp_rank == parallel.tp_size - 1:
            _mask_padding(gpt.output_layer, padded - vocab)
        chunk: Any = gpt
        if trainable:
            options = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
            chunk = DistributedDataParallel(config, options, gpt)
        else:
            gpt.requires_grad_(False)
            gpt.eval()
    return Model(
        chunks=[chunk],
        config=config,
        parallel=parallel,
        hf_config=hf_config,
        hf_folder=folder,
        config_json=read_hf_config(folder),
        vocab_size=vocab,
        padded_vocab_size=padded,
        tied=bool(hf_config.tie_word_embeddings),
        trainable=trainable,
    )
