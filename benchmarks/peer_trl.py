"""The arithmetic example with `relax train` and with TRL, in turn: seconds a step, the whole run, held-out answers.

    uv run --group peers python benchmarks/peer_trl.py [--rollouts 50]

TRL's GRPOTrainer gets the same model, prompts, groups, optimizer steps, learning rate and number of rollouts. It
generates with transformers in the trainer's own process, while Relax drives an SGLang server over HTTP and pushes
weights to it, as with GPUs. Both run alone, one after the other, on the CPU. The limit: a step of Relax takes at most
1.0 s (on two idle cores).
"""

import argparse
import importlib.util
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from loop_step_time import WARM_UP, run

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "arithmetic"
PROMPTS, SAMPLES, STEPS, NEW_TOKENS = 32, 8, 2, 8  # of a rollout; optimizer steps of it; tokens of a response
LIMIT_S = 1.0


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (EXAMPLE / "data" / name).read_text().splitlines()]


def train_with_trl(rollouts: int, folder: Path) -> dict[str, Any]:
    """Seconds of each rollout with its optimizer steps, and the share of right held-out answers at the end."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(EXAMPLE / "model")
    model: Any = AutoModelForCausalLM.from_pretrained(EXAMPLE / "model", dtype=torch.float32)

    def conversation(row: dict[str, Any]) -> list[dict[str, str]]:
        return [{"role": "user", "content": row["input"]}]

    def is_right(completions: list[list[dict[str, str]]], label: list[str], **_: Any) -> list[float]:
        pairs = zip(completions, label, strict=True)
        return [float(turns[0]["content"].strip() == wanted) for turns, wanted in pairs]

    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

    trainer = GRPOTrainer(
        model=model,
        reward_funcs=is_right,
        args=GRPOConfig(
            output_dir=str(folder),
            use_cpu=True,
            bf16=False,
            per_device_train_batch_size=PROMPTS * SAMPLES // STEPS,
            gradient_accumulation_steps=1,
            steps_per_generation=STEPS,
            num_generations=SAMPLES,
            max_completion_length=NEW_TOKENS,
            max_steps=rollouts * STEPS,
            learning_rate=5e-4,
            lr_scheduler_type="linear",
            adam_beta2=0.95,
            max_grad_norm=1.0,
            beta=0.0,
            temperature=1.0,
            loss_type="grpo",
            report_to=[],
            save_strategy="no",
            logging_steps=1000,
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list(
            [{"prompt": conversation(row), "label": str(row["label"])} for row in rows("train.jsonl")]
        ),
        processing_class=tokenizer,
        callbacks=[Clock()],
    )
    begin = time.perf_counter()
    trainer.train()
    marks = [begin, *ends[STEPS - 1 :: STEPS]]

    held_out = rows("heldout.jsonl")
    texts = [
        tokenizer.apply_chat_template(conversation(row), add_generation_prompt=True, tokenize=False) for row in held_out
    ]
    batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
    model.eval()
    with torch.no_grad():
        tokens = model.generate(**batch, max_new_tokens=NEW_TOKENS, do_sample=True, temperature=1.0, top_k=0, top_p=1.0)
    answers = tokenizer.batch_decode(tokens[:, batch.input_ids.shape[1] :], skip_special_tokens=True)
    right = [text.strip() == str(row["label"]) for text, row in zip(answers, held_out, strict=True)]
    return {"steps": [b - a for a, b in itertools.pairwise(marks)], "held_out": sum(right) / len(right)}


def measure_trl(rollouts: int, folder: Path) -> dict[str, Any]:
    """:func:`train_with_trl` in a process of its own."""
    result = folder / "trl.json"
    words = ["--rollouts", str(rollouts), "--trl", str(result)]
    subprocess.run([sys.executable, __file__, *words], cwd=folder, check=True)
    measured: dict[str, Any] = json.loads(result.read_text())
    return measured


def measure_relax(rollouts: int, folder: Path) -> dict[str, Any]:
    begin = time.perf_counter()
    steps = run(rollouts - WARM_UP, [], folder)
    whole = time.perf_counter() - begin
    held_out = [row["eval/heldout"] for row in steps if "eval/heldout" in row]
    return {"steps": [row["time/step"] for row in steps], "held_out": held_out[-1] if held_out else None, "all": whole}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=50)
    parser.add_argument("--trl", type=Path, help=argparse.SUPPRESS)  # only TRL, and write what it took
    options = parser.parse_args()
    if importlib.util.find_spec("trl") is None:
        parser.error("TRL is not installed: uv run --group peers python benchmarks/peer_trl.py")
    if options.trl is not None:
        options.trl.write_text(json.dumps(train_with_trl(options.rollouts, options.trl.parent / "output")))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        trl = measure_trl(options.rollouts, Path(folder))
        relax = measure_relax(options.rollouts, Path(folder))
    medians = {}
    for name, measured in (("TRL", trl), ("Relax", relax)):
        medians[name] = statistics.median(measured["steps"][WARM_UP:])
        print(
            f"{name:<6}{medians[name]:7.3f} s a step, {sum(measured['steps']):6.1f} s for {options.rollouts} rollouts, "
            f"held-out {measured['held_out']}"
        )
    print(f"Relax from start to end, with set-up and evaluations: {relax['all']:.0f} s")
    print(f"Relax / TRL: {medians['Relax'] / medians['TRL']:.2f}; limit of a step: {LIMIT_S} s")
    return 0 if medians["Relax"] <= LIMIT_S else 1


if __name__ == "__main__":
    sys.exit(main())
