"""`relax train --help`: every flag that users know, grouped by topic."""

import pytest
from relax_cli.config.options import namespace, settings_classes
from relax_cli.main import train_help
from relax_profiling.recorders.memory import RECORDERS

# All flags of the specification of `relax train`, by topic.
FLAG_WORDS = """
sglang-profile sglang-profile-step-start sglang-profile-step-end sglang-profile-steps sglang-profile-num-steps
sglang-profile-activities sglang-profile-by-stage sglang-profile-with-stack sglang-profile-record-shapes
sglang-profile-output-dir use-pytorch-profiler profile-step-start profile-step-end profile-target profile-with-stack
profile-with-memory profile-with-flops record-memory-history memory-snapshot-num-steps memory-snapshot-path
memory-snapshot-dir memory-recorder
micro-batch-size use-dynamic-batch-size max-tokens-per-gpu log-probs-max-tokens-per-gpu balance-data
tensor-model-parallel-size pipeline-model-parallel-size context-parallel-size expert-model-parallel-size
expert-tensor-parallel-size sequence-parallel recompute-granularity recompute-method recompute-num-layers
recompute-modules optimizer-cpu-offload
sglang-mem-fraction-static rollout-num-gpus-per-engine mm-processor-pool-size
partial-rollout partial-rollout-max-aborted-count mask-offpolicy-in-partial-rollout
prompt-data use-streaming-dataset streaming-buffer-size update-weight-buffer-size
colocate fully-async max-staleness num-data-storage-units
hf-checkpoint ref-load load save save-interval max-actor-ckpt-to-keep save-hf start-rollout-id
freeze-vision-model
num-rollout num-epoch rollout-batch-size n-samples-per-prompt global-batch-size num-steps-per-rollout
input-key label-key metadata-key tool-key multimodal-keys apply-chat-template apply-chat-template-kwargs system-prompt
rollout-shuffle rollout-seed
rollout-max-response-len rollout-max-prompt-len rollout-max-context-len rollout-temperature rollout-top-p rollout-top-k
rollout-stop rollout-stop-token-ids over-sampling-batch-size dynamic-sampling-filter-path rollout-function-path
custom-generate-function-path sglang-server-concurrency
rm-type custom-rm-path reward-key group-rm rm-url reward-max-concurrency
advantage-estimator loss-type
eps-clip eps-clip-high use-kl-loss kl-loss-coef kl-loss-type kl-coef entropy-coef use-tis tis-clip
normalize-advantages disable-grpo-std-normalization calculate-per-token-loss
lr lr-decay-style lr-warmup-iters weight-decay adam-beta1 adam-beta2 adam-eps clip-grad seed bf16
actor-num-nodes actor-num-gpus-per-node rollout-num-gpus num-gpus-per-node ray-address
eval-interval eval-prompt-data n-samples-per-eval-prompt eval-temperature eval-top-p eval-max-response-len
skip-eval-before-train
use-tensorboard tb-experiment-name use-wandb debug-rollout-only debug-train-only save-debug-rollout-data
load-debug-rollout-data dry-run print-config config
"""

DEFAULTS = {
    "sglang_profile_num_steps": 3,
    "sglang_profile_activities": ("CPU", "GPU"),
    "profile_step_start": 10,
    "profile_step_end": 12,
    "profile_target": ("train_overall",),
    "memory_snapshot_path": "snapshot.pickle",
    "memory_recorder": "torch",
    "micro_batch_size": 1,
    "tensor_model_parallel_size": 1,
    "sglang_mem_fraction_static": 0.8,
    "rollout_num_gpus_per_engine": 1,
    "mm_processor_pool_size": 0,
    "streaming_buffer_size": 10000,
    "update_weight_buffer_size": 536870912,
    "max_staleness": 1,
    "num_data_storage_units": 1,
    "n_samples_per_prompt": 1,
    "input_key": "input",
    "metadata_key": "metadata",
    "rollout_seed": 42,
    "rollout_temperature": 1.0,
    "rollout_top_p": 1.0,
    "rollout_top_k": -1,
    "sglang_server_concurrency": 512,
    "reward_max_concurrency": 64,
    "advantage_estimator": "grpo",
    "loss_type": "clip",
    "eps_clip": 0.2,
    "kl_loss_coef": 0.0,
    "kl_coef": 0.0,
    "entropy_coef": 0.0,
    "tis_clip": 2.0,
    "lr": 1e-6,
    "clip_grad": 1.0,
    "seed": 1234,
    "actor_num_nodes": 1,
    "num_gpus_per_node": 8,
    "n_samples_per_eval_prompt": 1,
    "use_tensorboard": True,
}


def test_every_flag_of_the_specification_exists() -> None:
    flags = {name.replace("_", "-") for name in namespace().options}
    assert not sorted(set(FLAG_WORDS.split()) - flags)


@pytest.mark.parametrize("name", DEFAULTS)
def test_defaults_of_the_specification(name: str) -> None:
    assert namespace().options[name].default == DEFAULTS[name]


def test_help_has_every_option_under_its_topic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    text = train_help()
    assert text.startswith("usage: relax train [--config FILE] [options]")
    at = 0
    for cls in settings_classes():
        title = f"\n{vars(cls)['TITLE']}:\n"
        assert title in text[at:], title
        at = text.index(title, at)
    for option in namespace().options.values():
        assert f"{option.flag} " in text or f"{option.flag}\n" in text or f"{option.flag}," in text, option.flag


def test_help_shows_defaults_choices_and_the_pass_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    text = train_help()
    assert "--colocate, --no-colocate" in text
    assert "(1 or more; default: 8)" in text
    assert "{k1,k2,k3,low_var_kl}" in text
    assert f"--memory-recorder {{{','.join(RECORDERS)}}}" in text, "the choices are the keys of the table"
    assert "--sglang-<name>" in text
    assert "--sglang-extra" not in text
    for name in ("reinforce_plus_plus_baseline: ", "cispo: ", "exact-match: "):
        assert name in text
