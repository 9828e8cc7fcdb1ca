"""Checks that need more than one package's settings."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from relax_data.options import flag, given_flags
from relax_data.readers.files import resolve_files
from relax_train.models.architectures import ARCHITECTURES, model_shape, unsupported
from relax_train.models.shape import ModelShape
from relax_train.settings.model import read_hf_config

from relax_cli.checks.algorithm_checks import algorithm_problems, algorithm_warnings
from relax_cli.checks.data_checks import data_needs, data_problems, data_warnings
from relax_cli.checks.file_checks import file_needs, file_problems
from relax_cli.checks.lengths import ENGINE_MARGIN, micro_batch_tokens
from relax_cli.checks.placement_checks import gpu_problems, lacks_gpus, mode_problems, split_problem
from relax_cli.checks.size_checks import memory_needs, size_warnings
from relax_cli.checks.staleness_checks import staleness_problems, staleness_warnings
from relax_cli.cluster.placement import SIZES, local_gpus
from relax_cli.config.run_config import RunConfig
from relax_cli.controllers.modes import mode_refusal

Problems = list[str]

_FATAL_RECORDINGS = 12


def problems_of(config: RunConfig, *, planning: bool) -> tuple[Problems, Problems]:
    """Everything that is wrong with a configuration.

    Args:
        planning: nothing will be started, so what this machine has does not matter.

    Returns:
        (what is wrong with the options, what a real start needs beside them). The second list is an error for a start
        and a note for a plan.
    """
    wrong: Problems = []
    for part in config.parts():
        try:
            wrong += part.problems(config.given)
        except OSError as error:
            wrong.append(_unreadable(error, config, part))
    checks: list[Callable[[RunConfig], Problems]] = [
        file_problems,
        mode_problems,
        staleness_problems,
        _batch_problems,
        gpu_problems,
        _model_problems,
        _length_problems,
        _reference_problems,
        algorithm_problems,
        _schedule_problems,
        _eval_problems,
        data_problems,
        _debug_problems,
        _picture_problems,
    ]
    for check in checks:
        wrong += check(config)
    needed = [*_start_needs(config), *data_needs(config)]
    needed += [] if wrong else memory_needs(config)
    needed += _gpus_missing(config) if planning else _machine_problems(config)
    return list(dict.fromkeys(wrong)), list(dict.fromkeys(needed))


def _unreadable(error: OSError, config: RunConfig, part: Any) -> str:
    """A path that the file system itself refuses: the option that holds it, and why."""
    values = {f.name: getattr(part, f.name) for f in dataclasses.fields(part) if f.name in config.given}
    named = [n for n, v in values.items() if v and error.filename and str(v) in str(error.filename)]
    return f"{given_flags(named or list(values))}: cannot read {error.filename}: {error.strerror}; choose another path"


def placement_problems(config: RunConfig, available_gpus: int) -> Problems:
    """Lists what does not fit between the options and a cluster of so many GPUs, once it has been joined."""
    assert config.placement is not None, "with a number of GPUs there is always a placement"
    if config.placement.gpus > available_gpus:
        if config.cluster.fully_async:
            return [split_problem(config.placement, available_gpus, "the Ray cluster")]
        return [
            f"the run needs {config.placement.gpus} GPUs but the Ray cluster has {available_gpus}: lower "
            "--actor-num-nodes or --actor-num-gpus-per-node, or join a larger cluster with --ray-address"
        ]
    return [*gpu_problems(config), *_model_problems(config)]


def _batch_problems(config: RunConfig) -> Problems:
    """The arithmetic of rollout and optimizer steps, with its numbers in the message."""
    batch, prompts, each = config.train.batch, config.rollout.rollout_batch_size, config.rollout.n_samples_per_prompt
    if min(prompts, each, batch.global_batch_size or 1, batch.num_steps_per_rollout or 1) < 1:
        return []
    try:
        batch.samples_per_step(prompts * each)
    except ValueError as error:
        arithmetic = f"--rollout-batch-size {prompts} x --n-samples-per-prompt {each} = {prompts * each} samples"
        return [f"{arithmetic}: {error}"]
    return []


def _model_problems(config: RunConfig) -> Problems:
    """Parallel sizes against the model; what is wrong with the folder itself, the model's settings say."""
    try:
        hf_config = read_hf_config(config.train.model.hf_checkpoint)
    except ValueError:
        return []
    if unsupported(hf_config):
        return []
    try:
        shape = model_shape(hf_config)
    except ValueError as error:
        return [f"--hf-checkpoint {config.train.model.hf_checkpoint}: {error}"]
    found = []
    if shape.vision is None and not config.train.model.freeze_vision_model:
        found.append(
            f"--no-freeze-vision-model has no effect: {shape.model_type} has no vision tower, it reads text only; "
            "remove it"
        )
    if config.placement is not None and not config.debug.debug_rollout_only:
        parallel = config.train.parallel
        sizes = [n for n in SIZES if (getattr(parallel, n) or 1) > 1]
        for problem in parallel.model_problems(shape.as_config(), config.placement.train_ranks):
            # Those about the number of ranks speak of TP and PP: say which flags that are.
            found.append(problem if "--" in problem else f"{problem} ({given_flags(sizes)})")
    tp = config.sglang.rollout_num_gpus_per_engine
    if tp > 1 and shape.heads % tp:
        found.append(
            f"--rollout-num-gpus-per-engine {tp} does not divide the model's num_attention_heads {shape.heads}: "
            "choose a divisor of it"
        )
    found += [] if config.debug.debug_train_only else _served_otherwise(config, shape)
    longest = config.rollout.rollout_max_context_len
    if longest is not None and shape.max_positions is not None and longest > shape.max_positions:
        found.append(
            f"--rollout-max-context-len {longest} is more than the model's max_position_embeddings "
            f"{shape.max_positions}: lower it"
        )
    by_hand = str(config.sglang.sglang_extra.get("context_length", ""))
    if by_hand.isdecimal() and shape.max_positions is not None and int(by_hand) > shape.max_positions:
        found.append(
            f"--sglang-context-length {by_hand} is more than the model's max_position_embeddings "
            f"{shape.max_positions}: the trainer does not scale positions; lower it"
        )
    return found


def _served_otherwise(config: RunConfig, shape: ModelShape) -> Problems:
    """What the trainer computes and SGLang would serve differently, without a word."""
    found = []
    if shape.experts and "dense" in shape.kinds:
        dense = [i for i, kind in enumerate(shape.kinds) if kind == "dense"]
        found.append(
            f"SGLang gives every layer of {shape.model_type} experts, and would serve the layers without ({len(dense)} "
            f"of {shape.layers}, such as layer {dense[0]}) with weights that nobody set: use a model with experts in "
            "all layers (mlp_only_layers empty, decoder_sparse_step 1)"
        )
    if shape.experts and shape.tied:
        found.append(
            f"SGLang gives {shape.model_type} an output layer of its own, and would serve this model, whose output "
            "layer is its embedding (tie_word_embeddings), with weights that nobody set: store the model with "
            "tie_word_embeddings false and lm_head.weight"
        )
    if shape.rope.kind != "default" and config.sglang.sglang_extra.get("enable_fused_qk_norm_rope"):
        found.append(
            f"--sglang-enable-fused-qk-norm-rope computes rope type {shape.rope.kind!r} differently from the trainer: "
            "leave it off"
        )
    return found


def _length_problems(config: RunConfig) -> Problems:
    """A sample that may be longer than a micro-batch, as far as lengths are known before the run."""
    rollout, batch, found = config.rollout, config.train.batch, []
    limit, prompt, response = (
        rollout.rollout_max_context_len,
        config.data.rollout_max_prompt_len,
        rollout.rollout_max_response_len,
    )
    if limit is not None and prompt is not None and prompt >= limit:
        found.append(
            f"--rollout-max-prompt-len {prompt} leaves no room for a response in --rollout-max-context-len {limit}: "
            "lower the one or raise the other"
        )
    longest, why = response + 1, f"--rollout-max-response-len {response} + a prompt of at least 1"
    if prompt is not None:
        longest, why = response + prompt, f"--rollout-max-response-len {response} + --rollout-max-prompt-len {prompt}"
    if limit is not None and (prompt is None or limit < longest):
        longest, why = limit, f"--rollout-max-context-len {limit}"
    by_hand = str(config.sglang.sglang_extra.get("context_length", ""))
    if by_hand.isdecimal() and int(by_hand) < ENGINE_MARGIN + 2:
        found.append(
            f"--sglang-context-length {by_hand} leaves no room for a prompt and a response of one token each: SGLang "
            f"keeps {ENGINE_MARGIN} of them for itself; raise it, or leave it out"
        )
    cp = config.train.parallel.context_parallel_size
    for name, holds in micro_batch_tokens(config).items():
        if holds < longest and (name == "max_tokens_per_gpu" or name in config.given):
            found.append(
                f"a sample may have {longest} tokens ({why}), but a micro-batch holds at most {holds} ({flag(name)} "
                f"{getattr(batch, name)} x --context-parallel-size {cp}): raise {flag(name)} or "
                "--context-parallel-size, or lower the lengths"
            )
    return found


def _reference_problems(config: RunConfig) -> Problems:
    if config.train.model.ref_load is not None and not config.train.algorithm.needs_reference:
        return [
            "--ref-load has no effect: no KL coefficient is above 0, so there is no reference model; add --use-kl-loss "
            "and --kl-loss-coef, or --kl-coef, or remove it"
        ]
    return []


def _schedule_problems(config: RunConfig) -> Problems:
    optimizer = config.train.optimizer
    if optimizer.lr_decay_style == "constant" or optimizer.lr_decay_iters is not None:
        return []
    if config.run.num_epoch is not None and not config.debug.debug_rollout_only:
        return [
            f"--lr-decay-style {optimizer.lr_decay_style} needs an end, and with --num-epoch the number of optimizer "
            "steps is not known before the data is read: add --lr-decay-iters, or use --num-rollout"
        ]
    return []


def _eval_problems(config: RunConfig) -> Problems:
    found = []
    data, interval = config.eval.eval_prompt_data, config.run.eval_interval
    if data and interval is None:
        found.append("--eval-prompt-data has no effect without --eval-interval: add it, or remove the data")
    if interval is not None and not data:
        found.append(
            "--eval-interval has no effect without --eval-prompt-data NAME PATH: add it, or remove the interval"
        )
    for name, path in zip(data[::2], data[1::2], strict=False):
        try:
            resolve_files((path,))
        except (ValueError, OSError) as error:
            found.append(f"--eval-prompt-data {name}: {error}")
    return found


def _debug_problems(config: RunConfig) -> Problems:
    """Options of the half of the loop that a debugging mode leaves out; only those whose result somebody waits for."""
    debug, found = config.debug, []
    if debug.debug_rollout_only:
        idle = _idle(
            config, ("load", "save", "save_hf", "save_interval"), ("use_pytorch_profiler", "record_memory_history")
        )
        if idle:
            found.append(f"{given_flags(idle)} without effect: --debug-rollout-only trains nothing; remove it")
    if debug.debug_train_only:
        idle = _idle(config, ("eval_prompt_data", "eval_interval"), ("sglang_profile", "partial_rollout"))
        if idle:
            found.append(f"{given_flags(idle)} without effect: --debug-train-only generates nothing; remove it")
        if config.run.num_epoch is not None:
            found.append(
                "--num-epoch counts passes over prompts, and --debug-train-only reads none: say with --num-rollout how "
                "many saved rollouts there are"
            )
    return found


def _picture_problems(config: RunConfig) -> Problems:
    """What cannot go with ``--multimodal-keys``, whatever is started."""
    if not config.data.multimodal_keys or config.debug.debug_train_only:
        return []
    if config.debug.save_debug_rollout_data is None:
        return []
    return [
        "--save-debug-rollout-data does not keep pictures, and rows without them cannot be trained on: remove it or "
        "--multimodal-keys"
    ]


def _idle(config: RunConfig, valued: Sequence[str], switches: Sequence[str]) -> list[str]:
    """Names those of these options that the user set, the switches only when they are on."""
    on = {name for part in config.parts() for name in switches if getattr(part, name, False) is True}
    return [n for n in (*valued, *switches) if n in config.given and (n in valued or n in on)]


def _start_needs(config: RunConfig) -> Problems:
    """Lists what a run needs that a plan can do without."""
    found = []
    if config.run.num_rollout is None and config.run.num_epoch is None:
        found.append("how long the run is: add exactly one of --num-rollout and --num-epoch")
    first, length = config.train.checkpoint.start_rollout_id, config.run.num_rollout
    if first is not None and length is not None and first >= length >= 1:
        found.append(f"a rollout to run: --start-rollout-id {first} lies behind the last one of --num-rollout {length}")
    if not config.reward.configured and not config.debug.debug_train_only:
        found.append("what scores a response: add --rm-type, --custom-rm-path or --rm-url")
    refusal = mode_refusal(config.cluster)
    if refusal is not None:
        found.append(refusal)
    found += _picture_needs(config)
    found += file_needs(config)
    return found


def _picture_needs(config: RunConfig) -> Problems:
    """What a run with ``--multimodal-keys`` needs."""
    keys = config.data.multimodal_keys or {}
    found = []
    for modality in sorted(keys.keys() - {"image"}):
        found.append(f"--multimodal-keys: pictures alone: {modality} is not trained on by this version; remove it")
    if not keys or config.debug.debug_train_only:
        return found
    try:
        seeing = model_shape(read_hf_config(config.train.model.hf_checkpoint)).vision is not None
    except ValueError:  # that is said elsewhere
        return found
    if not seeing:
        reading = ", ".join(name for name, record in ARCHITECTURES.items() if record.reads_pictures)
        found.append(
            f"a model that reads pictures ({reading}): --multimodal-keys names some, and the model of --hf-checkpoint "
            "reads text only"
        )
    if not config.data.apply_chat_template:
        found.append("--apply-chat-template: it writes the tokens of the pictures that --multimodal-keys names")
    return found


def _machine_problems(config: RunConfig) -> Problems:
    """Lists what this machine lacks for the options; a Ray cluster that is joined is asked when it is joined."""
    cluster = config.cluster
    if cluster.ray_address is not None:
        return []
    found = []
    asked, here = cluster.actor_num_gpus_per_node or 0, local_gpus()
    if config.cluster.fully_async and config.placement is not None and asked and config.placement.gpus > here:
        return [split_problem(config.placement, here, "this machine")]
    if asked > here:
        fix = "set it to 0 to run on CPU" if here == 0 else f"lower it to {here}"
        found.append(
            f"--actor-num-gpus-per-node {asked}: this machine has {here} GPUs; {fix}, or join a cluster with "
            "--ray-address"
        )
    if cluster.actor_num_nodes > 1:
        found.append(
            f"--actor-num-nodes {cluster.actor_num_nodes} needs a Ray cluster: start one on the nodes with `ray start` "
            "and join it with --ray-address"
        )
    return found


def _gpus_missing(config: RunConfig) -> Problems:
    """GPUs of a plan that this machine does not have: a note, because a plan may be one for another machine."""
    if not lacks_gpus(config):
        return []
    assert config.placement is not None, "it is what lacks them"
    asked, here = config.placement.gpus, local_gpus()
    cpu = "" if here else "; --actor-num-gpus-per-node 0 plans a run on the CPU of this machine"
    return [
        f"{asked} GPU{'s' * (asked != 1)}, and this machine has {here or 'no'} GPU{'s' * (here != 1)}: start it where "
        f"they are, join them with --ray-address, or lower --actor-num-gpus-per-node{cpu}"
    ]


def _profiling_warnings(config: RunConfig) -> list[str]:
    """Warns of what the profilers cannot do on a CPU."""
    if config.placement is None or config.placement.device != "cpu":
        return []
    found = []
    memory, engine = config.memory_profile, config.sglang_profile
    if memory.record_memory_history and memory.memory_recorder == "torch":
        found.append(
            "--record-memory-history records the memory of GPUs and this run has none, so nothing is recorded; "
            "--memory-recorder memray records the host's"
        )
    if engine.sglang_profile:
        window, length = engine.window(), config.run.num_rollout or _FATAL_RECORDINGS * 100
        last = length - 1 if window.last is None else min(window.last, length - 1)
        recorded = last - window.first + 1 if window.steps is None else sum(step < length for step in window.steps)
        if recorded >= _FATAL_RECORDINGS:
            found.append(
                f"--sglang-profile: the {_FATAL_RECORDINGS}th recording of one SGLang server on CPU was seen to crash "
                "it; record fewer rollouts, for example with --sglang-profile-step-start 2 --sglang-profile-step-end 4"
            )
    return found


def warnings_of(config: RunConfig) -> list[str]:
    """Lists what is allowed but probably not meant."""
    found = _profiling_warnings(config)
    batch, placement = config.train.batch, config.placement
    samples = config.rollout.rollout_batch_size * config.rollout.n_samples_per_prompt
    step = batch.global_batch_size or samples
    if batch.balance_data:
        several = " (with the one optimizer step a rollout of this run they do not)" if step == samples else ""
        found.append(f"--balance-data: responses to one prompt may fall into different training steps{several}")
    found += staleness_warnings(config) + algorithm_warnings(config, steps=samples // step)
    found += data_warnings(config) + size_warnings(config)
    if not config.debug.debug_rollout_only and placement is not None and step < placement.dp:
        found.append(
            f"an optimizer step has {step} samples for {placement.dp} data-parallel ranks, so {placement.dp - step} of "
            "them idle; raise --global-batch-size or the parallel sizes"
        )
    return found
