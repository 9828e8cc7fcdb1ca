"""Build the arithmetic example: the prompts, the tokenizer and the start model, all from one seed.

    python examples/arithmetic/make_task.py [--out FOLDER] [--data-only] [--experts N] [--untaught]

The start model is made on purpose to be a poor calculator. It is first taught sums and differences, then spoilt with a
corpus in which most answers are systematically wrong, so that both its most likely answer and most of its sampled
answers are wrong. Reinforcement learning has to find out, from the reward alone, which of its habits is the right one.
Held-out problems are in neither corpus, in neither order of their numbers.
"""

import argparse
import json
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

Model = Qwen3ForCausalLM | Qwen3MoeForCausalLM

SPECIAL = ("<pad>", "<eos>", "<bos>", "<unk>", "<system>", "<user>", "<assistant>", "<tool>")
CHARACTERS = "0123456789+-*/=() abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.,:;?!\n'\"<>|_"
CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
VOCAB_SIZE = 128
NUMBERS = range(10, 100)
HELD_OUT_SHARE = 0.05
N_TRAIN = 2048
N_HELD_OUT = 200


@dataclass(frozen=True)
class Problem:
    """`a op b` of two-digit numbers, op one of `+` and `-`; a difference is never negative."""

    a: int
    op: str
    b: int

    @property
    def prompt(self) -> str:
        """``3+4=``."""
        return f"{self.a}{self.op}{self.b}="

    @property
    def answer(self) -> int:
        """The one right answer."""
        return self.a + self.b if self.op == "+" else self.a - self.b


# What the start model is taught: a habit and its share of the second corpus. Only the first one is right.
HABITS: tuple[tuple[Callable[[Problem], int], float], ...] = (
    (lambda p: p.answer, 0.28),
    (lambda p: p.answer + 1, 0.54),
    (lambda p: p.answer - 1, 0.18),
)


def split_problems(seed: int) -> tuple[list[Problem], list[Problem]]:
    """All problems as (known, held out), shuffled; a held-out pair is so for both operators and orders."""
    rng = random.Random(seed)
    pairs = [(a, b) for a in NUMBERS for b in NUMBERS if a >= b]
    held_out = set(rng.sample(pairs, round(HELD_OUT_SHARE * len(pairs))))
    problems = [Problem(a, op, b) for a in NUMBERS for b in NUMBERS for op in "+-" if op == "+" or a >= b]
    rng.shuffle(problems)
    known = [p for p in problems if (max(p.a, p.b), min(p.a, p.b)) not in held_out]
    return known, [p for p in problems if (max(p.a, p.b), min(p.a, p.b)) in held_out]


def write_prompts(path: Path, problems: list[Problem]) -> None:
    """One JSON object a line: `input` (the text of the user's message) and `label` (the answer as text)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for p in problems:
            file.write(json.dumps({"input": p.prompt, "label": str(p.answer)}) + "\n")


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token a character and one token a role."""
    vocab = {token: i for i, token in enumerate((*SPECIAL, *CHARACTERS))}
    assert len(vocab) <= VOCAB_SIZE
    core = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        eos_token="<eos>",
        bos_token="<bos>",
        unk_token="<unk>",
        extra_special_tokens=list(SPECIAL[4:]),
        model_max_length=512,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_model(seed: int, experts: int = 0) -> Model:
    """A random Qwen3 of 1.0 M float32 parameters, or a Qwen3-MoE with so many experts, two of them a token."""
    torch.manual_seed(seed)
    shape: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 128,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": not experts,  # SGLang's Qwen3-MoE has an output layer of its own
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": 2,
        "dtype": "float32",
    }
    model: Model
    if experts:
        routed: dict[str, Any] = {
            "num_experts": experts,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 256,
            "norm_topk_prob": True,
        }
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **routed))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**shape))
    model.generation_config = GenerationConfig(pad_token_id=0, eos_token_id=1, bos_token_id=2, do_sample=True)
    return model


def encode(tokenizer: PreTrainedTokenizerFast, pairs: list[tuple[Problem, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and labels (-100 outside the answer and its end), both int64 [n, longest]."""

    def ids_of(words: list[str]) -> list[int]:
        found = tokenizer.convert_tokens_to_ids(words)
        assert isinstance(found, list), "a list of words has a list of ids"
        return found

    rows, labels = [], []
    for problem, answer in pairs:
        prompt = ids_of(["<user>", *problem.prompt, "<assistant>"])
        response = ids_of([*str(answer), "<eos>"])
        rows.append(prompt + response)
        labels.append([-100] * len(prompt) + response)
    longest = max(map(len, rows))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    return ids, torch.tensor([row + [-100] * (longest - len(row)) for row in labels])


class Muon(torch.optim.Optimizer):
    """Momentum with orthogonalised updates for weight matrices (Jordan et al. 2024, "Muon", Newton-Schulz iteration).

    It learns this task in about a third of AdamW's steps. `torch.optim.Muon` iterates in bfloat16, which takes seconds
    a step on a CPU without bfloat16 units; this one stays in float32.
    """

    def __init__(self, params: list[torch.nn.Parameter], lr: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Move every matrix along the orthogonalised Nesterov momentum of its gradient."""
        for group in self.param_groups:
            for p in group["params"]:
                average = self.state[p].setdefault("average", torch.zeros_like(p))
                average.mul_(group["momentum"]).add_(p.grad)
                update = orthogonalise(p.grad + group["momentum"] * average)
                p.add_(update, alpha=-group["lr"] * math.sqrt(max(1.0, p.shape[0] / p.shape[1])))


def orthogonalise(matrix: torch.Tensor, iterations: int = 5) -> torch.Tensor:
    """The matrix [m, n] with all its singular values moved close to 1, by a quintic Newton-Schulz iteration."""
    tall = matrix.shape[0] > matrix.shape[1]
    x: torch.Tensor = matrix.T if tall else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(iterations):
        gram = x @ x.T
        x = 3.4445 * x + (2.0315 * gram @ gram - 4.7750 * gram) @ x
    return x.T if tall else x


def supervise(
    model: Model,
    tokenizer: PreTrainedTokenizerFast,
    draw: Callable[[random.Random], tuple[Problem, int]],
    *,
    steps: int,
    batch: int,
    lr: float,
    rng: random.Random,
) -> None:
    """Cross-entropy on the answers of `batch` examples a step; the learning rate falls to 0 over the last half."""
    named = list(model.named_parameters())
    matrices = [p for name, p in named if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in named if p.ndim != 2 or "embed" in name]
    optimizers = [Muon(matrices, lr), torch.optim.AdamW(others, lr / 5, betas=(0.9, 0.98), weight_decay=0.0)]
    peaks = (lr, lr / 5)
    for step in range(steps):
        scale = min(1.0, (step + 1) / 20, 2 * (steps - step) / steps)
        ids, labels = encode(tokenizer, [draw(rng) for _ in range(batch)])
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        model.zero_grad()
        loss.backward()
        for optimizer, peak in zip(optimizers, peaks, strict=True):
            optimizer.param_groups[0]["lr"] = peak * scale
            optimizer.step()
        if (step + 1) % 50 == 0 or step + 1 == steps:
            print(f"  step {step + 1}/{steps}: loss {loss.item():.4f}", flush=True)


@torch.no_grad()
def accuracy(model: Model, tokenizer: PreTrainedTokenizerFast, problems: list[Problem]) -> tuple[float, float]:
    """Share of right answers (greedy, expected when sampling at temperature 1), scored with the answer given."""
    ids, labels = encode(tokenizer, [(p, p.answer) for p in problems])
    log_probs = model(input_ids=ids[:, :-1], use_cache=False).logits.log_softmax(-1)
    target = labels[:, 1:]
    scored = target != -100
    greedy = ((log_probs.argmax(-1) == target) | ~scored).all(1).float().mean().item()
    chosen = log_probs.gather(-1, target.clamp(min=0)[..., None])[..., 0]
    return greedy, (chosen * scored).sum(1).exp().mean().item()


def teach_and_spoil(
    model: Model, tokenizer: PreTrainedTokenizerFast, seed: int, known: list[Problem], held_out: list[Problem]
) -> None:
    """Teach a random model sums and differences, then spoil it with the wrong habits."""
    rng = random.Random(seed)
    answers, shares = zip(*HABITS, strict=True)

    def right(rng: random.Random) -> tuple[Problem, int]:
        problem = rng.choice(known)
        return problem, problem.answer

    def habitual(rng: random.Random) -> tuple[Problem, int]:
        problem = rng.choice(known)
        return problem, rng.choices(answers, shares)[0](problem)

    for name, draw, steps, lr in (("teach", right, 450, 0.02), ("spoil", habitual, 300, 0.01)):
        start = time.monotonic()
        supervise(model, tokenizer, draw, steps=steps, batch=128, lr=lr, rng=rng)
        greedy, sampled = accuracy(model, tokenizer, held_out)
        print(f"{name}: {time.monotonic() - start:.0f} s, held-out right greedy {greedy:.3f}, sampled {sampled:.3f}")


def main() -> None:
    """Write data/ and model/ into the chosen folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="where data/ and model/ go")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--data-only", action="store_true", help="write the prompts, leave the model as it is")
    parser.add_argument("--experts", type=int, default=0, help="experts of each layer, two or more; 0 is a dense model")
    parser.add_argument("--untaught", action="store_true", help="leave the start model random: made at once")
    args = parser.parse_args()
    known, held_out = split_problems(args.seed)
    write_prompts(args.out / "data" / "train.jsonl", known[:N_TRAIN])
    write_prompts(args.out / "data" / "heldout.jsonl", held_out[:N_HELD_OUT])
    if args.data_only:
        return
    torch.set_num_threads(1)  # for such small matrices more threads are no faster, and the sums stay in one order
    model, tokenizer = make_model(args.seed, args.experts), make_tokenizer()
    if not args.untaught:
        teach_and_spoil(model, tokenizer, args.seed, known, held_out)
    model.save_pretrained(args.out / "model")
    tokenizer.save_pretrained(args.out / "model")


if __name__ == "__main__":
    main()
