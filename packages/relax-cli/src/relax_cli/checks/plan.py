"""`relax train --dry-run`: what a start would do, worked out from the options and the model's `config.json` alone."""

import math
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from relax_data.options import flag
from relax_train.backend.room import GIB, expected_room, share_for
from relax_train.checkpoint import manifest
from relax_train.checkpoint.folders import CheckpointError
from relax_train.models.architectures import model_shape
from relax_train.models.costs import Recompute
from relax_train.models.shape import ModelShape
from relax_train.settings.model import read_hf_config
from relax_train.settings.parallel import CHEAP_TO_RECOMPUTE

from relax_cli.checks.data_checks import data_rows
from relax_cli.checks.file_checks import nothing_left
from relax_cli.checks.lengths import context_lengths, micro_batch_tokens
from relax_cli.checks.memory import (
    activations,
    bf16,
    engine_weights,
    logits_bytes,
    micro_batch,
    moments,
    shown,
    trainer_bytes,
    weight_width,
)
from relax_cli.checks.placement_checks import lacks_gpus
from relax_cli.checks.staleness_checks import most_open
from relax_cli.cluster.placement import Placement
from relax_cli.cluster.slots import slots_needed
from relax_cli.config.run_config import RunConfig
from relax_cli.config.settings import MODES

Rows = list[tuple[str, str]]

GPU_GIB = (80, 139)
"""Memory of GPUs that are in wide use (H100, H200), for a plan on a machine without one."""
LEAST_SHARE = 0.3
"""No plan proposes less of a GPU for an engine."""


def plan_text(config: RunConfig) -> str:
    """The plan as plain text, one aligned table a topic."""
    shape = model_shape(read_hf_config(config.train.model.hf_checkpoint))
    topics: list[tuple[str, Rows]] = [
        ("Run", _run(config)),
        ("Model", _model(config, shape)),
        ("Processes and placement", _processes(config)),
        ("Parallel layout of the trainer", _parallel(config)),
        ("Batches", _batches(config)),
        ("Memory of one GPU" if _on_gpu(config) else "Memory", _memory(config, shape)),
        ("Files it will write", _files(config)),
    ]
    elsewhere = " for GPUs that this machine does not have" if lacks_gpus(config) else ""
    lines = [f"Plan of run {config.name}{elsewhere}: nothing was started"]
    for title, rows in topics:
        if rows:
            lines += ["", title, *_aligned(rows)]
    if config.warnings:
        lines += ["", "Warnings", *(f"  - {warning}" for warning in config.warnings)]
    if config.notes:
        lines += ["", "A real start still needs", *(f"  - {note}" for note in config.notes)]
    return "\n".join(lines) + "\n"


def _aligned(rows: Iterable[tuple[str, str]]) -> list[str]:
    rows = list(rows)
    width = max(len(name) for name, _ in rows)
    return [f"  {name:<{width}}  {value}" for name, value in rows]


def _on_gpu(config: RunConfig) -> bool:
    return config.placement is None or config.placement.device == "cuda"


def _run(config: RunConfig) -> Rows:
    run, debug = config.run, config.debug
    mode = f"{config.cluster.mode.replace('_', ' ')}: {MODES[config.cluster.mode]}"
    if config.cluster.fully_async:
        mode += f", staleness at most {config.cluster.max_staleness}"
    if debug.debug_rollout_only:
        mode = "generate and score only (--debug-rollout-only)"
    if debug.debug_train_only:
        mode = "train on saved samples only (--debug-train-only)"
    length = "not given"
    if run.num_rollout is not None:
        length = f"{run.num_rollout} rollouts"
    if run.num_epoch is not None:
        length = f"{run.num_epoch} passes over the prompt data"
    if (done := nothing_left(config)) is not None:
        length += f"; nothing is left to do: {done}"
    rows = [("mode", mode), ("length", length), ("prompts", " ".join(config.data.prompt_data) or "saved samples")]
    rows += data_rows(config)
    if run.eval_interval is not None:
        names = ", ".join(config.eval.eval_prompt_data[::2])
        before = "" if run.skip_eval_before_train else "before the first and "
        rows.append(("evaluation", f"{names}, {before}after every {run.eval_interval} rollouts"))
    elif not debug.debug_train_only:
        rows.append(("evaluation", "none (--eval-prompt-data NAME PATH and --eval-interval)"))
    return rows


def _model(config: RunConfig, shape: ModelShape) -> Rows:
    experts = f", {shape.experts} experts of which {shape.experts_per_token} a token" if shape.experts else ""
    precision = "bfloat16, float32 master weights" if bf16(config) else "float32"
    return [
        ("checkpoint", config.train.model.hf_checkpoint),
        ("kind", f"{shape.model_type}, {shape.layers} layers, hidden {shape.hidden}, {shape.heads} heads{experts}"),
        ("parameters", f"{shape.parameters / 1e9:.2f} B" if shape.parameters > 1e8 else f"{shape.parameters:,}"),
        ("precision", precision),
    ]


def _processes(config: RunConfig) -> Rows:
    placement, cluster = config.placement, config.cluster
    ray = f"joins {cluster.ray_address}" if cluster.ray_address else "started on this machine for the run"
    if cluster.ray_address and "actor_num_gpus_per_node" not in config.given:
        ray += f" and takes the GPUs it has; planned for nodes of {cluster.num_gpus_per_node} (--num-gpus-per-node)"
    if placement is None:
        return [("Ray", ray), ("trainer and engines", "on all GPUs of the cluster")]
    trainer = f"{placement.train_ranks} ranks" if placement.train_ranks > 1 else "1 rank"
    engines = f"{placement.engines} SGLang servers" if placement.engines > 1 else "1 SGLang server"
    if placement.device == "cpu":
        if placement.nodes > 1:
            trainer += f", {placement.train_ranks // placement.nodes} on each of {placement.nodes} nodes"
            engines += ", one a node"
        rows = [("GPUs", "none: everything runs on CPU"), ("trainer", trainer), ("engines", engines)]
    else:
        nodes = cluster.actor_num_nodes
        where = (
            f"{nodes} node x {cluster.actor_num_gpus_per_node} GPUs"
            if nodes == 1
            else (f"{nodes} nodes x {cluster.actor_num_gpus_per_node} GPUs")
        )
        on = (
            "the same GPUs, in turn with the trainer"
            if placement.shared
            else (f"{placement.engines * placement.gpus_per_engine} GPUs of their own")
        )
        generate = placement.gpus - placement.train_ranks
        split = "" if placement.shared else f": {placement.train_ranks} train + {generate} generate"
        rows = [
            ("GPUs", f"{placement.gpus} in all{split}"),
            ("trainer", f"{trainer}, one a GPU: {where}"),
            (
                "engines",
                f"{engines}, {placement.gpus_per_engine} GPU{'s' * (placement.gpus_per_engine > 1)} each, on {on}",
            ),
        ]
    if not placement.shared:
        library = "NCCL" if placement.device == "cuda" else "gloo"
        over_group = f"over a process group for each engine ({library})"
        rows.append(("weights", "as files" if cluster.weight_sync == "disk" else over_group))
        rows += _way_of_rows(config, placement)
    if config.debug.debug_rollout_only:
        rows = [r for r in rows if r[0] != "trainer"]
    if config.debug.debug_train_only:
        rows = [r for r in rows if r[0] != "engines"]
    return [("Ray", ray), *rows]


def _way_of_rows(config: RunConfig, placement: Placement) -> Rows:
    """Where the rows of samples go with ``--fully-async``, and the CPUs of Ray that this needs."""
    units = config.data.num_data_storage_units
    several = "s" if units > 1 else ""
    slots = slots_needed(placement)
    return [
        ("rows", f"rollout worker -> TransferQueue, {units} storage unit{several} -> the rank that needs them"),
        ("CPUs", f"{slots} for trainer and engines + 1 + {units} for TransferQueue = {slots + 1 + units} of Ray"),
    ]


def _parallel(config: RunConfig) -> Rows:
    placement, parallel = config.placement, config.train.parallel
    if placement is None or config.debug.debug_rollout_only:
        return []
    rows = [
        (
            "TP x PP x CP x DP",
            f"{placement.tp} x {placement.pp} x {placement.cp} x {placement.dp} = {placement.train_ranks} ranks",
        ),
    ]
    if placement.ep > 1 or parallel.expert_tensor_parallel_size is not None:
        rows.append(
            ("experts: EP x ETP x DP", f"{placement.ep} x {placement.etp} x {placement.expert_dp} a pipeline stage")
        )
    rows.append(("sequence parallel", "on" if parallel.sequence_parallel else "off"))
    recompute: str = parallel.recompute_granularity or "off"
    if parallel.recompute_method is not None:
        layers = parallel.recompute_num_layers
        recompute += f", {parallel.recompute_method}, {layers} layer{'' if layers == 1 else 's'}"
    if parallel.recomputed_modules:
        recompute += f": {' '.join(parallel.recomputed_modules)}"
    rows.append(("recompute", recompute))
    return [*rows, *_resumes(config, placement)]


def _resumes(config: RunConfig, placement: Placement) -> Rows:
    """The checkpoint of ``--load``, and whether it was saved with other parallel sizes."""
    load = config.train.checkpoint.load
    try:
        found = None if load is None else manifest.find(Path(load))
    except CheckpointError:
        return []  # the checks say what is wrong with it
    if found is None:
        return []
    folder, saved = found
    now = {
        "tensor_model_parallel_size": placement.tp,
        "pipeline_model_parallel_size": placement.pp,
        "context_parallel_size": placement.cp,
        "data_parallel_size": placement.dp,
        "expert_model_parallel_size": placement.ep,
        "expert_tensor_parallel_size": placement.etp,
    }
    change = manifest.layout_change(saved, now)
    how = "saved with these sizes" if change is None else f"resharded: {change}"
    return [("resumes", f"{folder}, {how}")]


def _batches(config: RunConfig) -> Rows:
    rollout, batch, placement = config.rollout, config.train.batch, config.placement
    prompts, each = rollout.rollout_batch_size, rollout.n_samples_per_prompt
    samples = prompts * each
    size, steps = batch.global_batch_size or samples, batch.num_steps_per_rollout or 1
    rows = [
        ("samples a rollout", f"{prompts} prompts x {each} responses = {samples}"),
        ("optimizer steps a rollout", f"{samples} samples / {size} a step = {steps}"),
    ]
    rows[1:1] = _surplus(config)
    if (longest := context_lengths(config).trained) is not None:
        rows.append(("longest sample", f"{longest} tokens, {_why_longest(config, longest)}"))
    if placement is not None:
        rows.append(("samples a rank and step", f"{size} / {placement.dp} = {size / placement.dp:g}"))
    if batch.use_dynamic_batch_size and batch.max_tokens_per_gpu is not None:
        cp = config.train.parallel.context_parallel_size
        rows.append(
            ("micro-batch", f"at most {batch.max_tokens_per_gpu} x CP {cp} = {batch.max_tokens_per_gpu * cp} tokens")
        )
        cap = batch.log_probs_cap or 0
        rows.append(("log-prob pass", f"at most {cap} x CP {cp} = {cap * cp} tokens"))
    else:
        rows.append(("micro-batch", f"{batch.micro_batch_size} samples"))
    return rows


def _surplus(config: RunConfig) -> Rows:
    """What a step leaves for the next ones, how old it may become, and what becomes of interrupted samples."""
    rollout, cluster = config.rollout, config.cluster
    batch, depth, keeps = rollout.rollout_batch_size, rollout.submitted_prompts, rollout.partial_rollout
    open_ended = cluster.fully_async or depth > batch or rollout.rollout_function_path is not None
    if not open_ended or config.debug.debug_train_only:
        return []
    rows: Rows = []
    limit = f" (at most {batch} x ({cluster.max_staleness} + 1) = {most_open(config)})"
    if cluster.fully_async:
        used = f"a step takes the {batch} groups with the earliest deadlines"
        kept = "tokens" if rollout.recompute_kv_cache_after_weight_updates else "tokens, keys and values"
        then = f"samples keep their {kept} over a push of weights" if keeps else "a push waits for all that run"
    else:
        used = f"the first {batch} groups are used"
        then = "interrupted samples keep their tokens" if keeps else "interrupted samples start again"
    if depth > batch or cluster.fully_async:
        why = " (--partial-rollout)" if keeps else ""
        at_once = f"{depth} prompts open at once{limit if keeps or cluster.fully_async else ''}"
        rows.append(("over-sampling", f"{at_once}: {used}; {then}{why}"))
    rows.append(("staleness", f"at most {cluster.max_staleness} version(s) (--max-staleness)"))
    most = rollout.partial_rollout_max_aborted_count
    if keeps and most is not None:
        times = "once" if most == 1 else f"{most} times"
        told = f"a sample interrupted {times} is waited for (--partial-rollout-max-aborted-count)"
        rows.append(("interruptions", told))
    if keeps and rollout.mask_offpolicy_in_partial_rollout:
        told = "tokens older than the weights that finished their sample (--mask-offpolicy-in-partial-rollout)"
        rows.append(("not trained on", told))
    return rows


def _why_longest(config: RunConfig, longest: int) -> str:
    for name, holds in micro_batch_tokens(config).items():
        if holds == longest != config.rollout.rollout_max_context_len and not config.debug.debug_rollout_only:
            return (
                f"what a micro-batch holds ({flag(name)}): a response ends there, a prompt without room is dropped; "
                "--rollout-max-context-len sets it"
            )
    return "the least of --rollout-max-context-len and what the model holds"


def _memory(config: RunConfig, shape: ModelShape) -> Rows:
    placement = config.placement
    if placement is None:
        return []
    sums, rows = _sums(config, shape, placement), Rows()
    if not config.debug.debug_rollout_only:
        rows += _trainer_memory(config, shape, placement) + sums.pop("trainer", [])
    if not config.debug.debug_train_only:
        rows += _engine_memory(config, shape, placement) + sums.pop("engine", [])
    return rows + sums.get("", [])


def _trainer_memory(config: RunConfig, shape: ModelShape, placement: Placement) -> Rows:
    device, host = trainer_bytes(config, shape, placement)
    rows = [("trainer: weights, gradients, optimizer", f"{shown(device)} a rank")]
    if host:
        rows.append(("trainer: optimizer on the host", f"{shown(host)} a rank"))
    rows += _staying(config, shape, placement)
    found = micro_batch(config)
    if found.tokens is None:
        return [*rows, ("trainer: activations", f"not known: {found.why}")]
    return [*rows, *_activation_memory(config, shape, placement, found.tokens, found.why)]


def _staying(config: RunConfig, shape: ModelShape, placement: Placement) -> Rows:
    """What of weights and optimizer stays on the GPU while the engine generates; the rest is copied out and in."""
    if not (placement.shared and placement.device == "cuda") or config.debug.debug_train_only:
        return []
    offload = config.train.parallel.optimizer_cpu_offload
    kept = shape.sleeping_bytes(placement, bf16=bf16(config), offload=offload)
    share = config.sglang.sglang_mem_fraction_static
    found = []
    for gib in GPU_GIB:
        stays = min(kept, expected_room(gib * GIB, share))
        most = math.floor(100 * share_for(gib * GIB, kept)) / 100
        hint = (
            f" (all of it with --sglang-mem-fraction-static {most:.2f})" if kept > stays and most >= LEAST_SHARE else ""
        )
        found.append(f"about {shown(stays)} on a GPU of {gib} GiB{hint}")
    told = f"of {shown(kept)} {', '.join(found)}; the rest moves to the host and back in each step"
    return [("  kept on the GPU while engines generate", told)]


def _activation_memory(config: RunConfig, shape: ModelShape, placement: Placement, tokens: int, why: str) -> Rows:
    """What a micro-batch of ``tokens`` takes, and would take with the other choices of ``--recompute-granularity``."""
    memory, chosen = activations(config, shape, placement)
    choices = {
        "off": Recompute(),
        "selective": Recompute(modules=CHEAP_TO_RECOMPUTE),
        "full (uniform, 1 layer)": Recompute(method="uniform", layers=1),
    }
    others = [f"{name}: {shown(memory.of(tokens, choice))}" for name, choice in choices.items() if choice != chosen]
    return [
        ("trainer: activations", f"about {shown(memory.of(tokens, chosen))} for {why}"),
        ("  with other recompute", "; ".join(others)),
        ("trainer: logits", f"{shown(logits_bytes(config, shape, placement, tokens))} at a time"),
    ]


def _engine_memory(config: RunConfig, shape: ModelShape, placement: Placement) -> Rows:
    token = shape.kv_cache_bytes(weight_width(config))
    weights = engine_weights(config, shape, placement)
    share = f", of --sglang-mem-fraction-static {config.sglang.sglang_mem_fraction_static} of the GPU"
    size = "not known: quantised, or in part on the host" if weights is None else shown(weights)
    return [
        ("engine: weights", size + (share if placement.device == "cuda" else "")),
        ("engine: KV cache", f"{token / 1e3:.1f} kB a token of a sequence"),
    ]


def _sums(config: RunConfig, shape: ModelShape, placement: Placement) -> dict[str, Rows]:
    """What is in a memory together, at each moment of a step, by whose it is."""
    found: dict[str, Rows] = defaultdict(list)
    for moment in moments(config, shape, placement):
        room = f" of the {shown(moment.room.size)} of {moment.room.owner}" if moment.room.known else ""
        whose = f"{moment.whose}: " if moment.whose else ""
        found[moment.whose].append((f"{whose}in all {moment.name}", moment.sum_shown + room))
    return found


def _files(config: RunConfig) -> Rows:
    names = ["logs/", "config.toml", "metrics.jsonl", "timeline.jsonl", "summary.json", "reward.png"]
    if config.logging.use_tensorboard:
        names.append("tensorboard/")
    rows = [("run directory", f"{config.run_dir}/"), ("in it", ", ".join(names))]
    rows += _checkpoint_files(config)
    if config.debug.save_debug_rollout_data is not None:
        rows.append(("samples of each rollout", config.debug.save_debug_rollout_data))
    if config.sglang_profile.sglang_profile:
        folder = config.sglang_profile.sglang_profile_output_dir or f"{config.trace_dir / 'sglang_trace'}"
        rows.append(("SGLang traces", f"{folder}/rollout_<id>/"))
    if config.train_profile.use_pytorch_profiler:
        rows.append(("training traces", f"{config.trace_dir / 'train_trace'}/"))
    if config.memory_profile.record_memory_history:
        folder = config.memory_profile.memory_snapshot_dir or f"{config.trace_dir / 'memory_snapshot'}"
        rows.append(("memory snapshots", f"{folder}/"))
    return rows


def _checkpoint_files(config: RunConfig) -> Rows:
    checkpoint = config.train.checkpoint
    when = "after the last rollout"
    if checkpoint.save_interval is not None:
        when = f"every {checkpoint.save_interval} rollouts and {when}"
    rows = []
    if checkpoint.save is not None:
        rows.append(("checkpoints", f"{checkpoint.save}/, {when}"))
    if checkpoint.save_hf is not None:
        rows.append(("Hugging Face exports", f"{checkpoint.save_hf}, {when}"))
    return rows
