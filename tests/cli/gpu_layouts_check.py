"""`relax train` in the parallel layouts that this machine's GPUs allow, on random models. Prints one line a layout.

    python tests/cli/gpu_layouts_check.py [--only tp2 ep2 ...] [--gpus 2] [--out FOLDER] [--rollouts 3]

Each run generates with real engines, trains and pushes the weights back; then SGLang's log-probs of what it sampled
must be those of the trainer, so a wrong shard, group or push is seen. The trainer resumes where `--save` left it.
Without a GPU the same layouts run on CPU processes with tiny models. Exits with 1 if a layout fails.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from char_tokenizer import char_tokenizer

GPU = torch.cuda.is_available()
# Two sound implementations in bfloat16 are 0.006 to 0.008 apart in the mean (measured on H200s, these models); with the
# weights of one push before they are 0.035 and more. In float32 on CPU they differ by rounding.
MEAN_LIMIT = 0.015 if GPU else 1e-5
ENGINE_OF_2 = ["--rollout-num-gpus-per-engine", "2"] if GPU else []
TP2 = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
PP2 = ["--pipeline-model-parallel-size", "2"]
ASYNC = ["--fully-async", "--max-staleness", "0"]
"""Half of the GPUs train, the others generate; without staleness, for the log-probs of older samples differ anyway."""
LAYOUTS: dict[str, tuple[str, int, list[str]]] = {
    "one": ("dense", 1, []),
    "dp2": ("dense", 2, ["--balance-data"]),
    "tp2": ("dense", 2, [*TP2, *ENGINE_OF_2]),
    "pp2": ("dense", 2, PP2),
    "cp2": ("dense", 2, ["--context-parallel-size", "2"]),
    "ep2": ("moe", 2, ["--expert-model-parallel-size", "2"]),
    "async-1+1": ("dense", 2, ASYNC),
    "tp2-ep2": ("moe", 2, [*TP2, "--expert-model-parallel-size", "2"]),
    "tp2-dp2": ("dense", 4, [*TP2, *ENGINE_OF_2]),
    "async-tp2+2": ("dense", 4, [*ASYNC, *TP2, *ENGINE_OF_2]),
    "ep4": ("moe", 4, ["--expert-model-parallel-size", "4"]),
    "tp2-pp2-dp2": ("dense", 8, [*TP2, *PP2]),
}
REWARD = "def reward(sample):\n    return sum(c.isdigit() for c in sample.response) / max(len(sample.response), 1)\n"


def make_model(kind: str, folder: Path) -> None:
    """A random Qwen3 (``dense``, 0.6 B; ``4b``) or Qwen3-MoE (0.5 B, 32 experts); tiny ones of these kinds on CPU."""
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    char_tokenizer().save_pretrained(folder)
    wide = kind == "4b" and GPU
    shape: dict[str, Any] = {
        "max_position_embeddings": 32768 if wide else 4096,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "bos_token_id": None,
        "dtype": "bfloat16" if GPU else "float32",
        "num_hidden_layers": {"dense": 28, "4b": 36, "moe": 8}[kind] if GPU else 2,
        "hidden_size": (2560 if wide else 1024) if GPU else 64,
        "intermediate_size": (9728 if wide else 3072) if GPU else 128,
        "num_attention_heads": (32 if wide else 16) if GPU else 4,
        "num_key_value_heads": (4 if kind == "moe" else 8) if GPU else 2,
        "head_dim": 128 if GPU else 16,
        "vocab_size": (32000 if kind == "moe" else 151936) if GPU else 128,
        "tie_word_embeddings": kind != "moe",
    }
    torch.manual_seed(0)
    with torch.device("cuda" if GPU else "cpu"):
        if kind != "moe":
            model: Any = Qwen3ForCausalLM(Qwen3Config(**shape))
        else:
            experts: dict[str, Any] = {"num_experts": 32 if GPU else 4, "num_experts_per_tok": 4 if GPU else 2}
            config = Qwen3MoeConfig(
                **shape, **experts, moe_intermediate_size=512 if GPU else 32, norm_topk_prob=True, mlp_only_layers=[]
            )
            model = Qwen3MoeForCausalLM(config)
        model.to(torch.bfloat16 if GPU else torch.float32).save_pretrained(folder)
    if GPU:
        del model
        torch.cuda.empty_cache()  # the run that follows needs it


def words(name: str, folder: Path, rollouts: int) -> list[str]:
    kind, gpus, placement = LAYOUTS[name]
    tokens = 256 if GPU else 8
    split = "--fully-async" in placement
    ranks = gpus // 2 if split else gpus
    where = ["--actor-num-gpus-per-node", str(ranks), *(["--rollout-num-gpus", str(gpus - ranks)] if split else [])]
    return [
        *("--hf-checkpoint", str(folder / kind), "--prompt-data", str(folder / "prompts.jsonl")),
        *("--apply-chat-template", "--custom-rm-path", "digits_reward:reward"),
        *("--rollout-batch-size", "32" if GPU else "4", "--n-samples-per-prompt", "8" if GPU else "4"),
        *("--rollout-max-response-len", str(tokens), "--rollout-max-context-len", "1024"),
        *("--num-rollout", str(rollouts), "--lr", "1e-5", "--use-dynamic-batch-size", "--max-tokens-per-gpu", "4096"),
        *("--save", str(folder / f"checkpoints-{name}"), "--load", str(folder / f"checkpoints-{name}")),
        *([] if split else ["--colocate"]),
        *(where if GPU else []),
        *(["--sglang-attention-backend", "triton", "--sglang-mem-fraction-static", "0.5"] if GPU else []),
        *placement,
    ]


class RunFailed(Exception):
    """A run ended with an error; the text says how."""


def train(options: list[str], folder: Path, name: str) -> list[dict[str, Any]]:
    """One run of `relax train` in ``folder``; gives the metrics of its steps, and leaves its output in a file."""
    command = [sys.executable, "-m", "relax_cli.main", "train", *options, "--tb-experiment-name", name]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=900, check=False)
    (folder / f"{name}.log").write_text(done.stdout + done.stderr)
    if done.returncode:
        raise RunFailed(f"FAIL {name}, exit {done.returncode}: {done.stdout[-500:]}{done.stderr[-500:]}")
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "time/step" in row]


def report(names: list[str], run: Callable[[str], str]) -> bool:
    """Runs each and prints its figures, or what went wrong; True when all are sound."""
    results = []
    for name in names:
        began = time.monotonic()
        try:
            results.append(run(name))
        except RunFailed as error:
            results.append(str(error))
        print(f"{name:12} {results[-1]} ({time.monotonic() - began:.0f} s)", flush=True)
    return all(result.startswith("ok") for result in results)


def run(name: str, folder: Path, rollouts: int) -> str:
    """One layout: a run, and one that resumes it for a rollout more. Returns its figures, or what went wrong."""
    metrics: list[dict[str, Any]] = []
    for part, length in (("first", rollouts), ("resumed", rollouts + 1)):
        metrics += train(words(name, folder, length), folder, f"{name}-{part}")
    if [row["step"] for row in metrics] != list(range(rollouts + 1)):
        return f"FAIL rollouts {[row['step'] for row in metrics]}"
    mean = max(row["train/logprob_diff_mean"] for row in metrics)
    norms = [row["train/grad_norm"] for row in metrics]
    figures = (
        f"log-probs of engine and trainer differ by {mean:.2g} in the mean, gradient norms "
        f"{min(norms):.2g} to {max(norms):.2g}, last step {metrics[-1]['time/step']:.1f} s"
    )
    return f"{'ok  ' if mean < MEAN_LIMIT and max(norms) > 0 else 'FAIL'} {figures}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=LAYOUTS)
    parser.add_argument("--gpus", type=int, help="only the layouts of this many GPUs; default: all that fit")
    parser.add_argument("--out", type=Path, help="keep models, logs and metrics here")
    parser.add_argument("--rollouts", type=int, default=3)
    arguments = parser.parse_args()
    folder = (arguments.out or Path(tempfile.mkdtemp(prefix="relax-layouts-"))).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "digits_reward.py").write_text(REWARD)
    prompts = (json.dumps({"input": f"{a}+{b}="}) + "\n" for a in range(10, 60) for b in range(10, 20))
    (folder / "prompts.jsonl").write_text("".join(prompts))
    ranks = torch.cuda.device_count() if GPU else 2
    fitting = [name for name, (_, needed, _) in LAYOUTS.items() if needed <= ranks and arguments.gpus in (None, needed)]
    names = arguments.only or fitting
    if not names:
        sys.exit(f"no layout has {arguments.gpus} ranks where {ranks} fit")
    for kind in sorted({LAYOUTS[name][0] for name in names}):
        make_model(kind, folder / kind)
    sound = report(names, lambda name: run(name, folder, arguments.rollouts))
    print(f"logs in {folder}")
    sys.exit(0 if sound else "not all layouts are sound")


if __name__ == "__main__":
    main()
