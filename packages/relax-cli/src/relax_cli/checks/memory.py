"""The sums of a plan: what is in the memory of a GPU, of a node or of the machine, at each moment of a step.

Counted is what follows from the options and the shape of the model. What libraries take of a GPU for themselves is not:
CUDA's context, CUDA graphs, NCCL's channels, together a few GB.
"""

import dataclasses
import math

from relax_rollout.engines.sglang import cpu
from relax_train.models.costs import CHUNK_BYTES, Activations, Recompute
from relax_train.models.shape import ModelShape
from relax_train.settings.model import read_hf_config

from relax_cli.checks.lengths import longest_sample
from relax_cli.cluster.placement import Placement, gpu_memory, machine_memory
from relax_cli.config.run_config import RunConfig

LARGEST_GPU = 288e9
"""Bytes of memory of the largest GPU that is sold (NVIDIA B300, AMD MI355X)."""

LARGEST_SHARE = 0.95
"""Of a GPU that an engine can have; the rest are CUDA, graphs and activations."""
RECOMPUTE_ALL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"

LIBRARIES = {"run": 1.2e9, "rank": 0.6e9, "engine": 1.3e9}
"""Bytes of the imports on CPU: Ray with driver and rollout worker, a rank, an engine; measured, shared pages once."""


@dataclasses.dataclass(frozen=True)
class Room:
    """A memory that something has to fit into.

    Attributes:
        size: bytes.
        owner: who has them, in words.
        known: it is the memory that the run will have, not the largest that there is.
        swaps: the system may make room for more, slowly.
    """

    size: float
    owner: str
    known: bool
    swaps: bool = False


@dataclasses.dataclass(frozen=True)
class Part:
    """What is in a memory beside others.

    Attributes:
        name: of it.
        size: bytes.
        smaller: ways to make it smaller, in words.
        certain: it is no estimate, and no length of a sample may keep it smaller.
    """

    name: str
    size: float
    smaller: tuple[str, ...] = ()
    certain: bool = True


@dataclasses.dataclass(frozen=True)
class Moment:
    """What is in one memory at one moment.

    Attributes:
        name: of the moment.
        parts: what is in it.
        room: what it has to fit into.
        likely: it can be as much as that: no length of a sample is taken from what the model could hold.
        whose: ``trainer`` or ``engine`` where each has GPUs of its own.
        larger: ways to make the room larger, in words.
    """

    name: str
    parts: tuple[Part, ...]
    room: Room
    likely: bool = True
    whose: str = ""
    larger: tuple[str, ...] = ()

    @property
    def total(self) -> float:
        """Bytes of all parts."""
        return sum(part.size for part in self.parts)

    @property
    def certain(self) -> float:
        """Bytes of the parts that are no estimates."""
        return sum(part.size for part in self.parts if part.certain)

    @property
    def over(self) -> float:
        """Bytes that are too much, below 0 when it fits; of what is not ``likely`` the certain part counts."""
        return (self.total if self.likely else self.certain) - self.room.size

    @property
    def excess(self) -> str:
        """What to say when it does not fit."""
        whose = f"of a GPU of the {self.whose} " if self.whose else ""
        room = f"{self.room.owner} has {shown(self.room.size)}"
        return f"memory {whose}{self.name}: {self.sum_shown}, and {room}: {self.fix}"

    @property
    def fix(self) -> str:
        """What to change when it does not fit: one part that may become small enough, else all that have to."""
        parts = [part for part in self.parts if part.smaller and part.size and (part.certain or self.likely)]
        parts.sort(key=lambda part: part.certain)
        has_to = [part for part in parts if part.size > self.room.size]
        may = [part for part in parts if part.size >= self.over]
        if has_to or not may:
            both = "; and ".join(", or ".join(part.smaller) for part in has_to or parts)
            return ", or ".join(filter(None, [*self.larger, both]))
        return ", or ".join(dict.fromkeys([*self.larger, *(way for part in may for way in part.smaller)]))

    @property
    def sum_shown(self) -> str:
        """The sum in words: ``6.0 GB weights + 2.0 GB activations = 8.0 GB``."""
        parts = [part for part in self.parts if part.size]
        terms = " + ".join(f"{shown(part.size)} {part.name}" for part in parts)
        longest = any(not part.certain for part in parts) and not self.likely
        most = " (for the longest sample that is possible; --rollout-max-context-len sets less)" if longest else ""
        return (terms if len(parts) == 1 else f"{terms} = {shown(self.total)}") + most


def bf16(config: RunConfig) -> bool:
    """Whether weights are bfloat16; by default they are on GPUs, known or planned."""
    chosen = config.train.model.bf16
    return config.placement is None or config.placement.device == "cuda" if chosen is None else chosen


def weight_width(config: RunConfig) -> int:
    """Bytes of a weight, and of a number in a KV cache."""
    return 2 if bf16(config) else 4


def device_room(config: RunConfig, placement: Placement) -> Room:
    """The memory of one GPU, or of this machine for a run on CPU."""
    if placement.device == "cpu":
        return Room(machine_memory(), "this machine", known=config.cluster.ray_address is None, swaps=True)
    here = gpu_memory() if config.cluster.ray_address is None else None
    if here is not None:
        return Room(here, "a GPU of this machine", known=True)
    return Room(LARGEST_GPU, "the largest GPU that is sold", known=False)


def trainer_bytes(config: RunConfig, shape: ModelShape, placement: Placement) -> tuple[int, int]:
    """Bytes of weights, gradients and optimizer on the fullest rank: on its device, and on the host."""
    return shape.training_bytes(
        placement,
        bf16=bf16(config),
        offload=config.train.parallel.optimizer_cpu_offload,
        vision_trained=not config.train.model.freeze_vision_model,
    )


def activations(config: RunConfig, shape: ModelShape, placement: Placement) -> tuple[Activations, Recompute]:
    """Memory of a micro-batch on one rank, and what of it is computed again (``--recompute-granularity``)."""
    parallel, width = config.train.parallel, weight_width(config)
    memory = Activations(shape=shape, sizes=placement, sequence_parallel=parallel.sequence_parallel, width=width)
    method, layers = parallel.recompute_method, parallel.recompute_num_layers or 0
    return memory, Recompute(method=method, layers=layers, modules=parallel.recomputed_modules)


@dataclasses.dataclass(frozen=True)
class MicroBatch:
    """The largest micro-batch that a rank may get.

    Attributes:
        tokens: of it; None: nothing limits the length of a sample.
        why: why so many, or why it is not known.
        chosen: the options say so, not what the model could hold.
    """

    tokens: int | None
    why: str
    chosen: bool


def micro_batch(config: RunConfig) -> MicroBatch:
    """The largest micro-batch of a run, from ``--max-tokens-per-gpu`` or from the longest sample."""
    batch, cp = config.train.batch, config.train.parallel.context_parallel_size
    if batch.use_dynamic_batch_size and batch.max_tokens_per_gpu is not None:
        return MicroBatch(batch.max_tokens_per_gpu, f"{batch.max_tokens_per_gpu} tokens", chosen=True)
    longest, why, chosen = longest_sample(config)
    if longest is None:
        return MicroBatch(None, why, chosen=False)
    tokens = math.ceil(batch.micro_batch_size * longest / max(1, cp))
    several = f"{batch.micro_batch_size} x " if batch.micro_batch_size > 1 else ""
    part = f" / CP {cp}" if cp > 1 else ""
    return MicroBatch(tokens, f"{several}{longest}{part} tokens ({why})", chosen)


def logits_bytes(config: RunConfig, shape: ModelShape, placement: Placement, tokens: int) -> int:
    """Bytes of the logits that are in memory at a time."""
    return min(tokens * shape.vocab * weight_width(config) // placement.tp, CHUNK_BYTES)


def engine_weights(config: RunConfig, shape: ModelShape, placement: Placement) -> int | None:
    """Bytes of the weights on one GPU of an engine; None where quantised ones, or some on the host, keep it unknown."""
    extra = config.sglang.sglang_extra
    quantised = extra.get("quantization") or read_hf_config(config.train.model.hf_checkpoint).get("quantization_config")
    if quantised or extra.get("cpu_offload_gb"):
        return None
    return shape.parameters * weight_width(config) // placement.gpus_per_engine


def moments(config: RunConfig, shape: ModelShape, placement: Placement) -> list[Moment]:
    """The sums of a run, the device's first."""
    found = _on_cpu(config, shape, placement) if placement.device == "cpu" else _on_gpus(config, shape, placement)
    return [moment for moment in found if moment.total]


def _trains(config: RunConfig) -> bool:
    return not config.debug.debug_rollout_only


def _generates(config: RunConfig) -> bool:
    return not config.debug.debug_train_only


def _working(config: RunConfig, shape: ModelShape, placement: Placement) -> tuple[float, float]:
    """(activations, logits) of a micro-batch on one rank; 0 where they are not known."""
    tokens = micro_batch(config).tokens
    if tokens is None:
        return 0, 0
    memory, chosen = activations(config, shape, placement)
    return memory.of(tokens, chosen), logits_bytes(config, shape, placement, tokens)


def _buckets(config: RunConfig, shape: ModelShape) -> Part:
    """Two buckets of a push, of which each has at least one whole tensor."""
    width, asked = weight_width(config), config.train.model.update_weight_buffer_size
    weights = [shape.embedding_weight, *(weight for kind in set(shape.kinds) for weight in shape.weights[kind])]
    largest = max(math.prod(shape.size(t.dims)) for weight in weights for t in weight.tensors) * width
    size = 2 * min(max(largest, asked), shape.parameters * width)
    return Part("two buckets", size, ("lower --update-weight-buffer-size",) if asked > largest else ())


def _on_gpus(config: RunConfig, shape: ModelShape, placement: Placement) -> list[Moment]:
    room, found = device_room(config, placement), []
    trainer, offloaded = trainer_bytes(config, shape, placement)
    own = ("", "") if placement.shared else ("trainer", "engine")
    held = Part("weights, gradients, optimizer", trainer, _smaller_trainer(config, placement))
    model = Part("the engine's weights", engine_weights(config, shape, placement) or 0, _smaller_engine(placement))
    if _trains(config):
        kept, logits = _working(config, shape, placement)
        working = (Part("activations", kept, _smaller_activations(config), certain=False), Part("logits", logits))
        found.append(Moment("while it trains", (held, *working), room, micro_batch(config).chosen, own[0]))
    if _trains(config) and _generates(config):
        buckets = _buckets(config, shape)
        pushed = (held, model, buckets) if placement.shared else (held, buckets)
        found.append(Moment("in a push of weights", pushed, room, whose=own[0]))
    if _generates(config):
        found.append(_generating(config, shape, placement, model, own[1]))
    return [*found, *_on_host(config, shape, placement, offloaded)]


def _generating(config: RunConfig, shape: ModelShape, placement: Placement, model: Part, whose: str) -> Moment:
    """Weights and keys and values of one sample, in the share of a GPU that the engine has."""
    room, share = device_room(config, placement), config.sglang.sglang_mem_fraction_static
    part = Room(room.size * share, f"--sglang-mem-fraction-static {share} of {room.owner}", room.known)
    one = shape.kv_cache_bytes(weight_width(config)) * (longest_sample(config)[0] or 0) / placement.gpus_per_engine
    shorter = ("lower --rollout-max-context-len", *model.smaller)
    cache = Part("KV cache of one longest sample", one, shorter, certain=False)
    likely = config.rollout.rollout_max_context_len is not None
    needed = (model.size + one if likely else model.size) / room.size
    larger = ("raise --sglang-mem-fraction-static",) if needed < LARGEST_SHARE else ()
    return Moment("while it generates, at least", (model, cache), part, likely, whose, larger)


def _smaller_trainer(config: RunConfig, placement: Placement) -> tuple[str, ...]:
    """What makes weights, gradients and optimizer of a rank smaller."""
    sizes = "--tensor-model-parallel-size or --pipeline-model-parallel-size"
    if placement.dp == 1:
        sizes += ", with more GPUs that train (--actor-num-gpus-per-node, --actor-num-nodes)"
    offload = config.train.parallel.optimizer_cpu_offload
    return (f"raise {sizes}", *(() if offload else ("add --optimizer-cpu-offload",)))


def _smaller_engine(placement: Placement) -> tuple[str]:
    """What makes an engine's weights on one GPU smaller: more GPUs an engine, which a single one does not find yet."""
    more = "--actor-num-gpus-per-node" if placement.shared else "--rollout-num-gpus"
    return ("raise --rollout-num-gpus-per-engine" + (f" and {more}" if placement.engines == 1 else ""),)


def _smaller_activations(config: RunConfig) -> tuple[str, ...]:
    """What makes the activations of a micro-batch smaller."""
    batch, found = config.train.batch, "lower --rollout-max-context-len"
    if batch.use_dynamic_batch_size and batch.max_tokens_per_gpu is not None:
        found = "lower --max-tokens-per-gpu"
    elif batch.micro_batch_size > 1:
        found = "lower --micro-batch-size"
    full = config.train.parallel.recompute_granularity == "full"
    return (found, *(() if full else (f"add {RECOMPUTE_ALL}",)))


def _on_host(config: RunConfig, shape: ModelShape, placement: Placement, offloaded: int) -> list[Moment]:
    """What the ranks of one node keep in its memory."""
    if not _trains(config):
        return []
    ranks = placement.train_ranks // max(1, config.cluster.actor_num_nodes)
    offload = config.train.parallel.optimizer_cpu_offload
    copies = ("raise --tensor-model-parallel-size, for fewer copies of the weights",) if placement.dp > 1 else ()
    # On GPUs that are shared it comes to the host in any case, while engines generate.
    parts = [Part("optimizer", offloaded * ranks, () if placement.shared else ("leave out --optimizer-cpu-offload",))]
    if placement.shared and _generates(config):
        asleep = shape.sleeping_bytes(placement, bf16=bf16(config), offload=offload)
        parts.append(Part("what sleeps while engines generate", asleep * ranks, copies))
    if config.train.algorithm.needs_reference:
        own = sum(shape.parameters_per_rank(placement)) * weight_width(config)
        parts.append(Part("reference model", own * ranks, copies))
    here = config.cluster.ray_address is None and gpu_memory() is not None
    room = Room(machine_memory(), "this machine", known=True) if here else Room(math.inf, "a node", known=False)
    name = f"on the host, {ranks} rank{'s' * (ranks > 1)} a node"
    larger = ("use nodes with more memory", "more of them (--actor-num-nodes)")
    return [Moment(name, tuple(parts), room, larger=larger)]


def _on_cpu(config: RunConfig, shape: ModelShape, placement: Placement) -> list[Moment]:
    """All of one machine: ranks and engine are in its memory side by side."""
    ranks = placement.train_ranks // placement.nodes if _trains(config) else 0
    engines = placement.engines // placement.nodes if _generates(config) else 0
    libraries = LIBRARIES["run"] + ranks * LIBRARIES["rank"] + engines * LIBRARIES["engine"]
    parts = [Part("libraries", libraries)]
    if _trains(config):
        kept, logits = _working(config, shape, placement)
        own = trainer_bytes(config, shape, placement)[0]
        parts.append(Part("weights, gradients, optimizer", own * ranks))
        parts.append(Part("activations", kept * ranks, _smaller_activations(config), certain=False))
        parts.append(Part("logits", logits * ranks))
    if _generates(config):
        asked = str(config.sglang.sglang_extra.get("max_total_tokens", ""))
        tokens = int(asked) if asked.isdecimal() else cpu.OPTIONS["max-total-tokens"]
        cache = shape.kv_cache_bytes(weight_width(config)) * tokens
        parts.append(Part("the engine's weights", engines * (engine_weights(config, shape, placement) or 0)))
        fewer = ("lower --sglang-max-total-tokens",)
        parts.append(Part(f"KV cache of {tokens} tokens", engines * cache, fewer))
    if _trains(config) and _generates(config):
        parts.append(_buckets(config, shape))
    likely = not _trains(config) or micro_batch(config).chosen
    larger = ("use GPUs", "a smaller model")
    return [Moment("on this machine", tuple(parts), device_room(config, placement), likely, larger=larger)]


def shown(n_bytes: float) -> str:
    """A size in words."""
    return f"{n_bytes / 1e9:,.1f} GB" if n_bytes >= 1e8 else f"{n_bytes / 1e6:.1f} MB"
