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
row, before context parallelism. Each document is padded to a multiple of ``2 * cp``, of which
:func:`relax_train.models.context_parallel.zigzag_positions` says which positions a rank holds, and the row of a rank to
a multiple of TP with sequence parallelism. Without ``labels`` the last stage returns logits
``[1, tokens, padded_vocab_size / tp]``, cut over the tensor-parallel ranks by vocabulary; columns beyond ``vocab_size``
hold :data:`PADDING_LOGIT`, so that a softmax ignores them. Inside ``with model.without_head():`` it returns what the
output layer would have been given: hidden states ``[1, tokens, hidden]`` (with sequence parallelism this rank's part of
the tokens), for :mod:`relax_train.algorithms.output_head`, which needs ``model.head_weight`` with them.

Gradients are sums: with ``calculate_per_token_loss`` megatron adds up what ``loss_func`` returns first over
micro-batches, data- and context-parallel ranks, and divides by the sum of what it returns second.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from relax_train.backend.device import accumulates_products, default_dtype, has_cuda
from relax_train.backend.device_context import DeviceContext
from relax_train.backend.mcore import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    GPTModel,
    TransformerConfig,
)
from relax_train.backend.parallel import ParallelState
from relax_train.models.architectures import model_shape
from relax_train.models.experts import in_order, use_grouped_products
from relax_train.models.fused import Remake, fuse
from relax_train.models.layers import stage_spec
from relax_train.models.shape import ModelShape
from relax_train.models.vision.tower import build_tower
from relax_train.settings import TrainSettings
from relax_train.settings.model import read_hf_config
from relax_train.settings.parallel import ParallelSettings

PADDING_LOGIT = -1e30
"""Logit of vocabulary entries that exist only to make the vocabulary divisible; its softmax is exactly 0."""


@dataclasses.dataclass(eq=False)
class Model:
    """One model on this rank.

    Attributes:
        chunks: what a forward-backward schedule calls: DDP-wrapped when trainable, bare GPTModel otherwise.
        config: megatron-core's; the schedules read their hooks from it.
        shape: sizes and weights, from the ``config.json`` it was built from.
        hf_folder: folder of that configuration (tokenizer files are copied from there).
        config_json: that configuration as its file had it; a save needs nothing of the folder.
        padded_vocab_size: entries of the vocabulary, raised to a multiple of the tensor-parallel size.
        trainable: whether it has gradient buffers.
    """

    chunks: list[Any]
    config: TransformerConfig
    parallel: ParallelState
    shape: ModelShape
    hf_folder: str
    config_json: dict[str, Any]
    padded_vocab_size: int
    trainable: bool

    @property
    def gpt(self) -> list[GPTModel]:
        """The chunks without their DDP wrapper."""
        return [chunk.module if self.trainable else chunk for chunk in self.chunks]

    @property
    def head_weight(self) -> torch.nn.Parameter:
        """Weight of the output layer, on the last stage: ``[padded_vocab_size / tp, hidden]``."""
        last = self.gpt[-1]
        weight = last.shared_embedding_or_output_weight() if self.tied else last.output_layer.weight
        assert isinstance(weight, torch.nn.Parameter)
        return weight

    @contextlib.contextmanager
    def without_head(self) -> Iterator[None]:
        """Inside, the last stage returns hidden states in place of logits."""
        layers = [gpt.output_layer for gpt in self.gpt if gpt.post_process]
        for layer in layers:
            layer.skipped = True
        try:
            yield
        finally:
            for layer in layers:
                layer.skipped = False

    @property
    def vocab_size(self) -> int:
        """Entries of the vocabulary, as in the Hugging Face checkpoint."""
        return self.shape.vocab

    @property
    def tied(self) -> bool:
        """Whether the output layer shares the weights of the input embedding."""
        return self.shape.tied

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the parameters."""
        dtype: torch.dtype = self.config.params_dtype
        return dtype


def load_shape(folder: str) -> ModelShape:
    """The shape of the model in a Hugging Face folder, from its ``config.json``.

    Raises:
        ValueError: it asks for something this package does not build; the message names the key.
    """
    config = read_hf_config(folder)
    try:
        shape = model_shape(config)
    except ValueError as error:
        raise ValueError(str(error).replace("config.json", f"{folder}/config.json", 1)) from error
    if config.get("quantization_config"):  # its numbers mean nothing without the scales beside them
        raise ValueError(
            f"{folder}/config.json: quantization_config is not supported; use the model in bfloat16 or float32"
        )
    return shape


def check_same_architecture(shape: ModelShape, folder: str) -> None:
    """Refuses weights that the model of ``shape`` could load but would not compute with as they were trained.

    Raises:
        ValueError: the configuration in ``folder`` differs; the message names the keys.
    """
    other = load_shape(folder)
    ours, theirs = shape.as_config(), other.as_config()
    differing = [f"{key} {theirs[key]!r} instead of {ours[key]!r}" for key in ours if theirs[key] != ours[key]]
    if differing:
        raise ValueError(f"{folder}/config.json has {', '.join(differing)}: the models must have the same architecture")


def _moe_options(shape: ModelShape) -> dict[str, Any]:
    if not shape.experts:
        return {}
    return {
        "num_moe_experts": shape.experts,
        "moe_router_topk": shape.experts_per_token,
        "moe_ffn_hidden_size": shape.expert_ffn,
        "moe_layer_freq": [int(kind == "experts") for kind in shape.kinds],
        "moe_grouped_gemm": False,
        # Softmax over the chosen experts is softmax over all, renormalised.
        "moe_router_pre_softmax": not shape.renormalised,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_dtype": "fp32",
    }


MEGATRONS_MODULES = ("core_attn", "mlp", "moe")
"""What megatron-core recomputes itself, of ``--recompute-modules``."""


def _recompute_options(options: ParallelSettings) -> dict[str, Any]:
    """What megatron-core recomputes: chunks of several layers, and modules; the rest is ours (:func:`_fuse`)."""
    if options.recompute_granularity == "full" and not _recomputes_by_layer(options):
        return {
            "recompute_granularity": "full",
            "recompute_method": options.recompute_method,
            "recompute_num_layers": options.recompute_num_layers,
        }
    modules = [name for name in options.recomputed_modules if name in MEGATRONS_MODULES]
    return {"recompute_granularity": "selective", "recompute_modules": modules} if modules else {}


def _recomputes_by_layer(options: ParallelSettings) -> bool:
    """Whether layers are recomputed one by one, as this package does it; else megatron-core does, by the chunk."""
    return options.recompute_method == "block" or options.recompute_num_layers == 1


def _fuse(gpt: GPTModel, options: ParallelSettings, layers: int) -> None:
    modules, whole = options.recomputed_modules, 0
    if options.recompute_granularity == "full" and _recomputes_by_layer(options):
        whole = layers if options.recompute_method == "uniform" else options.recompute_num_layers or 0
    fuse(
        gpt,
        Remake(
            norms="layernorm" in modules,
            activations="mlp_act" in modules,
            expert_activations="moe_act" in modules,
        ),
        recomputed_layers=whole,
        at_once=gpt.post_process and options.recompute_method == "uniform",
    )


def adds_products(dtype: torch.dtype) -> bool:
    """Whether the products that give gradients add to the float32 buffer themselves."""
    return dtype == torch.bfloat16 and accumulates_products()


def transformer_config(settings: TrainSettings, parallel: ParallelState, shape: ModelShape) -> TransformerConfig:
    """megatron-core's configuration of the model."""
    options, dtype = settings.parallel, default_dtype(settings.model.bf16)
    return TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.ffn,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads,
        kv_channels=shape.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        qk_layernorm=shape.qk_norm,
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
        **_recompute_options(options),
        # "allgather" refuses sequences of varying length, also in a dense model.
        moe_token_dispatcher_type="alltoall",
        # Fused kernels of apex and TransformerEngine.
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=adds_products(dtype),
        persist_layer_norm=False,
        cross_entropy_loss_fusion=False,
        **_moe_options(shape),
    )


def _mask_padding(layer: torch.nn.Module, padding: int) -> None:
    """Makes the output layer give its last ``padding`` local columns :data:`PADDING_LOGIT`."""

    def hook(_: torch.nn.Module, __: Any, output: Any) -> None:
        if not layer.skipped:
            output[0][..., -padding:] = PADDING_LOGIT  # in place: logits are the largest tensor there is

    layer.register_forward_hook(hook)


def _head(layer: Any, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Forward pass of the output layer: its logits, or ``hidden`` itself while it is skipped."""
    return (hidden, None) if layer.skipped else type(layer).forward(layer, hidden, *args, **kwargs)


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
    shape = load_shape(folder)
    problems = settings.parallel.model_problems(shape.as_config(), parallel.world_size)
    if problems:
        raise ValueError("; ".join(problems))
    vocab = shape.vocab
    padded = -(-vocab // parallel.tp_size) * parallel.tp_size
    per_stage = shape.layers // parallel.pp_size
    first = parallel.pp_rank * per_stage
    with DeviceContext():
        config = transformer_config(settings, parallel, shape)
        gpt = GPTModel(
            config=config,
            transformer_layer_spec=stage_spec(config, shape, shape.kinds[first : first + per_stage]),
            vocab_size=padded,
            max_sequence_length=shape.max_positions or 0,  # for learned positions, which this model has not
            pre_process=parallel.is_first_stage,
            post_process=parallel.is_last_stage,
            position_embedding_type="none",  # PackedAttention rotates, all documents of a row at once
            share_embeddings_and_output_weights=shape.tied,
        ).to(parallel.device)
        if shape.vision is not None and parallel.is_first_stage:
            tower = build_tower(shape.vision, config, trained=trainable and not settings.model.freeze_vision_model)
            gpt.vision_tower = tower.to(parallel.device)
        use_grouped_products(gpt)
        _fuse(gpt, settings.parallel, per_stage)
        if parallel.is_last_stage:
            gpt.output_layer.skipped = False
            gpt.output_layer.forward = functools.partial(_head, gpt.output_layer)
        if parallel.is_last_stage and padded > vocab and parallel.tp_rank == parallel.tp_size - 1:
            _mask_padding(gpt.output_layer, padded - vocab)
        chunk: Any = gpt
        if trainable:
            options = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
            with in_order(gpt):
                chunk = DistributedDataParallel(config, options, gpt)
        else:
            gpt.requires_grad_(False)
            gpt.eval()
    return Model(
        chunks=[chunk],
        config=config,
        parallel=parallel,
        shape=shape,
        hf_folder=folder,
        config_json=read_hf_config(folder),
        padded_vocab_size=padded,
        trainable=trainable,
    )
