"""Layers, files, errors: from the words of a command line to one checked configuration."""

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from relax_cli.config.export import to_toml
from relax_cli.config.resolution import fit, resolve
from relax_cli.config.run_config import ConfigError, RunConfig

EMPTY: dict[str, str] = {}


def problems(argv: list[str], environ: dict[str, str] = EMPTY) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        resolve(argv, environ)
    return caught.value.problems


def test_defaults_file_environment_command_line(workspace: Path, start: list[str]) -> None:
    (workspace / "run.toml").write_text("lr = 1e-5\nweight-decay = 0.5\nseed = 3\nadam_beta1 = 0.8\n")
    environ = {"RELAX_WEIGHT_DECAY": "0.25", "RELAX_SEED": "4", "RELAX_CONFIG": "run.toml"}
    config = resolve([*start, "--seed", "5"], environ)
    assert config.train.optimizer.adam_beta2 == 0.999
    assert config.train.optimizer.lr == 1e-5
    assert config.train.optimizer.weight_decay == 0.25
    assert config.train.model.seed == 5
    assert {"lr", "weight_decay", "seed", "adam_beta1"} <= config.given
    assert "adam_beta2" not in config.given


def test_yaml_and_toml_mean_the_same(workspace: Path, model: list[str]) -> None:
    (workspace / "a.toml").write_text(
        'lr = 1e-6\nuse-kl-loss = true\nkl_loss_coef = 1\nrollout_stop = ["no", "12:30"]\n'
        "apply_chat_template = true\napply_chat_template_kwargs = {enable_thinking = false}\n"
        'sglang_schedule_policy = "fcfs"\n'
    )
    (workspace / "b.yaml").write_text(
        "lr: 1e-6\nuse_kl_loss: true\nkl-loss-coef: 1\nrollout_stop: [no, 12:30]\n"
        "apply_chat_template: true\napply-chat-template-kwargs: {enable_thinking: false}\n"
        "sglang-schedule-policy: fcfs\n"
    )
    a, b = (resolve(["--dry-run", "--config", f, *model], EMPTY) for f in ("a.toml", "b.yaml"))
    assert a.train == b.train
    assert a.rollout == b.rollout
    assert a.data == b.data
    assert a.sglang == b.sglang
    assert a.rollout.rollout_stop == ("no", "12:30")
    assert a.sglang.sglang_extra == {"schedule_policy": "fcfs"}


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.toml", '# first\nlr = "fast"\n', "a.toml:2: lr: expected a number, found 'fast'"),
        ("a.toml", "\n\nseed = 1.0\n", "a.toml:3: seed: expected an integer, found 1.0"),
        ("a.toml", "colocate = 1\n", "a.toml:1: colocate: expected true or false, found 1"),
        (
            "a.toml",
            'kl_loss_type = "k9"\n',
            "a.toml:1: kl_loss_type: expected one of k1, k2, k3, low_var_kl, found 'k9'",
        ),
        ("a.toml", "\nlearning_rat = 1\n", "a.toml:2: learning_rat: no such option"),
        ("a.toml", "max_token_per_gpu = 1\n", "did you mean max_tokens_per_gpu"),
        ("a.toml", "[optimizer]\nlr = 1\n", "a.toml:1: optimizer: no such option"),
        ("a.toml", "[optimizer]\nlr = 1\n", "the file is flat"),
        ("a.toml", "micro_batch_size = 1\nmicro-batch-size = 2\n", "a.toml:2: micro-batch-size: given twice"),
        ("a.toml", "lr = \n", "line 1"),
        ("a.toml", "lr = 1\nlr = 2\n", "line 2"),
        ("a.toml", 'config = "b.toml"\n', "a.toml:1: config: a configuration file cannot name another one"),
        ("a.toml", "sglang_port = 1\n", "a.toml:1: sglang_port: cannot be set: "),
        ("a.yaml", "seed: 1\nlr: fast\n", "a.yaml:2: lr: expected a number, found 'fast'"),
        ("a.yaml", "colocate: yes\n", "a.yaml:1: colocate: expected true or false, found 'yes'"),
        ("a.yaml", "seed: 1\nseed: 2\n", "a.yaml:2: seed: given twice"),
        ("a.yaml", "- seed\n", "line 1: expected `key: value` lines"),
        ("a.yaml", "seed: [1\n", "line 2"),
        ("a.yaml", "1: 2\n", "line 1: the key 1 is not a word"),
        ("a.json", "{}", "must end in .toml, .yaml or .yml"),
    ],
)
def test_errors_in_files_name_line_and_key(
    workspace: Path, start: list[str], name: str, text: str, message: str
) -> None:
    (workspace / name).write_text(text)
    found = problems([*start, "--config", name])
    assert len(found) == 1, found
    assert message in found[0]


def test_a_missing_file_is_one_error(workspace: Path) -> None:
    (found,) = problems(["--config", "nowhere.toml"])
    assert found == "--config nowhere.toml: No such file or directory; name an existing TOML or YAML file"


def test_null_in_yaml_is_none_where_there_is_none(workspace: Path, start: list[str]) -> None:
    (workspace / "a.yaml").write_text("save: null\n")
    assert "save" not in resolve(["--config", "a.yaml", *start], EMPTY).given
    (workspace / "a.yaml").write_text("seed: null\n")
    assert problems(["--config", "a.yaml", *start]) == ["a.yaml:1: seed: expected an integer, found None"]


def test_none_takes_back_what_a_file_sets(workspace: Path, start: list[str]) -> None:
    (workspace / "a.toml").write_text('save = "checkpoints"\nsave_interval = 5\n')
    config = resolve(["--config", "a.toml", *start, "--save", "none", "--save-interval", "none"], EMPTY)
    assert config.train.checkpoint.save is None
    assert not {"save", "save_interval"} & config.given


def test_the_folder_of_a_file_is_a_placeholder(
    workspace: Path, start: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (workspace / "run.toml").write_text(
        'hf_checkpoint = "${config_dir}/small"\nprompt_data = ["${config_dir}/prompts.jsonl"]\n'
        'rollout_stop = ["$${config_dir}"]\n'
    )
    (workspace / "elsewhere").mkdir()
    monkeypatch.chdir(workspace / "elsewhere")
    config = resolve(["--config", "../run.toml", *start[4:]], EMPTY)
    assert config.train.model.hf_checkpoint == str(workspace / "small")
    assert config.data.prompt_data == (f"{workspace}/prompts.jsonl",)
    assert config.rollout.rollout_stop == ("${config_dir}",)


def test_all_errors_of_all_layers_come_together(workspace: Path, model: list[str]) -> None:
    (workspace / "run.toml").write_text('lr = "x"\nrollout_batch_sze = 4\n')
    argv = ["--config", "run.toml", *model, "--seed", "y", "--balance-data", "--fully-async", "--colocate"]
    found = problems([*argv, "--num-rollout", "1", "--num-epoch", "1", "--rm-type", "math"], {"RELAX_BF16": "2"})
    for part in (
        "run.toml:1: lr: expected a number",
        "run.toml:2: rollout_batch_sze: no such option; did you mean rollout_batch_size",
        "environment RELAX_BF16: expected true or false",
        "--seed: expected an integer",
        "--fully-async and --colocate exclude each other",
        "--balance-data works with --colocate only",
        "--num-rollout 1 and --num-epoch 1",
    ):
        assert sum(part in f for f in found) == 1, (part, found)


def test_a_value_that_could_not_be_read_causes_no_second_error(workspace: Path) -> None:
    argv = ["--hf-chekpoint", "small", "--prompt-data", "prompts.jsonl", "--rm-type", "math", "--num-rolout", "3"]
    argv += ["--lable-key", "label"]
    found = problems([*argv, "--use-dynamic-batch-size", "--max-tokens-per-gpu", "many", "--n-samples-per-prompt", "2"])
    assert found == [
        "--hf-chekpoint: no such option; did you mean --hf-checkpoint?",
        "--num-rolout: no such option; did you mean --num-rollout?",
        "--lable-key: no such option; did you mean --label-key?",
        "--max-tokens-per-gpu: expected an integer, found 'many'",
    ]


def test_problems_say_where_options_outside_the_command_line_stand(workspace: Path, start: list[str]) -> None:
    (workspace / "run.toml").write_text("\nmax_staleness = 2\n")
    (found,) = problems(["--config", "run.toml", *start])
    assert found.startswith("--max-staleness has no effect without --fully-async")
    assert found.endswith("[--max-staleness from run.toml:2]")


def test_what_is_required_is_said(workspace: Path) -> None:
    found = problems([])
    assert any(f.startswith("--hf-checkpoint is required") for f in found)
    assert any("--prompt-data is required" in f for f in found)
    assert any("--num-rollout and --num-epoch" in f for f in found)
    assert any("--rm-type" in f for f in found)


def test_derived_values(workspace: Path, start: list[str]) -> None:
    argv = ["--rollout-batch-size", "8", "--use-dynamic-batch-size", "--max-tokens-per-gpu", "2048"]
    config = resolve([*start, *argv, "--num-steps-per-rollout", "2"], EMPTY)
    assert config.cluster.colocate
    assert config.cluster.actor_num_gpus_per_node == 0
    assert config.train.batch.global_batch_size == 16
    assert config.train.batch.num_steps_per_rollout == 2
    assert config.train.batch.log_probs_max_tokens_per_gpu == 2048
    assert config.rollout.over_sampling_batch_size == 8
    assert config.train.parallel.expert_tensor_parallel_size is None
    assert not config.given & {"colocate", "global_batch_size", "over_sampling_batch_size"}


def test_derived_values_of_a_fully_async_plan(workspace: Path) -> None:
    argv = ["--hf-checkpoint", "qwen3-30b-a3b", "--prompt-data", "prompts.jsonl", "--dry-run", "--fully-async"]
    config = resolve([*argv, "--tensor-model-parallel-size", "2", "--sequence-parallel"], EMPTY)
    assert not config.cluster.colocate
    assert config.train.parallel.expert_tensor_parallel_size == 2
    assert config.cluster.rollout_num_gpus == 8


def test_steps_follow_from_the_global_batch(workspace: Path, start: list[str]) -> None:
    config = resolve([*start, "--rollout-batch-size", "8", "--global-batch-size", "8"], EMPTY)
    assert config.train.batch.num_steps_per_rollout == 4


def test_name_and_directories(workspace: Path, start: list[str]) -> None:
    config = resolve([*start, "--tb-experiment-name", "first"], EMPTY)
    assert (config.name, config.run_dir) == ("first", workspace / "runs" / "first")
    assert config.trace_dir == workspace / "traces" / "first"
    one, two = resolve(start, EMPTY), resolve(start, EMPTY)
    assert one.name != two.name
    assert one.run_dir.name == one.name


def test_paths_are_absolute_for_every_process(
    workspace: Path, start: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(workspace))
    config = resolve([*start, "--save", "~/checkpoints", "--save-hf", "hf/{rollout_id}"], EMPTY)
    assert config.train.model.hf_checkpoint == str(workspace / "small")
    assert config.train.checkpoint.save == str(workspace / "checkpoints")
    assert config.train.checkpoint.save_hf == str(workspace / "hf" / "{rollout_id}")


def test_config_is_picklable_and_loads_without_torch(workspace: Path, start: list[str]) -> None:
    config = resolve([*start, "--sglang-schedule-policy", "fcfs"], EMPTY)
    assert pickle.loads(pickle.dumps(config)) == config
    (workspace / "config.pickle").write_bytes(pickle.dumps(config))
    code = (
        "import pickle, sys; c = pickle.load(open('config.pickle', 'rb')); "
        "print(c.name); assert 'torch' not in sys.modules"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert loaded.stdout.strip() == config.name, loaded.stderr


def test_given_holds_pass_through_names(workspace: Path, start: list[str]) -> None:
    config = resolve([*start, "--sglang-schedule-policy", "fcfs"], EMPTY)
    assert {"sglang_extra", "sglang_schedule_policy"} <= config.given
    assert config.sglang.sglang_extra == {"schedule_policy": "fcfs"}


def test_gpus_of_this_machine(workspace: Path, start: list[str], gpus: Callable[[int], None]) -> None:
    gpus(4)
    config = resolve(start, EMPTY)
    assert config.placement is not None
    assert (config.placement.device, config.placement.train_ranks, config.placement.engines) == ("cuda", 4, 4)
    hidden = resolve(start, {"CUDA_VISIBLE_DEVICES": ""})
    assert hidden.placement is not None
    assert hidden.placement.device == "cpu"
    two = resolve(start, {"CUDA_VISIBLE_DEVICES": "1,3"})
    assert two.placement is not None
    assert two.placement.train_ranks == 2


def test_cpu_ranks_follow_from_the_parallel_sizes(workspace: Path, start: list[str]) -> None:
    config = resolve([*start, "--tensor-model-parallel-size", "2", "--context-parallel-size", "2"], EMPTY)
    assert config.placement is not None
    assert (config.placement.device, config.placement.train_ranks, config.placement.dp) == ("cpu", 4, 1)


def test_a_joined_cluster_is_fitted_when_it_is_known(workspace: Path, start: list[str]) -> None:
    config = resolve([*start, "--ray-address", "auto", "--tensor-model-parallel-size", "2"], EMPTY)
    assert config.placement is None
    fitted = fit(config, 8)
    assert fitted.placement is not None
    assert (fitted.placement.train_ranks, fitted.placement.dp, fitted.placement.engines) == (8, 4, 8)
    with pytest.raises(ConfigError, match="no multiple of TP x PP x CP"):
        fit(config, 3)
    asked = resolve([*start, "--ray-address", "auto", "--actor-num-gpus-per-node", "8"], EMPTY)
    with pytest.raises(ConfigError, match="needs 8 GPUs but the Ray cluster has 4"):
        fit(asked, 4)


def test_rank_tags_follow_megatron_order(workspace: Path, start: list[str], gpus: Callable[[int], None]) -> None:
    gpus(8)
    config = resolve([*start, "--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"], EMPTY)
    tags = [config.rank_tag(r) for r in range(8)]
    assert tags[0] == {"rank": 0, "dp": 0, "tp": 0, "pp": 0}
    assert tags[3] == {"rank": 3, "dp": 1, "tp": 1, "pp": 0}
    assert tags[6] == {"rank": 6, "dp": 1, "tp": 0, "pp": 1}


def test_printed_config_shows_defaults_as_comments(workspace: Path, model: list[str]) -> None:
    config: RunConfig = resolve([*model, "--print-config", "--lr", "2e-6"], EMPTY)
    lines = to_toml(config).splitlines()
    assert "lr = 2e-06" in lines
    assert "# weight_decay = 0.01" in lines
    assert not any("print_config" in line or "dry_run" in line for line in lines)
    assert os.sep in next(line for line in lines if line.startswith("hf_checkpoint"))


@pytest.mark.parametrize("words", [["--config", ""], ["--config", "missing.toml"], ["--config", "a.toml", "b.toml"]])
def test_without_its_file_nothing_else_is_said_to_be_missing(words: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        resolve(words, EMPTY)
    (problem,) = refused.value.problems
    assert problem.startswith("--config")


def test_a_mode_of_the_command_line_takes_the_place_of_a_files(workspace: Path, start: list[str]) -> None:
    """What has an effect in the file's mode alone goes with it, and both are told."""
    (workspace / "async.toml").write_text("fully-async = true\nmax-staleness = 2\nweight-sync = 'disk'\nlr = 1e-5\n")
    (workspace / "colocate.toml").write_text("colocate = true\nlr = 1e-5\n")
    for words, environ in [
        (["--colocate"], EMPTY),
        (["--no-fully-async"], EMPTY),
        ([], {"RELAX_COLOCATE": "true"}),
        (["--no-fully-async"], {"RELAX_COLOCATE": "true"}),
    ]:
        config = resolve([*start, "--config", "async.toml", *words], environ)
        assert (config.cluster.mode, config.cluster.weight_sync, config.train.optimizer.lr) == ("colocate", None, 1e-5)
        assert not {"max_staleness", "weight_sync"} & config.given
        told = [warning for warning in config.warnings if "takes the place of" in warning]
        assert len(told) == 1
        assert "--fully-async (async.toml:1); left out with it" in told[0]
        assert told[0].endswith("--max-staleness (async.toml:2), --weight-sync (async.toml:3)")
        (workspace / "again.toml").write_text(to_toml(config))
        assert resolve(["--config", "again.toml"], EMPTY).cluster == config.cluster

    kept = resolve([*start, "--config", "async.toml", "--colocate", "--over-sampling-batch-size", "256"], EMPTY)
    assert kept.cluster.max_staleness == 2, "it has an effect there"
    turned = resolve([*start, "--config", "colocate.toml", "--fully-async", "--actor-num-gpus-per-node", "0"], EMPTY)
    assert (turned.cluster.mode, turned.cluster.colocate) == ("fully_async", False)
    assert "--fully-async (command line) takes the place of --colocate (colocate.toml:1)" in turned.warnings

    alone = resolve([*start, "--config", "async.toml", "--actor-num-gpus-per-node", "0"], EMPTY)
    assert alone.cluster.fully_async
    assert not [warning for warning in alone.warnings if "takes the place of" in warning]
    assert "exclude each other" in problems([*start, "--config", "async.toml", "--colocate", "--fully-async"])[0]
    own = problems([*start, "--config", "async.toml", "--colocate", "--max-staleness", "1"])
    assert [p.split(" has no effect")[0] for p in own] == ["--max-staleness"], "asked for on the command line"


def test_a_server_argument_that_cannot_be_set_is_named_once(workspace: Path, start: list[str]) -> None:
    plan = [*start, "--dry-run"]
    told = [*problems([*plan, "--sglang-host", "a"]), *problems(plan, {"RELAX_SGLANG_TP": "2"})]
    assert [problem.count("sglang-host") + problem.count("SGLANG_TP") for problem in told] == [1, 1]
    assert told[0] == "--sglang-host: cannot be set: each engine gets its own address and free ports"
    (unknown,) = problems([*plan, "--sglang-mode", "a"])
    assert "--sglang-model" not in unknown, "what cannot be set is not suggested"


def test_the_example_of_the_one_mode_runs_in_the_other() -> None:
    examples = Path(__file__).resolve().parents[3] / "examples" / "arithmetic"
    turned = resolve(["--dry-run", "--config", str(examples / "async.toml"), "--colocate"], EMPTY)
    assert turned.cluster.mode == "colocate"
    turned = resolve(["--dry-run", "--config", str(examples / "train.toml"), "--fully-async"], EMPTY)
    assert turned.cluster.mode == "fully_async"
