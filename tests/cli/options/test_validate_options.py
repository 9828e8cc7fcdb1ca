"""What is refused before anything starts, with a message that names the options and the fix."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from relax_cli.config.resolution import resolve
from relax_cli.config.run_config import ConfigError

GPU_PLAN = ["--dry-run", "--num-gpus-per-node", "8"]


def problems(argv: list[str]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        resolve(argv, {})
    return caught.value.problems


def only(argv: list[str]) -> str:
    found = problems(argv)
    assert len(found) == 1, found
    return found[0]


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--fully-async", "--colocate"], ["--fully-async and --colocate exclude"]),
        (["--no-colocate"], ["--no-colocate", "--fully-async"]),
        (["--fully-async", "--balance-data"], ["--balance-data works with --colocate only", "TransferQueue"]),
        (["--max-staleness", "2"], ["--max-staleness has no effect without --fully-async"]),
        (["--over-sampling-batch-size", "32", "--max-staleness", "0"], ["--max-staleness has no effect", "above"]),
        (["--fully-async", "--max-staleness", "-1"], ["--max-staleness must be 0 or more"]),
        (["--weight-sync", "disk"], ["--weight-sync has no effect with --colocate", "add --fully-async"]),
        (["--fully-async", "--debug-rollout-only"], ["--debug-rollout-only with --fully-async", "--colocate"]),
        (
            ["--fully-async", "--save-debug-rollout-data", "s{rollout_id}"],
            ["--save-debug-rollout-data with --fully-async", "--colocate"],
        ),
        (
            ["--fully-async", "--rollout-function-path", "json:dumps"],
            ["--rollout-function-path works with --colocate only"],
        ),
        (["--num-data-storage-units", "2"], ["--num-data-storage-units has no effect without --fully-async"]),
        (["--rollout-num-gpus", "8"], ["--rollout-num-gpus has no effect with --colocate"]),
        (["--num-rollout", "3", "--num-epoch", "1"], ["--num-rollout 3 and --num-epoch 1", "exactly one"]),
        (["--num-rollout", "0"], ["--num-rollout must be 1 or more"]),
        (["--sequence-parallel"], ["--sequence-parallel has no effect with --tensor-model-parallel-size 1"]),
        (["--tensor-model-parallel-size", "3"], ["8 ranks", "no multiple of TP x PP x CP"]),
        (
            ["--tensor-model-parallel-size", "8"],
            ["--tensor-model-parallel-size 8 does not divide", "key_value_heads 2"],
        ),
        (["--rollout-num-gpus-per-engine", "3"], ["8 GPUs", "no multiple of --rollout-num-gpus-per-engine 3"]),
        (
            ["--rollout-num-gpus-per-engine", "8"],
            ["--rollout-num-gpus-per-engine 8 does not divide", "num_attention_heads 4"],
        ),
        (["--actor-num-gpus-per-node", "9"], ["--actor-num-gpus-per-node 9 is more than --num-gpus-per-node 8"]),
        (["--expert-model-parallel-size", "2"], ["--expert-model-parallel-size has no effect", "no experts"]),
        (["--eval-interval", "5"], ["--eval-interval has no effect without --eval-prompt-data"]),
        (["--eval-prompt-data", "a", "prompts.jsonl"], ["--eval-prompt-data has no effect without --eval-interval"]),
        (["--eval-temperature", "0"], ["--eval-temperature has no effect without --eval-prompt-data"]),
        (["--skip-eval-before-train"], ["--skip-eval-before-train has no effect without --eval-interval"]),
        (["--eval-interval", "1", "--eval-prompt-data", "a", "no.jsonl"], ["--eval-prompt-data a", "no.jsonl"]),
        (["--debug-train-only"], ["--debug-train-only needs samples", "--load-debug-rollout-data"]),
        (["--load-debug-rollout-data", "a{rollout_id}"], ["--load-debug-rollout-data has no effect without"]),
        (["--save-debug-rollout-data", "a"], ["--save-debug-rollout-data", "{rollout_id}"]),
        (["--save-debug-rollout-data", "a{rollout}"], ["--save-debug-rollout-data", "{rollout_id}"]),
        (["--debug-rollout-only", "--save", "x"], ["--save without effect", "--debug-rollout-only trains nothing"]),
        (["--wandb-project", "x"], ["--wandb-project without effect", "--use-wandb"]),
        (["--tb-experiment-name", "a/b"], ["--tb-experiment-name 'a/b'", "slashes"]),
        (["--ref-load", "small"], ["--ref-load has no effect", "--use-kl-loss"]),
        (["--rollout-max-context-len", "4096"], ["--rollout-max-context-len 4096", "max_position_embeddings 2048"]),
        (
            ["--rollout-max-context-len", "64", "--rollout-max-prompt-len", "64"],
            ["--rollout-max-prompt-len 64 leaves no room", "--rollout-max-context-len 64"],
        ),
        (
            ["--num-epoch", "2", "--lr-decay-style", "linear"],
            ["--lr-decay-style linear needs an end", "--num-epoch", "--lr-decay-iters"],
        ),
        (["--ray-address", "10.0.0.1:65536"], ["--ray-address 10.0.0.1:65536: a port lies between 1 and 65535"]),
        (["--ray-address", "ray://head:0"], ["--ray-address ray://head:0: a port lies between"]),
        (["--use-wandb", "--wandb-host", "wandb.example"], ["--wandb-host 'wandb.example' is no address"]),
        (["--sglang-context-length", "7"], ["--sglang-context-length 7 leaves no room", "keeps 6"]),
        (["--sglang-profile-steps", "1"], ["--sglang-profile-steps has no effect without --sglang-profile"]),
        (["--sglang-profile", "--sglang-profile-num-steps", "0"], ["--sglang-profile-num-steps 0"]),
        (
            ["--use-pytorch-profiler", "--profile-step-start", "5", "--profile-step-end", "4"],
            ["--profile-step-start / --profile-step-end"],
        ),
    ],
)
def test_refused(workspace: Path, model: list[str], words: list[str], parts: list[str]) -> None:
    found = problems([*GPU_PLAN, *model, *words])
    assert sum(all(part in message for part in parts) for message in found) == 1, found


@pytest.mark.parametrize(
    ("sizes", "parts"),
    [
        (["--global-batch-size", "12"], ["--rollout-batch-size 10 x --n-samples-per-prompt 4 = 40 samples", "12 + 4"]),
        (["--num-steps-per-rollout", "3"], ["= 40 samples", "--num-steps-per-rollout 3", "1 samples are left over"]),
        (["--global-batch-size", "10", "--num-steps-per-rollout", "2"], ["--num-steps-per-rollout 2 x", "10 = 20"]),
    ],
)
def test_batch_errors_show_the_arithmetic(
    workspace: Path, start: list[str], sizes: list[str], parts: list[str]
) -> None:
    message = only([*start, "--rollout-batch-size", "10", *sizes])
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("lengths", "longest"),
    [
        (["--rollout-max-response-len", "512"], None),
        (["--rollout-max-response-len", "1024"], 1025),
        (["--rollout-max-response-len", "512", "--rollout-max-prompt-len", "512"], None),
        (["--rollout-max-response-len", "512", "--rollout-max-prompt-len", "513"], 1025),
        (["--rollout-max-response-len", "1024", "--rollout-max-context-len", "1024"], None),
        (["--rollout-max-response-len", "512", "--rollout-max-context-len", "1025"], 1025),
    ],
)
def test_a_sample_that_cannot_fit_is_refused(
    workspace: Path, start: list[str], lengths: list[str], longest: int | None
) -> None:
    argv = [*start, "--use-dynamic-batch-size", "--max-tokens-per-gpu", "1024", *lengths]
    if longest is None:
        resolve(argv, {})
        return
    message = only(argv)
    assert f"a sample may have {longest} tokens" in message
    assert "--max-tokens-per-gpu 1024 x --context-parallel-size 1" in message


def test_the_cap_grows_with_context_parallelism_and_rounds_down_to_its_padding(
    workspace: Path, start: list[str]
) -> None:
    argv = [*start, "--use-dynamic-batch-size", "--rollout-max-context-len", "1024", "--context-parallel-size", "2"]
    resolve([*argv, "--max-tokens-per-gpu", "512"], {})
    assert "at most 1020 (--max-tokens-per-gpu 511" in only([*argv, "--max-tokens-per-gpu", "511"])


def test_the_log_prob_cap_is_checked_too(workspace: Path, start: list[str]) -> None:
    argv = [*start, "--use-dynamic-batch-size", "--max-tokens-per-gpu", "2048", "--rollout-max-response-len", "1024"]
    assert "--log-probs-max-tokens-per-gpu 1000" in only([*argv, "--log-probs-max-tokens-per-gpu", "1000"])


def test_missing_checkpoint_folder(workspace: Path, start: list[str]) -> None:
    message = only(["--hf-checkpoint", "nowhere", *start[2:]])
    assert f"--hf-checkpoint: '{workspace}/nowhere' is not a folder" in message


def test_checkpoint_folder_without_config(workspace: Path, start: list[str]) -> None:
    (workspace / "empty").mkdir()
    message = only(["--hf-checkpoint", "empty", *start[2:]])
    assert "empty/config.json" in message


def test_checkpoint_folder_with_a_broken_config(workspace: Path, start: list[str]) -> None:
    (workspace / "small" / "config.json").write_text("{")
    assert "config.json is not valid JSON" in only(start)
    (workspace / "small" / "config.json").write_text(json.dumps({"model_type": "qwen3", "hidden_size": "big"}))
    assert "hidden_size should be an integer from 1" in only(start)


@pytest.mark.parametrize(("missing", "part"), [("model.safetensors", "no weights"), ("tokenizer.json", "no tokenizer")])
def test_incomplete_checkpoint_is_no_start_but_a_plan(
    workspace: Path, start: list[str], missing: str, part: str
) -> None:
    (workspace / "small" / missing).unlink()
    assert part in only(start)
    (note,) = resolve([*start, "--dry-run"], {}).notes
    assert part in note


def test_a_path_that_the_file_system_refuses(workspace: Path, start: list[str]) -> None:
    words = [*start[:6], "--n-samples-per-prompt", "4"]
    message = only([*words, "--custom-rm-path", f"{'x' * 300}.py:f"])
    assert message.startswith("--custom-rm-path: cannot read")
    assert "name too long" in message


def test_missing_prompt_file(workspace: Path, start: list[str]) -> None:
    argv = [w if w != "prompts.jsonl" else "missing.jsonl" for w in start]
    message = only(argv)
    assert message.startswith("--prompt-data")
    assert "missing.jsonl" in message


def test_what_a_start_needs_is_a_note_of_a_plan(workspace: Path, model: list[str]) -> None:
    found = problems(model)
    assert len(found) == 2
    assert "exactly one of --num-rollout and --num-epoch" in found[0]
    assert "--rm-type" in found[1]
    assert resolve([*model, "--dry-run"], {}).notes == tuple(found)


def test_a_start_behind_the_end_has_nothing_to_run(workspace: Path, start: list[str]) -> None:
    resolve([*start, "--start-rollout-id", "1"], {})
    assert "--start-rollout-id 2 lies behind the last one of --num-rollout 2" in only(
        [*start, "--start-rollout-id", "2"]
    )


def test_fully_async_splits_the_gpus(workspace: Path, start: list[str], gpus: Callable[[int], None]) -> None:
    gpus(8)
    message = only([*start, "--fully-async"])
    assert "8 GPUs that train (--actor-num-nodes x --actor-num-gpus-per-node) + 8 that generate" in message
    assert "(--rollout-num-gpus) = 16, and this machine has 8: for example 4 and 4" in message
    split = [*start, "--fully-async", "--actor-num-gpus-per-node", "6"]
    placement = resolve([*split, "--rollout-num-gpus", "2"], {}).placement
    assert placement is not None
    assert (placement.train_ranks, placement.engines, placement.gpus, placement.shared) == (6, 2, 8, False)
    assert "engines have 3 GPUs (--rollout-num-gpus 3), which is no multiple" in only(
        [*split, "--dry-run", "--rollout-num-gpus", "3", "--rollout-num-gpus-per-engine", "2"]
    )
    words = ["--rollout-num-gpus", "4", "--rollout-num-gpus-per-engine", "2", "--num-gpus-per-node", "7", "--dry-run"]
    assert "engine 0 would have GPUs of two nodes: 6 train" in only([*split, *words])


def test_fully_async_without_gpus_has_a_process_for_each_side(workspace: Path, start: list[str]) -> None:
    placement = resolve([*start, "--fully-async"], {}).placement
    assert placement is not None
    assert (placement.device, placement.train_ranks, placement.engines, placement.shared) == ("cpu", 1, 1, False)
    assert placement.gpus == 0
    assert "--rollout-num-gpus without effect: the run has no GPUs" in only(
        [*start, "--fully-async", "--rollout-num-gpus", "2"]
    )


def test_pictures_need_a_model_that_reads_them_and_a_chat_template(workspace: Path, start: list[str]) -> None:
    pictures = ["--multimodal-keys", '{"image": "images"}', "--mm-processor-pool-size", "2"]
    with pytest.raises(ConfigError) as raised:
        resolve([*start, *pictures], {})
    assert "a model that reads pictures (qwen2_5_vl): --multimodal-keys names some" in str(raised.value)
    assert "--apply-chat-template: it writes the tokens of the pictures" in str(raised.value)
    assert "qwen3 has no vision tower" in only([*start, "--no-freeze-vision-model"])

    folder = workspace / "seeing"
    folder.mkdir()
    text = {**json.loads((workspace / "small" / "config.json").read_text()), "model_type": "qwen2_5_vl"}
    half = text.get("head_dim", text["hidden_size"] // text["num_attention_heads"]) // 2
    rope = {"type": "mrope", "mrope_section": [half - 2, 1, 1]}
    text.update(rope_scaling=rope, image_token_id=9, vision_config={"out_hidden_size": text["hidden_size"]})
    (folder / "config.json").write_text(json.dumps(text))
    for file in (workspace / "small").iterdir():
        if file.name != "config.json":
            (folder / file.name).write_bytes(file.read_bytes())
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    words = ["seeing" if word == "small" else word for word in start]
    seeing = [*words, *pictures, "--apply-chat-template", "--no-freeze-vision-model"]
    assert resolve(seeing, {}).data.mm_processor_pool_size == 2
    assert resolve([*seeing, "--fully-async"], {}).cluster.fully_async
    refused = ["--save-debug-rollout-data", "s{rollout_id}"]
    for mode in ([], ["--dry-run"]):
        assert only([*seeing, *refused, *mode]).startswith("--save-debug-rollout-data does not keep pictures")


def test_debug_train_only_needs_no_reward_and_no_prompts(workspace: Path) -> None:
    (workspace / "s0").touch()
    argv = ["--hf-checkpoint", "small", "--num-rollout", "1", "--n-samples-per-prompt", "2"]
    resolve([*argv, "--debug-train-only", "--load-debug-rollout-data", "s{rollout_id}"], {})


def test_samples_that_are_not_there_are_missed_at_the_start(workspace: Path, checkpoint: Path) -> None:
    for rollout in (0, 1, 5):
        (workspace / f"s{rollout}").touch()
    words = ["--hf-checkpoint", "small", "--n-samples-per-prompt", "2", "--debug-train-only"]
    words += ["--load-debug-rollout-data", "s{rollout_id}"]
    message = only([*words, "--num-rollout", "4"])
    assert message.startswith(
        f"the samples of rollout 2: there is no file {workspace / 's2'} (--load-debug-rollout-data)"
    )
    assert resolve([*words, "--num-rollout", "4", "--dry-run"], {}).notes == (message,)
    resolve([*words, "--num-rollout", "6", "--start-rollout-id", "5"], {})
    resumed = [*words, "--load", "checkpoints", "--save", "checkpoints"]  # of rollout 4
    resolve([*resumed, "--num-rollout", "6"], {})
    assert only([*resumed, "--num-rollout", "7"]).startswith("the samples of rollout 6: ")


def test_gpus_that_this_machine_lacks(workspace: Path, start: list[str], gpus: Callable[[int], None]) -> None:
    message = only([*start, "--actor-num-gpus-per-node", "2"])
    assert "--actor-num-gpus-per-node 2: this machine has 0 GPUs; set it to 0 to run on CPU" in message
    gpus(1)
    assert "this machine has 1 GPUs; lower it to 1" in only([*start, "--actor-num-gpus-per-node", "2"])
    assert "--actor-num-nodes 2 needs a Ray cluster" in only([*start, "--actor-num-nodes", "2"])


@pytest.mark.parametrize(
    "words",
    [["--optimizer-cpu-offload"], ["--rollout-num-gpus-per-engine", "2"], ["--num-gpus-per-node", "4"]],
)
def test_options_without_effect_on_cpu(workspace: Path, start: list[str], words: list[str]) -> None:
    message = only([*start, *words])
    assert message.startswith(f"{words[0]} without effect: the run has no GPUs")


def test_printing_and_planning_exclude_each_other(workspace: Path, model: list[str]) -> None:
    assert "--dry-run and --print-config" in only([*model, "--dry-run", "--print-config"])


@pytest.mark.parametrize("name", ["grpo", "rloo", "gspo", "reinforce_plus_plus_baseline"])
def test_an_estimator_that_compares_needs_something_to_compare(workspace: Path, start: list[str], name: str) -> None:
    alone = [*start[:-2], "--advantage-estimator", name, "--eps-clip", "0.1"]
    message = only(alone)
    assert message.startswith(f"--advantage-estimator {name} compares the responses to one prompt")
    assert "--n-samples-per-prompt 1" in message
    assert resolve([*alone, "--debug-rollout-only"], {}).warnings == ()
    assert resolve([*alone[:-4], "--advantage-estimator", "reinforce_plus_plus"], {}).warnings == ()


def test_combinations_of_algorithms_reach_the_user(workspace: Path, start: list[str]) -> None:
    message = only([*start, "--advantage-estimator", "rloo", "--disable-grpo-std-normalization"])
    assert "--disable-grpo-std-normalization has no effect with --advantage-estimator rloo" in message
    assert "did you mean 'rloo'" in only([*start, "--advantage-estimator", "rlo"])
    (own,) = [p for p in problems([*start, "--advantage-estimator", "no_such_module:f"]) if "no_such_module" in p]
    assert own.startswith("--advantage-estimator 'no_such_module:f': there is no module")


def test_warnings_about_ratios(workspace: Path, start: list[str]) -> None:
    several = [*start, "--num-steps-per-rollout", "2"]
    gspo = ["--advantage-estimator", "gspo"]
    (wide,) = resolve([*several, *gspo], {}).warnings
    assert "default --eps-clip 0.2" in wide
    assert "--eps-clip 3e-4 --eps-clip-high 4e-4" in wide
    narrow = [*gspo, "--eps-clip", "3e-4"]
    assert resolve([*several, *narrow], {}).warnings == ()
    (one,) = resolve([*start, *narrow], {}).warnings
    assert "with one optimizer step a rollout every probability ratio is 1" in one
    assert "as --advantage-estimator grpo does" in one
    (cispo,) = resolve([*start, "--loss-type", "cispo"], {}).warnings
    assert "as --loss-type clip does" in cispo
    assert resolve([*several, "--loss-type", "cispo"], {}).warnings == ()


def test_warnings(workspace: Path, model: list[str], start: list[str]) -> None:
    assert resolve(start, {}).warnings == ()
    alone = [*start[:-2], "--n-samples-per-prompt", "1"]
    (single,) = resolve(alone, {}).warnings
    assert "GRPO compares" in single
    assert "nothing is learned" in single
    (moved,) = resolve([*alone, "--entropy-coef", "0.1"], {}).warnings
    assert "only --entropy-coef moves the weights" in moved
    assert resolve([*alone, "--debug-rollout-only"], {}).warnings == ()
    (balance,) = resolve([*start, "--balance-data"], {}).warnings
    assert balance.startswith("--balance-data: responses to one prompt may fall into different training steps")
    (idle,) = resolve([*start, "--dry-run", "--num-gpus-per-node", "8", "--rollout-batch-size", "1"], {}).warnings
    assert "4 samples for 8 data-parallel ranks" in idle


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--record-memory-history"], "--memory-recorder memray"),
        (["--record-memory-history", "--memory-recorder", "memray"], None),
        (["--sglang-profile", "--num-rollout", "12"], "12th recording"),
        (["--sglang-profile", "--num-rollout", "11"], None),
        (["--sglang-profile", "--num-rollout", "90", "--sglang-profile-step-start", "79"], None),
        (["--sglang-profile", "--num-rollout", "90", "--sglang-profile-step-start", "78"], "12th recording"),
        (["--sglang-profile", "--num-rollout", "90", "--sglang-profile-step-end", "10"], None),
        (["--sglang-profile", "--num-rollout", "12", "--sglang-profile-steps", *map(str, range(1, 14))], None),
    ],
)
def test_what_profilers_cannot_do_on_cpu(workspace: Path, start: list[str], words: list[str], told: str | None) -> None:
    rest = start if "--num-rollout" not in words else [w for w in start if w not in ("--num-rollout", "2")]
    warnings = resolve([*rest, *words], {}).warnings
    assert [told in w for w in warnings if told] == ([True] if told else [])
    assert len(warnings) == (told is not None)


def test_staleness_of_what_over_sampling_leaves_can_be_chosen(workspace: Path, start: list[str]) -> None:
    words = ["--over-sampling-batch-size", "48", "--max-staleness", "0"]
    assert resolve([*start, *words], {}).cluster.max_staleness == 0


def test_a_kernel_of_the_engine_that_scales_positions_in_its_own_way_is_refused(
    workspace: Path, start: list[str]
) -> None:
    asked = [*start, *GPU_PLAN, "--sglang-enable-fused-qk-norm-rope"]
    resolve(asked, {})
    file = workspace / "small" / "config.json"
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    file.write_text(json.dumps({**json.loads(file.read_text()), "rope_scaling": scaling}))
    assert "computes rope type 'yarn' differently from the trainer" in only(asked)


def test_experts_that_the_engine_would_serve_with_weights_of_nobody_are_refused(
    workspace: Path, start: list[str]
) -> None:
    file = workspace / "small" / "config.json"
    experts = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    file.write_text(json.dumps({**json.loads(file.read_text()), **experts}))
    assert "SGLang gives qwen3_moe an output layer of its own" in only([*start, "--dry-run"]), "the small one is tied"
    experts["tie_word_embeddings"] = False
    file.write_text(json.dumps({**json.loads(file.read_text()), **experts}))
    resolve([*start, "--dry-run"], {})
    file.write_text(json.dumps({**json.loads(file.read_text()), **experts, "mlp_only_layers": [1]}))
    assert "SGLang gives every layer of qwen3_moe experts" in only([*start, "--dry-run"])
