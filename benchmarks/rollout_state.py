"""Seconds and MB of the open samples in a checkpoint: arrays in one file, against the same data as JSON, in one run.

    python benchmarks/rollout_state.py --samples 256 --tokens 16384

Saved as :class:`relax_data.prompts.ledger.PromptLedger` does it (half of the samples unfinished, with the tokens that
they have), written and flushed to the disk, and read back, ``--rounds`` times; the best round counts, because what else
runs on the machine only makes rounds slower. The JSON has one number a token and column in lists.
"""

import argparse
import json
import os
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from relax_data.prompts.ledger import PromptLedger
from relax_data.prompts.saved_groups import SAMPLES_FILE
from relax_data.types import Prompt, Sample, SampleGroup, SampleStatus

GROUP = 8


def make_ledger(samples: int, tokens: int) -> PromptLedger:
    """A ledger with groups of eight samples that wait."""
    draw = np.random.default_rng(0)
    groups = []
    for i in range(samples // GROUP):
        group = SampleGroup.start(Prompt(i, 0, f"a.jsonl:{i + 1}", "What is 1 + 1?", list(range(64))), GROUP)
        for sample in group.samples:
            log_probs = (-draw.random(tokens, dtype=np.float32)).tolist()
            sample.append(draw.integers(150_000, size=tokens).tolist(), log_probs, 7)
            if sample.index % 2:
                sample.status, sample.reward, sample.response = (
                    SampleStatus.COMPLETED,
                    random.random(),
                    "x" * tokens * 4,
                )
        groups.append(group)
    ledger = PromptLedger()
    ledger.hand_out(groups)
    ledger.interrupt(range(len(groups)))
    return ledger


def to_disk(path: Path, content: bytes) -> int:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return len(content)


def save_arrays(ledger: PromptLedger, folder: Path) -> int:
    state = ledger.state_dict(keep_partial=True)
    return to_disk(folder / SAMPLES_FILE, state.pop("samples")) + to_disk(folder / "a.json", json.dumps(state).encode())


def load_arrays(folder: Path) -> PromptLedger:
    ledger = PromptLedger()
    samples = (folder / SAMPLES_FILE).read_bytes()
    ledger.load_state_dict(json.loads((folder / "a.json").read_bytes()) | {"samples": samples})
    return ledger


def save_json(ledger: PromptLedger, folder: Path) -> int:
    def values(sample: Sample) -> dict[str, Any]:
        return {
            "index": sample.index,
            "status": sample.status.value,
            "tokens": [int(t) for t in sample.tokens],
            "log_probs": [float(p) for p in sample.log_probs],
            "versions": [int(v) for v in sample.versions],
            "loss_mask": [int(m) for m in sample.loss_mask],
            "response": sample.response,
            "reward": sample.reward,
        }

    groups = [{"text": g.prompt.text, "samples": [values(s) for s in g.samples]} for g in ledger.groups()]
    return to_disk(folder / "b.json", json.dumps(groups).encode())


def load_json(folder: Path) -> list[Sample]:
    samples = []
    for group in json.loads((folder / "b.json").read_bytes()):
        for fields in group["samples"]:
            sample = Sample(Prompt(0, 0, "a.jsonl:1", group["text"], []), fields["index"])
            sample.append(fields["tokens"], fields["log_probs"], fields["versions"], loss_mask=fields["loss_mask"])
            samples.append(sample)
    return samples


def best(action: Callable[[], Any], rounds: int) -> tuple[float, Any]:
    """Seconds of the fastest round, and what it returned."""
    seconds, result = [], None
    for _ in range(rounds):
        start = time.perf_counter()
        result = action()
        seconds.append(time.perf_counter() - start)
    return min(seconds), result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=16384, help="of each sample")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    ledger = make_ledger(args.samples, args.tokens)
    print(f"{args.samples} samples of {args.tokens} tokens: {args.samples * args.tokens / 1e6:.1f} M tokens")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        results = {}
        for kind, save, load in [("arrays", save_arrays, load_arrays), ("JSON", save_json, load_json)]:
            save_s, size = best(lambda save=save: save(ledger, folder), args.rounds)  # type: ignore[misc]
            load_s, again = best(lambda load=load: load(folder), args.rounds)  # type: ignore[misc]
            if isinstance(again, PromptLedger):
                assert [g.samples for g in again.groups()] == [g.samples for g in ledger.groups()], "exact"
            results[kind] = size, save_s, load_s
            print(f"{kind:>7}: {size / 1e6:7.1f} MB, saved in {save_s:6.2f} s, loaded in {load_s:6.2f} s")
        ratios = [b / a for a, b in zip(results["arrays"], results["JSON"], strict=True)]
        print("  ratio: {:7.1f} x  {:18.1f} x  {:17.1f} x".format(*ratios))


if __name__ == "__main__":
    main()
