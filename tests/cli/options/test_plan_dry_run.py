"""`--dry-run`: the two recommended configurations, the sizes of known models, and what the plan says."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from relax_cli.checks.plan import plan_text
from relax_cli.cluster.placement import Placement, gpu_memory
from relax_cli.config.resolution import resolve
from relax_cli.config.run_config import ConfigError
from relax_cli.main import main
from relax_train.models.architectures import ARCHITECTURES, model_shape
from relax_train.models.architectures.base import Architecture
from relax_train.models.shape import ModelShape

QWEN3_4B_8_GPUS = (
    "--colocate --tensor-model-parallel-size 2 --sequence-parallel --recompute-granularity full "
    "--recompute-method uniform --recompute-num-layers 1 --use-dynamic-batch-size --max-tokens-per-gpu 9216 "
    "--sglang-mem-fraction-static 0.8"
)
QWEN3_30B_16_GPUS = (
    "--fully-async --tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2 "
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --optimizer-cpu-offload "
    "--sglang-mem-fraction-static 0.6"
)


def plan(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    code = main(["train", "--dry-run", *argv])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    return captured.out


def row(text: str, name: str) -> str:
    """The value of one row of the plan."""
    found = [line.strip() for line in text.splitlines() if line.strip().startswith(f"{name}  ")]
    assert len(found) == 1, (name, text)
    return found[0].removeprefix(name).strip()


@pytest.mark.parametrize("gpus_here", [0, 8])
def test_recommended_qwen3_4b(
    workspace: Path, capsys: pytest.CaptureFixture[str], gpus: Callable[[int], None], gpus_here: int
) -> None:
    gpus(gpus_here)
    text = plan(["--hf-checkpoint", "qwen3-4b", "--prompt-data", "prompts.jsonl", *QWEN3_4B_8_GPUS.split()], capsys)
    assert row(text, "GPUs") == "8 in all"
    assert row(text, "TP x PP x CP x DP") == "2 x 1 x 1 x 4 = 8 ranks"
    assert row(text, "engines") == "8 SGLang servers, 1 GPU each, on the same GPUs, in turn with the trainer"
    assert row(text, "micro-batch") == "at most 9216 x CP 1 = 9216 tokens"
    assert row(text, "recompute") == "full, uniform, 1 layer"
    assert row(text, "parameters") == "4.02 B"
    assert "of --sglang-mem-fraction-static 0.8 of the GPU" in row(text, "engine: weights")
    # Bytes of a layer and token, on one of two ranks: four of the residual stream, queries thrice, keys and values
    # twice, three of the MLP; half as much again while a layer runs backward. Selective keeps no norm and no SwiGLU.
    stream, queries, keys, inner = 2560, 4096, 1024, 9728
    running = 1.5 * (layer := 4 * stream + 3 * queries + 4 * keys + 3 * inner)
    off, selective, full = (
        f"{9216 * (36 * kept + running) / 1e9:.1f} GB" for kept in (layer, layer - 2 * stream - inner, stream)
    )
    assert row(text, "trainer: activations") == f"about {full} for 9216 tokens"
    assert row(text, "with other recompute") == f"off: {off}; selective: {selective}"


@pytest.mark.parametrize("gpus_here", [0, 8])
def test_recommended_qwen3_30b_a3b(
    workspace: Path, capsys: pytest.CaptureFixture[str], gpus: Callable[[int], None], gpus_here: int
) -> None:
    gpus(gpus_here)
    text = plan(
        ["--hf-checkpoint", "qwen3-30b-a3b", "--prompt-data", "prompts.jsonl", *QWEN3_30B_16_GPUS.split()], capsys
    )
    assert row(text, "GPUs") == "16 in all: 8 train + 8 generate"
    assert row(text, "weights") == "over a process group for each engine (NCCL)"
    assert row(text, "TP x PP x CP x DP") == "2 x 1 x 1 x 4 = 8 ranks"
    assert row(text, "experts: EP x ETP x DP") == "2 x 2 x 2 a pipeline stage"
    assert row(text, "engines") == "8 SGLang servers, 1 GPU each, on 8 GPUs of their own"
    assert row(text, "parameters") == "30.53 B"
    assert "staleness at most 1" in row(text, "mode")


@pytest.mark.parametrize(
    ("share", "stays"),
    [
        # What is not the engine's, less 6 GiB that both processes take and 6 that are left free.
        ("0.8", ("4.3 GB", "17.0 GB", " (all of it with --sglang-mem-fraction-static 0.53)")),
        ("0.6", ("21.5 GB", "46.8 GB", " (all of it with --sglang-mem-fraction-static 0.53)")),
        ("0.5", ("30.1 GB", "56.3 GB", "")),
    ],
)
def test_what_stays_on_the_gpu_beside_the_engine(
    workspace: Path,
    capsys: pytest.CaptureFixture[str],
    gpus: Callable[[int], None],
    share: str,
    stays: tuple[str, str, str],
) -> None:
    gpus(1)
    start = ["--hf-checkpoint", "qwen3-4b", "--prompt-data", "prompts.jsonl", "--max-tokens-per-gpu", "9216"]
    text = plan([*start, "--use-dynamic-batch-size", "--sglang-mem-fraction-static", share], capsys)
    small, large, hint = stays
    assert row(text, "kept on the GPU while engines generate") == (
        f"of 56.3 GB about {small} on a GPU of 80 GiB, about {large} on a GPU of 139 GiB{hint}; "
        "the rest moves to the host and back in each step"
    )


def facts(workspace: Path, name: str) -> ModelShape:
    return model_shape(json.loads((workspace / name / "config.json").read_text()))


def test_sizes_of_known_models(workspace: Path) -> None:
    # The counts that the safetensors indices of the published checkpoints give.
    assert facts(workspace, "qwen3-4b").parameters == 4_022_468_096
    assert facts(workspace, "qwen3-30b-a3b").parameters == 30_532_122_624


def test_experts_as_transformers_5_names_them(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = workspace / "qwen3-30b-a3b" / "config.json"
    config = json.loads(path.read_text())
    config["num_local_experts"] = config.pop("num_experts")
    path.write_text(json.dumps(config))
    assert facts(workspace, "qwen3-30b-a3b").parameters == 30_532_122_624
    text = plan(
        ["--hf-checkpoint", "qwen3-30b-a3b", "--prompt-data", "prompts.jsonl", *QWEN3_30B_16_GPUS.split()], capsys
    )
    assert row(text, "experts: EP x ETP x DP") == "2 x 2 x 2 a pipeline stage"


def test_a_family_is_planned_from_its_record_alone(
    workspace: Path, start: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = workspace / "small" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_type": "plain"}))
    with pytest.raises(ConfigError) as raised:
        resolve([*start, "--dry-run"], {})
    assert str(raised.value).count("model_type 'plain' is not supported") == 1
    record = Architecture(model_type="plain", class_name="PlainForCausalLM")
    monkeypatch.setitem(ARCHITECTURES, "plain", record)
    text = plan(start, capsys)
    assert row(text, "kind") == "plain, 2 layers, hidden 64, 4 heads"
    attention, mlp = 64 * 2 * (64 + 32), 3 * 64 * 128
    assert row(text, "parameters") == f"{128 * 64 + 2 * (attention + mlp + 2 * 64) + 64:,}"


def test_size_of_a_small_model_equals_what_transformers_builds(tiny_model: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    built = sum(p.numel() for p in model.parameters())
    assert model_shape(json.loads((tiny_model / "config.json").read_text())).parameters == built


def placement(**sizes: Any) -> Placement:
    default = {"tp": 1, "pp": 1, "cp": 1, "ep": 1, "etp": 1, "train_ranks": 1}
    return Placement(device="cuda", engines=1, gpus_per_engine=1, shared=True, **{**default, **sizes})


def test_a_layout_in_words_names_the_experts_where_they_are_divided() -> None:
    assert placement(tp=2, pp=2, etp=2, train_ranks=8).layout == "TP 2 x PP 2 x CP 1 x DP 2"
    divided = placement(tp=2, ep=4, etp=1, train_ranks=8)
    assert divided.layout == "TP 2 x PP 1 x CP 1 x DP 4, experts: EP 4 x ETP 1 x DP 2"


def test_training_memory_by_hand(workspace: Path) -> None:
    model = facts(workspace, "qwen3-4b")
    n = model.parameters
    assert model.training_bytes(placement(), bf16=True, offload=False) == (18 * n, 0)
    assert model.training_bytes(placement(), bf16=False, offload=False) == (16 * n, 0)
    assert model.training_bytes(placement(train_ranks=4), bf16=True, offload=False) == (6 * n + 12 * n // 4, 0)
    assert model.training_bytes(placement(train_ranks=4), bf16=True, offload=True) == (6 * n, 12 * n // 4)
    half = model.shared_parameters // 2 + model.embedding // 2
    assert model.training_bytes(placement(tp=2, train_ranks=2), bf16=True, offload=False) == (18 * half, 0)


def test_experts_are_divided_by_their_own_sizes(workspace: Path) -> None:
    model = facts(workspace, "qwen3-30b-a3b")
    dense, expert = model.parameters_per_rank(placement(tp=2, ep=2, etp=2, train_ranks=8))
    assert expert == model.expert_parameters // 4
    assert dense == model.shared_parameters // 2 + 2 * model.embedding // 2


def test_the_fullest_stage_of_a_pipeline_counts(workspace: Path) -> None:
    config = json.loads((workspace / "qwen3-30b-a3b" / "config.json").read_text())
    # The first half of the layers is dense: the second stage has all the experts.
    model = model_shape({**config, "mlp_only_layers": list(range(24))})
    dense, expert = model.parameters_per_rank(placement(pp=2, train_ranks=2))
    assert expert == model.expert_parameters == 24 * 128 * 3 * 2048 * 768
    assert dense == 24 * model.shared_in_layer("experts") + 2048 + model.embedding
    # Of a tied model the last stage keeps a copy of the embedding, and one stage alone has it once.
    tied = facts(workspace, "qwen3-4b")
    assert tied.parameters_per_rank(placement(pp=2, train_ranks=2))[0] == (
        18 * tied.shared_in_layer("dense") + 2560 + tied.embedding
    )


def test_a_plan_for_cpu(workspace: Path, start: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--rollout-batch-size", "8", "--num-steps-per-rollout", "2", "--tensor-model-parallel-size", "2"]
    text = plan([*start, *sizes, "--over-sampling-batch-size", "12"], capsys)
    assert row(text, "GPUs") == "none: everything runs on CPU"
    assert row(text, "trainer") == "2 ranks"
    assert row(text, "samples a rollout") == "8 prompts x 4 responses = 32"
    assert row(text, "optimizer steps a rollout") == "32 samples / 16 a step = 2"
    assert row(text, "over-sampling").startswith("12 prompts open at once: the first 8 groups are used;")
    assert row(text, "staleness") == "at most 1 version(s) (--max-staleness)"
    assert row(text, "precision") == "float32"
    assert "A real start still needs" not in text


def test_a_large_model_is_planned_for_gpus_and_a_named_number_of_gpus_too(workspace: Path, model: list[str]) -> None:
    def device(*words: str) -> str:
        found = resolve(["--dry-run", "--prompt-data", "prompts.jsonl", *words], {}).placement
        assert found is not None
        return found.device

    assert device("--hf-checkpoint", "small") == "cpu"
    assert device("--hf-checkpoint", "qwen3-4b") == "cuda"
    assert device("--hf-checkpoint", "qwen3-4b", "--actor-num-gpus-per-node", "0") == "cpu"
    assert device("--hf-checkpoint", "small", "--num-gpus-per-node", "4") == "cuda"


@pytest.mark.parametrize("mode", ["--colocate", "--fully-async"])
@pytest.mark.parametrize("here", [0, 1, 16])
def test_a_plan_is_of_the_devices_that_a_start_would_take(
    workspace: Path, start: list[str], gpus: Callable[[int], None], mode: str, here: int
) -> None:
    gpus(here)
    planned = resolve([*start, mode, "--dry-run"], {})
    told = [note for note in planned.notes if "and this machine has" in note]
    if told:  # a start there is refused for the same lack
        with pytest.raises(ConfigError, match=f"and this machine has {here}"):
            resolve([*start, mode], {})
    else:
        assert planned.placement == resolve([*start, mode], {}).placement
    assert bool(told) == (mode == "--fully-async" and here > 0)


def test_files_that_will_be_written(workspace: Path, start: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--tb-experiment-name", "demo", "--save", "ckpt", "--save-interval", "5", "--save-hf", "hf/{rollout_id}"]
    words += ["--sglang-profile", "--use-pytorch-profiler", "--record-memory-history", "--save-debug-rollout-data"]
    text = plan([*start, *words, "samples/{rollout_id}.pkl"], capsys)
    assert row(text, "run directory") == f"{workspace}/runs/demo/"
    assert row(text, "in it").endswith(", tensorboard/")
    assert ", metrics.jsonl, timeline.jsonl, " in row(text, "in it")
    assert row(text, "checkpoints") == f"{workspace}/ckpt/, every 5 rollouts and after the last rollout"
    assert row(text, "Hugging Face exports").startswith(f"{workspace}/hf/{{rollout_id}}")
    assert row(text, "SGLang traces") == f"{workspace}/traces/demo/sglang_trace/rollout_<id>/"
    assert row(text, "training traces") == f"{workspace}/traces/demo/train_trace/"
    assert row(text, "memory snapshots") == f"{workspace}/traces/demo/memory_snapshot/"
    assert row(text, "samples of each rollout") == f"{workspace}/samples/{{rollout_id}}.pkl"
    assert not (workspace / "runs").exists()
    assert not (workspace / "traces").exists()


def test_debugging_modes_plan_half_of_the_processes(workspace: Path, start: list[str]) -> None:
    half = plan_text(resolve([*start, "--dry-run", "--debug-rollout-only"], {}))
    assert "trainer" not in half
    assert row(half, "engines") == "1 SGLang server"
    load = ["--debug-train-only", "--load-debug-rollout-data", "s{rollout_id}"]
    other = plan_text(resolve([*start, "--dry-run", *load], {}))
    assert row(other, "trainer") == "1 rank"
    assert "engine" not in other


def test_a_cluster_to_join_is_planned_with_the_gpus_of_its_nodes(workspace: Path, start: list[str]) -> None:
    text = plan_text(resolve([*start, "--dry-run", "--ray-address", "auto", "--actor-num-nodes", "2"], {}))
    assert row(text, "Ray") == "joins auto and takes the GPUs it has; planned for nodes of 8 (--num-gpus-per-node)"
    assert row(text, "trainer") == "16 ranks, one a GPU: 2 nodes x 8 GPUs"
    cpu = ["--ray-address", "auto", "--actor-num-nodes", "2", "--actor-num-gpus-per-node", "0"]
    text = plan_text(resolve([*start, "--dry-run", *cpu, "--tensor-model-parallel-size", "2"], {}))
    assert row(text, "Ray") == "joins auto"
    assert row(text, "trainer") == "4 ranks, 2 on each of 2 nodes"
    assert row(text, "engines") == "2 SGLang servers, one a node"
    assert row(text, "TP x PP x CP x DP") == "2 x 1 x 1 x 2 = 4 ranks"


def after(text: str, title: str) -> list[str]:
    """The lines of the last topics of the plan, from this title on, up to an empty line."""
    return text.partition(f"\n{title}\n")[2].partition("\n\n")[0].splitlines()


def test_a_plan_says_that_a_run_is_finished_and_a_start_of_it_starts_nothing(
    workspace: Path, start: list[str], checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*start, "--load", str(checkpoint.parent)]
    five = [w if w != "2" or words[i - 1] != "--num-rollout" else "5" for i, w in enumerate(words)]
    done = f"nothing is left to do: {checkpoint} holds rollout 4, and the last one of --num-rollout 5 is 4"
    assert row(plan(five, capsys), "length") == f"5 rollouts; {done}"
    six = ["6" if w == "5" else w for w in five]
    assert row(plan(six, capsys), "length") == "6 rollouts"

    (workspace / "small" / "model.safetensors").touch()
    (workspace / "small" / "tokenizer.json").write_text("{}")
    code = main(["train", *five])
    captured = capsys.readouterr()
    assert (code, captured.out) == (0, f"relax train: {done}\n"), captured.err
    assert not (workspace / "runs").exists()


def test_a_plan_says_that_there_is_no_evaluation(
    workspace: Path, start: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert row(plan(start, capsys), "evaluation") == "none (--eval-prompt-data NAME PATH and --eval-interval)"
    some = plan([*start, "--eval-interval", "2", "--eval-prompt-data", "held", "prompts.jsonl"], capsys)
    assert row(some, "evaluation") == "held, before the first and after every 2 rollouts"


@pytest.mark.parametrize(("here", "told"), [(0, "no GPUs"), (1, "1 GPU"), (8, None), (16, None)])
def test_a_plan_for_more_gpus_than_this_machine_has_says_so(
    workspace: Path, start: list[str], gpus: Callable[[int], None], here: int, told: str | None
) -> None:
    gpus(here)
    words = [*start, "--dry-run", "--actor-num-gpus-per-node", "8"]
    notes = after(plan_text(resolve(words, {})), "A real start still needs")
    gpus_missing = [line for line in notes if "and this machine has" in line]
    assert gpus_missing == (
        []
        if told is None
        else [
            f"  - 8 GPUs, and this machine has {told}: start it where they are, join them with --ray-address, or lower "
            "--actor-num-gpus-per-node"
            + ("" if here else "; --actor-num-gpus-per-node 0 plans a run on the CPU of this machine")
        ]
    )
    first = plan_text(resolve(words, {})).splitlines()[0]
    assert first.endswith(": nothing was started")
    assert (" for GPUs that this machine does not have:" in first) == (told is not None)
    joined = plan_text(resolve([*words, "--ray-address", "auto"], {}))
    assert "this machine" not in joined


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--rollout-batch-size 100000000", "at 5,000 tokens a second and engine this takes"),
        ("--num-gpus-per-node 8 --rollout-batch-size 100000000", "at 50,000 tokens a second and GPU this takes"),
        (
            "--use-dynamic-batch-size --max-tokens-per-gpu 2000000000",
            "use GPUs, or a smaller model, or lower --max-tokens-per-gpu, or add --recompute-granularity full",
        ),
    ],
)
def test_sizes_that_no_machine_holds_are_warned_of(workspace: Path, start: list[str], words: str, told: str) -> None:
    batch = ["--rollout-max-response-len", "1000"]
    options = [*start, "--dry-run", *words.split(), *batch]
    if words.startswith("--num-gpus"):
        options += ["--micro-batch-size", "1"]
    (found,) = [w for w in resolve(options, {}).warnings if told in w]
    assert "lower" in found


def test_models_that_no_gpu_holds_are_warned_of(workspace: Path, model: list[str]) -> None:
    huge = [
        "--hf-checkpoint",
        "qwen3-30b-a3b",
        "--prompt-data",
        "prompts.jsonl",
        "--dry-run",
        "--num-gpus-per-node",
        "1",
    ]
    (found,) = [w for w in resolve(huge, {}).warnings if "the largest GPU that is sold has 288" in w]
    # The activations of samples as long as the model could hold are not counted: they will hardly be that long.
    assert found.startswith(
        "memory in a push of weights: 549.6 GB weights, gradients, optimizer + 61.1 GB the engine's weights + "
    )
    fits = [*huge[:-1], "8", *QWEN3_30B_16_GPUS.split()]
    assert not [w for w in resolve(fits, {}).warnings if "largest GPU" in w]
    near = "and this machine has"
    small = resolve(["--hf-checkpoint", "small", "--prompt-data", "prompts.jsonl", "--dry-run"], {})
    assert not [w for w in small.warnings if near in w]


# ---------------------------------------------------------------------- sums of memory


PARALLEL = "raise --tensor-model-parallel-size or --pipeline-model-parallel-size"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
FIXED = "weights, gradients, optimizer"


def gigabytes(text: str) -> list[float]:
    """The sizes that a row names, as GB."""
    found = re.findall(r"([\d,.]+) (GB|MB)", text)
    return [float(size.replace(",", "")) / (1 if unit == "GB" else 1000) for size, unit in found]


def test_what_is_in_a_gpu_together_is_added_up(
    workspace: Path, capsys: pytest.CaptureFixture[str], gpus: Callable[..., None]
) -> None:
    words = ["--hf-checkpoint", "qwen3-4b", "--prompt-data", "prompts.jsonl", *QWEN3_4B_8_GPUS.split()]
    text = plan(words, capsys)
    *parts, total = gigabytes(row(text, "in all while it trains"))
    assert parts == [gigabytes(row(text, f"trainer: {name}"))[0] for name in (FIXED, "activations", "logits")]
    assert total == pytest.approx(sum(parts), abs=0.2)
    fixed, model, buckets, total = gigabytes(row(text, "in all in a push of weights"))
    assert fixed == parts[0]
    assert model == gigabytes(row(text, "engine: weights"))[0] == 8.0
    assert buckets == 1.6, "twice the embedding, which is larger than --update-weight-buffer-size"
    assert total == pytest.approx(fixed + model + buckets, abs=0.2)
    model, cache, _ = gigabytes(row(text, "in all while it generates, at least"))
    assert (model, cache) == (8.0, pytest.approx(147456 * 9216 / 1e9, abs=0.1))
    # Weights and optimizer of eight ranks sleep in the memory of their node.
    (asleep,) = gigabytes(row(text, "in all on the host, 8 ranks a node"))
    n = facts(workspace, "qwen3-4b").parameters_per_rank(placement(tp=2, train_ranks=8))[0]
    assert asleep == pytest.approx(8 * (2 + 12 / 4) * n / 1e9, abs=0.1)
    gpus(8, memory=80e9)
    assert row(plan(words, capsys), "in all while it trains").endswith(" of the 80.0 GB of a GPU of this machine")


def test_trainer_and_engine_of_their_own_gpus_are_added_up_apart(
    workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--hf-checkpoint", "qwen3-30b-a3b", "--prompt-data", "prompts.jsonl", *QWEN3_30B_16_GPUS.split()]
    text = plan([*words, "--rollout-max-context-len", "8192"], capsys)
    fixed, buckets, total = gigabytes(row(text, "trainer: in all in a push of weights"))
    assert total == pytest.approx(fixed + buckets, abs=0.2), "the engine is elsewhere"
    names = [line.strip().partition("  ")[0] for line in after(text, "Memory of one GPU")]
    sums = [name for name in names if "in all" in name]
    assert sums == [
        "trainer: in all while it trains",
        "trainer: in all in a push of weights",
        "engine: in all while it generates, at least",
        "in all on the host, 8 ranks a node",
    ]
    whose = [name.partition(":")[0] for name in names if name.startswith(("trainer", "engine"))]
    assert whose == sorted(whose, reverse=True), "first all of the trainer, then all of the engine"
    optimizer = gigabytes(row(text, "trainer: optimizer on the host"))[0]
    assert gigabytes(row(text, "in all on the host, 8 ranks a node")) == [pytest.approx(8 * optimizer, abs=0.5)]
    # Without --max-tokens-per-gpu a micro-batch has --micro-batch-size samples of the greatest length.
    assert row(text, "trainer: activations").endswith(" for 8192 tokens (--rollout-max-context-len 8192)")


def test_a_run_on_cpu_is_added_up_for_the_machine(
    workspace: Path, start: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = row(plan([*start, "--tensor-model-parallel-size", "2"], capsys), "in all on this machine")
    terms, _, total = text.partition(" = ")
    assert terms.startswith("3.7 GB libraries + ")
    assert "KV cache of 16384 tokens" in terms
    assert gigabytes(total)[0] == pytest.approx(sum(gigabytes(terms)), abs=0.1)
    small = [*start, "--dry-run", "--sglang-max-total-tokens", "100000000"]
    monkeypatch.setattr("relax_cli.checks.memory.machine_memory", lambda: 4e9)
    (found,) = [w for w in resolve(small, {}).warnings if w.startswith("memory on this machine: ")]
    assert "51.2 GB KV cache of 100000000 tokens" in found
    assert "and this machine has 4.0 GB: use GPUs" in found


def test_a_gpu_that_is_too_small_is_an_error_of_a_start_and_a_note_of_a_plan(
    workspace: Path, gpus: Callable[..., None]
) -> None:
    gpus(8, memory=24e9)
    words = ["--hf-checkpoint", "qwen3-4b", "--prompt-data", "prompts.jsonl", *QWEN3_4B_8_GPUS.split()]
    found = resolve([*words, "--dry-run"], {})
    (push,) = [note for note in found.notes if note.startswith("memory ")]
    assert push.startswith("memory in a push of weights: 18.1 GB weights, gradients, optimizer + 8.0 GB the engine's")
    ways = push.partition("a GPU of this machine has 24.0 GB: ")[2]
    assert ways == (f"{PARALLEL}, or add --optimizer-cpu-offload, or raise --rollout-num-gpus-per-engine"), (
        "the buckets hold one tensor each already"
    )
    assert not [w for w in found.warnings if w.startswith("memory ")], "said once"
    with pytest.raises(ConfigError, match="memory in a push of weights"):
        resolve(words, {})
    # What is estimated is a warning.
    gpus(8, memory=30e9)
    off = [w for w in words if w not in ("--recompute-granularity", "full", "--recompute-method", "uniform")]
    off = [w for w in off if w not in ("--recompute-num-layers", "1")]
    found = resolve([*off, "--dry-run"], {})
    assert not [note for note in found.notes if note.startswith("memory ")]
    (train,) = [w for w in found.warnings if w.startswith("memory ")]
    assert train.startswith("memory while it trains: ")
    assert "--recompute-granularity full" in train


def test_a_window_that_no_gpu_holds_hides_no_sum(
    workspace: Path, capsys: pytest.CaptureFixture[str], gpus: Callable[..., None]
) -> None:
    """A model that could hold 4 million tokens trains short samples as well as another one."""
    path = workspace / "qwen3-4b" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "max_position_embeddings": 4_000_000}))
    gpus(1, memory=80e9)
    words = ["--hf-checkpoint", "qwen3-4b", "--prompt-data", "prompts.jsonl"]
    found = resolve([*words, "--dry-run"], {})
    assert not [w for w in found.warnings if "KV cache" in w]
    (push,) = [note for note in found.notes if note.startswith("memory ")]
    assert push.startswith("memory in a push of weights: 72.4 GB weights, gradients, optimizer + 8.0 GB the engine's")
    long = row(plan(words, capsys), "in all while it generates, at least")
    assert " GB (for the longest sample that is possible; --rollout-max-context-len sets less) of the 64.0 GB" in long
    # What a rollout of years is warned of hides them neither.
    gpus(8, memory=60e9)
    both = [*words, "--dry-run", "--rollout-max-context-len", "30000", "--rollout-batch-size", "100000000"]
    kinds = [w.partition(":")[0] for w in resolve(both, {}).warnings if "days" in w or w.startswith("memory ")]
    assert kinds[0].startswith("a rollout has 100,000,000 samples")
    assert kinds[1:] == ["memory while it trains"]


@pytest.mark.parametrize(
    ("memory", "words", "moment", "ways"),
    [
        # 30.2 GB are there whatever a micro-batch has.
        (28e9, "--max-tokens-per-gpu 2000", "while it trains", f"{PARALLEL}, or add --optimizer-cpu-offload"),
        (
            28e9,
            "--max-tokens-per-gpu 9216",
            "while it trains",
            f"lower --max-tokens-per-gpu, or add {FULL}; and {PARALLEL}, or add --optimizer-cpu-offload",
        ),
        (
            50e9,
            "--max-tokens-per-gpu 9216",
            "while it trains",
            f"lower --max-tokens-per-gpu, or add {FULL}, or {PARALLEL}, or add --optimizer-cpu-offload",
        ),
        (
            28e9,
            f"--max-tokens-per-gpu 90216 --optimizer-cpu-offload {FULL}",
            "while it trains",
            "lower --max-tokens-per-gpu",
        ),
        # 8.0 GB of weights and 4.4 GB of keys and values.
        (
            40e9,
            "--max-tokens-per-gpu 30000 --rollout-max-context-len 30000 --sglang-mem-fraction-static 0.3",
            "while it generates, at least",
            "raise --sglang-mem-fraction-static, or lower --rollout-max-context-len, or raise "
            "--rollout-num-gpus-per-engine",
        ),
        (8.3e9, "--max-tokens-per-gpu 2000", "while it generates, at least", "raise --rollout-num-gpus-per-engine"),
    ],
)
def test_what_is_advised_can_help(
    workspace: Path, gpus: Callable[..., None], memory: float, words: str, moment: str, ways: str
) -> None:
    gpus(16, memory=memory)
    split = "--fully-async --actor-num-gpus-per-node 8 --rollout-num-gpus 8 --use-dynamic-batch-size"
    base = ["--hf-checkpoint", "qwen3-4b", "--prompt-data", "prompts.jsonl", "--dry-run", *split.split()]
    found = resolve([*base, *words.split()], {})
    whose = "engine" if "generates" in moment else "trainer"
    (told,) = {m for m in (*found.warnings, *found.notes) if m.startswith(f"memory of a GPU of the {whose} {moment}:")}
    assert re.search(r" has [\d.]+ GB: (.*)", told)[1] == ways  # type: ignore[index]


def test_a_single_gpu_is_told_to_get_others(workspace: Path, gpus: Callable[..., None]) -> None:
    gpus(1, memory=80e9)
    words = ["--hf-checkpoint", "qwen3-4b", "--prompt-data", "prompts.jsonl", "--dry-run"]
    (push,) = [note for note in resolve(words, {}).notes if note.startswith("memory ")]
    assert "with more GPUs that train (--actor-num-gpus-per-node, --actor-num-nodes)" in push
    assert "raise --rollout-num-gpus-per-engine and --actor-num-gpus-per-node" in push


def test_a_cache_for_the_longest_sample_is_asked_for_when_the_options_name_its_length(
    workspace: Path, gpus: Callable[..., None]
) -> None:
    """8.0 GB of weights and 6.0 GB of keys and values do not fit into two fifths of 30 GB."""
    gpus(8, memory=30e9)
    words = ["--hf-checkpoint", "qwen3-4b", "--prompt-data", "prompts.jsonl", "--dry-run", *QWEN3_4B_8_GPUS.split()]
    words[words.index("--sglang-mem-fraction-static") + 1] = "0.4"
    words[words.index("--max-tokens-per-gpu") + 1] = "40000"

    def told(*more: str) -> list[str]:
        found = resolve([*words, *more], {})
        assert not [note for note in found.notes if note.startswith("memory ")], "it is no error of a start"
        return [w for w in found.warnings if w.startswith("memory while it generates")]

    assert told() == [], "no sample may ever be as long as the model could hold"
    (found,) = told("--rollout-max-context-len", "40000")
    assert "and --sglang-mem-fraction-static 0.4 of a GPU of this machine has 12.0 GB: raise" in found
    words[words.index("0.4")] = "0.2"
    notes = [note for note in resolve(words, {}).notes if note.startswith("memory while it generates")]
    assert len(notes) == 1, "the weights alone do not fit"


def test_activations_without_any_limit_say_what_is_missing(
    workspace: Path, start: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    text = plan([*start, "--micro-batch-size", "2", "--context-parallel-size", "2"], capsys)
    assert " for 2 x 2042 / CP 2 tokens (what the model holds; --rollout-max-context-len sets less)" in text
    limits = ["--rollout-max-prompt-len", "100", "--rollout-max-response-len", "50"]
    text = plan([*start, *limits], capsys)
    assert " for 150 tokens (--rollout-max-prompt-len 100 + --rollout-max-response-len 50)" in text
    path = workspace / "small" / "config.json"
    config = json.loads(path.read_text())
    del config["max_position_embeddings"]
    path.write_text(json.dumps(config))
    told = "not known: nothing limits the length of a sample: give --rollout-max-context-len"
    assert row(plan(start, capsys), "trainer: activations") == told


def test_memory_is_that_of_the_gpus_that_are_visible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho '0, GPU-aaa-1, 4096'\necho '1, GPU-bbb-2, 81559'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr("relax_cli.cluster.placement.local_gpus", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpu_memory() == 4096 * 2**20, "the smallest"
    for chosen in ("1", "GPU-bbb"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
        assert gpu_memory() == 81559 * 2**20
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-of-another-tool")
    assert gpu_memory() is None


def test_weights_that_are_quantised_or_on_the_host_are_not_summed_up(
    workspace: Path, gpus: Callable[..., None]
) -> None:
    gpus(8, memory=80e9)
    words = ["--hf-checkpoint", "qwen3-30b-a3b", "--prompt-data", "prompts.jsonl", "--colocate", "--dry-run"]
    words += ["--actor-num-gpus-per-node", "1", "--debug-rollout-only", "--rollout-max-context-len", "2048"]
    words += ["--sglang-mem-fraction-static", "0.7"]

    def refusals(*more: str) -> list[str]:
        return [note for note in resolve([*words, *more], {}).notes if note.startswith("memory while it generates")]

    assert refusals(), "61 GB are more than 0.7 of 80"
    assert not refusals("--sglang-cpu-offload-gb", "40")
    file = workspace / "qwen3-30b-a3b" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": {"quant_method": "fp8"}}))
    assert not refusals()
    text = plan_text(resolve(words, {}))
    assert row(text, "engine: weights").startswith("not known: quantised, or in part on the host, of --sglang-mem")
    assert "GB the engine's weights" not in text
