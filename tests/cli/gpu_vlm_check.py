"""`relax train` with pictures on this machine's GPU, on a random Qwen2.5-VL. Prints one line a run.

    python tests/cli/gpu_vlm_check.py [--out FOLDER] [--rollouts 3]

The prompts are those of `examples/shapes`; the model has heads, patches and windows as the published ones, and is
random, so nothing is learnt. After each push SGLang's log-probs of what it sampled must be those of the trainer, with
the vision tower frozen and trained, and with larger pictures: those SGLang makes smaller on the GPU, and the trainer's
processor on CPU. Without a GPU a tiny model does it on CPU. Exits with 1 if a run fails.
"""

import argparse
import importlib
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "examples" / "shapes")]

from cli.gpu_layouts_check import GPU, MEAN_LIMIT, report, train  # noqa: E402

make_task: Any = importlib.import_module("make_task")

RUNS: dict[str, list[str]] = {
    "frozen": [],
    "trained": ["--no-freeze-vision-model"],
    "large": ["--prompt-data", "data/large.parquet"],
}
LARGE = 5 * make_task.SIDE


def make_model(folder: Path) -> None:
    """Data, processor, and a random model of about 0.2 B parameters; the example's tiny one on CPU."""
    draw = random.Random(0)
    own = make_task.SIDE
    for name, side in (("large", LARGE), ("train", own)):  # the processor is made for the last
        make_task.SIDE = side
        make_task.save_rows(make_task.make_rows(draw, 256), folder / "data" / f"{name}.parquet")
    processor = make_task.make_processor(folder / "model")
    torch.manual_seed(0)
    model = make_task.make_model(processor)
    if GPU:
        config = model.config
        text, vision = config.text_config, config.vision_config
        text_sizes = dict(hidden_size=1024, intermediate_size=3072, num_hidden_layers=8, num_attention_heads=8)
        vision_sizes = dict(hidden_size=1280, intermediate_size=3420, depth=8, num_heads=16, out_hidden_size=1024)
        for part, sizes in ((text, text_sizes), (vision, vision_sizes)):
            for name, value in sizes.items():
                setattr(part, name, value)
        text.layer_types = ["full_attention"] * text.num_hidden_layers
        text.rope_parameters = {**text.rope_parameters, "mrope_section": [16, 24, 24]}
        vision.fullatt_block_indexes = [3, 7]
        model = type(model)(config).to(torch.bfloat16)
    model.save_pretrained(folder / "model")


def run(name: str, folder: Path, rollouts: int) -> str:
    """One run. Returns its figures, or what went wrong."""
    where = ["--colocate", "--actor-num-gpus-per-node", "1"] if GPU else []
    engine = ["--sglang-attention-backend", "triton", "--sglang-mem-fraction-static", "0.5"] if GPU else []
    options = [
        *("--hf-checkpoint", "model"),
        *(() if "--prompt-data" in RUNS[name] else ("--prompt-data", "data/train.parquet")),
        *("--label-key", "label", "--rm-type", "exact-match"),
        *("--multimodal-keys", '{"image": "images"}', "--apply-chat-template", "--mm-processor-pool-size", "2"),
        *("--rollout-batch-size", "16", "--n-samples-per-prompt", "8", "--rollout-max-response-len", "64"),
        *("--num-rollout", str(rollouts), "--lr", "1e-5", "--use-dynamic-batch-size", "--max-tokens-per-gpu", "4096"),
        *(*where, *engine, *RUNS[name]),
    ]
    metrics = train(options, folder, name)
    if len(metrics) != rollouts:
        return f"FAIL {len(metrics)} of {rollouts} rollouts"
    mean = max(row["train/logprob_diff_mean"] for row in metrics)
    last = metrics[-1]["time/step"]
    figures = f"log-probs of engine and trainer differ by {mean:.2g} in the mean, last step {last:.1f} s"
    return f"{'ok  ' if mean < MEAN_LIMIT else 'FAIL'} {figures}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="keep model, logs and metrics here")
    parser.add_argument("--rollouts", type=int, default=3)
    arguments = parser.parse_args()
    folder = (arguments.out or Path(tempfile.mkdtemp(prefix="relax-vlm-"))).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    make_model(folder)
    sound = report(list(RUNS), lambda name: run(name, folder, arguments.rollouts))
    print(f"logs in {folder}")
    sys.exit(0 if sound else "pictures are not sound")


if __name__ == "__main__":
    main()
