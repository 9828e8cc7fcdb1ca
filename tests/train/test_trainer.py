"""The trainer, on one rank and on several, against GRPO written out with transformers and plain torch."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from relax_data.types import TrainBatch
from relax_train import settings as s
from relax_train.models.hf_mapping import SafetensorsFolder

TEMPERATURE = 0.7
ADAM: dict[str, Any] = {"lr": 2e-3, "adam_beta2": 0.95, "adam_eps": 1e-3, "weight_decay": 0.1, "clip_grad": 0.5}
PLAIN: dict[str, Any] = {"algorithm": {}, "batch": {}}
EVERYTHING: dict[str, Any] = {
    "algorithm": {
        "eps_clip": 0.02,
        "eps_clip_high": 0.05,
        "use_kl_loss": True,
        "kl_loss_coef": 0.2,
        "kl_loss_type": "k3",
        "kl_coef": 0.05,
        "entropy_coef": 0.01,
        "use_tis": True,
        "tis_clip": 1.1,
        "calculate_per_token_loss": True,
        "normalize_advantages": True,
    },
    "batch": {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 48, "num_steps_per_rollout": 2},
}
GSPO: dict[str, Any] = {
    "algorithm": {
        "advantage_estimator": "gspo",
        "eps_clip": 0.004,
        "eps_clip_high": 0.005,
        "use_kl_loss": True,
        "kl_loss_coef": 0.2,
        "kl_coef": 0.2,
    },
    "batch": EVERYTHING["batch"],
}
CISPO: dict[str, Any] = {
    "algorithm": {
        **EVERYTHING["algorithm"],
        "advantage_estimator": "reinforce_plus_plus",
        "loss_type": "cispo",
        "normalize_advantages": False,
    },
    "batch": EVERYTHING["batch"],
}
FLAGS = {"plain": PLAIN, "everything": EVERYTHING, "experts": EVERYTHING, "gspo": GSPO, "cispo": CISPO}
RunRanks = Callable[..., list[Any]]


def make_batch(rollout_id: int, vocab: int = 96, n: int = 8) -> TrainBatch:
    rng = np.random.default_rng(rollout_id)
    prompts, responses = rng.integers(2, 9, n), rng.integers(1, 15, n)
    masks = [(rng.random(r) > 0.2).astype(np.float32) for r in responses]
    for m in masks[:-1]:
        m[0] = 1
    masks[-1][:] = 0  # a sample that trains nothing
    return TrainBatch(
        rollout_id=rollout_id,
        tokens=[rng.integers(0, vocab, p + r) for p, r in zip(prompts, responses, strict=True)],
        response_lengths=responses,
        loss_masks=masks,
        rollout_log_probs=[(-rng.random(r) * 0.2 - 3.3).astype(np.float32) for r in responses],
        rewards=rng.random(n).astype(np.float32),
        group_ids=np.arange(n) // 4,
        oldest_versions=np.full(n, rollout_id - 1),
        names=[f"row:{i}" for i in range(n)],
    )


def make_settings(folder: str, ref: str | None, flags: dict[str, Any], **parallel: Any) -> s.TrainSettings:
    return s.TrainSettings(
        model=s.ModelSettings(hf_checkpoint=folder, ref_load=ref, bf16=False),
        parallel=s.ParallelSettings(**parallel),
        algorithm=s.AlgorithmSettings(**flags["algorithm"]),
        optimizer=s.OptimizerSettings(**ADAM),
        batch=s.BatchSettings(**flags["batch"]),
    )


@dataclasses.dataclass
class Trace:
    """What two rollouts made of the weights."""

    log_probs: list[np.ndarray]
    metrics: list[dict[str, float]]
    weights: dict[str, torch.Tensor]


def run_trainer(settings: s.TrainSettings) -> Trace:
    """Two rollouts on this rank."""
    from relax_train.trainer import Trainer

    trainer = Trainer(settings, temperature=TEMPERATURE)
    trainer.setup()
    try:
        log_probs = trainer.log_probs(make_batch(0))
        metrics = [trainer.train(make_batch(i), version=i) for i in range(2)]
        weights = {n: t.clone() for bucket in trainer.weight_buckets(1 << 20) for n, t in bucket.items()}
    finally:
        trainer.close()
    return Trace(log_probs, metrics, weights)


class Oracle:
    """GRPO without batching, packing or parallelism: one sample after the other, transformers' model."""

    def __init__(self, settings: s.TrainSettings) -> None:
        from transformers import AutoModelForCausalLM

        self.settings = settings
        self.model = AutoModelForCausalLM.from_pretrained(settings.model.hf_checkpoint)
        self.ref = AutoModelForCausalLM.from_pretrained(settings.model.ref_load or settings.model.hf_checkpoint)
        matrices = [p for p in self.model.parameters() if p.dim() > 1]
        vectors = [p for p in self.model.parameters() if p.dim() == 1]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
            lr=ADAM["lr"],
            betas=(0.9, ADAM["adam_beta2"]),
            eps=ADAM["adam_eps"],
        )

    def sample(self, batch: TrainBatch, i: int, model: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs and entropies of the response tokens."""
        tokens, r = torch.from_numpy(batch.tokens[i]), int(batch.response_lengths[i])
        logits = (model or self.model)(input_ids=tokens[None]).logits[0, -r - 1 : -1] / TEMPERATURE
        log_p = logits.log_softmax(-1)
        return log_p.gather(1, tokens[-r:, None]).squeeze(1), -(log_p.exp() * log_p).sum(-1)

    def advantages(self, batch: TrainBatch, kl: list[torch.Tensor]) -> list[torch.Tensor]:
        """Per response token, from its masked divergence from the reference."""
        a = self.settings.algorithm
        rewards = torch.tensor(batch.rewards, dtype=torch.float64)
        if a.advantage_estimator == "reinforce_plus_plus":
            rows = [r - a.kl_coef * k.flip(0).cumsum(0).flip(0) for r, k in zip(rewards, kl, strict=True)]
            tokens = torch.cat([row[torch.from_numpy(m) > 0] for row, m in zip(rows, batch.loss_masks, strict=True)])
            return [(row - tokens.mean()) / (tokens.std(unbiased=False) + 1e-6) for row in rows]
        rewards = rewards - a.kl_coef * torch.tensor([k.sum().item() for k in kl])
        groups = rewards.view(-1, 4)
        result = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)).flatten()
        if a.normalize_advantages:
            tokens = torch.cat([x.expand(int(m.sum())) for x, m in zip(result, batch.loss_masks, strict=True)])
            result = (result - tokens.mean()) / (tokens.std(unbiased=False) + 1e-6)
        return [x.expand(len(k)) for x, k in zip(result, kl, strict=True)]

    def objective(self, lp: torch.Tensor, old: torch.Tensor, adv: torch.Tensor, mask: torch.Tensor) -> Any:
        """What each token adds, and which are clipped; of GSPO the objective of the response itself, equation 5."""
        a = self.settings.algorithm
        low, high = 1 - a.eps_clip, 1 + (a.eps_clip_high or a.eps_clip)
        ratio = (lp - old).exp()
        if a.advantage_estimator == "gspo":
            ratio = (((lp - old) * mask).sum() / mask.sum()).exp().expand(len(mask))
        if a.loss_type == "cispo":
            return ratio.detach().clamp(low, high) * adv * lp, (ratio < low) | (ratio > high)
        clipped = ((ratio > high) & (adv > 0)) | ((ratio < low) & (adv < 0))
        return torch.minimum(ratio * adv, ratio.clamp(low, high) * adv), clipped

    def train(self, batch: TrainBatch) -> dict[str, float]:
        n, a = len(batch), self.settings.algorithm
        masks = [torch.from_numpy(m) for m in batch.loss_masks]
        with torch.no_grad():
            old = [self.sample(batch, i)[0] for i in range(n)]
            ref = [self.sample(batch, i, self.ref)[0] for i in range(n)]
        kl = [((o - f) * m).double() for o, f, m in zip(old, ref, masks, strict=True)]
        advantages = self.advantages(batch, kl)
        steps = self.settings.batch.num_steps_per_rollout or 1
        sums = {"loss": 0.0, "grad_norm": 0.0, "kl_ref": 0.0, "clip_fraction": 0.0}
        for step in range(steps):
            samples = range(step * n // steps, (step + 1) * n // steps)
            tokens = torch.stack([masks[i].sum() for i in samples]).sum()
            trained = sum(bool(masks[i].any()) for i in samples)
            self.optimizer.zero_grad()
            for i in samples:
                if not masks[i].any():
                    continue
                lp, entropy = self.sample(batch, i)
                objective, clipped = self.objective(lp, old[i], advantages[i], masks[i])
                if a.use_tis:
                    rollout = torch.from_numpy(batch.rollout_log_probs[i])
                    objective = objective * (old[i] - rollout).exp().clamp(max=a.tis_clip)
                r = (ref[i] - lp).exp()
                k3 = r - 1 - (ref[i] - lp)
                per_token = -objective + (a.kl_loss_coef if a.use_kl_loss else 0.0) * k3 - a.entropy_coef * entropy
                scale = tokens if a.calculate_per_token_loss else masks[i].sum() * trained
                loss = (per_token * masks[i]).sum() / scale
                loss.backward()
                sums["loss"] += loss.item() / steps
                sums["kl_ref"] += (k3 * masks[i]).sum().item() / tokens.item() / steps
                sums["clip_fraction"] += (clipped * masks[i]).sum().item() / tokens.item() / steps
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), ADAM["clip_grad"])
            sums["grad_norm"] += norm.item() / steps
            self.optimizer.step()
        return sums


@pytest.fixture(scope="session")
def oracle(reference: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[s.TrainSettings, Trace]]:
    """Settings and the trace that they must give, made once for each of :data:`FLAGS`."""
    made: dict[str, tuple[s.TrainSettings, Trace]] = {}

    def get(kind: str) -> tuple[s.TrainSettings, Trace]:
        if kind not in made:
            models = reference("qwen3_moe" if kind == "experts" else "qwen3")
            settings = make_settings(str(models.folder), None if kind == "plain" else str(models.after), FLAGS[kind])
            truth = Oracle(settings)
            with torch.no_grad():
                log_probs = [truth.sample(make_batch(0), i)[0].numpy() for i in range(8)]
            metrics = [truth.train(make_batch(i)) for i in range(2)]
            folder = tmp_path_factory.mktemp(kind)
            truth.model.save_pretrained(folder)  # gives experts the names of the file, which are not those in memory
            stored = SafetensorsFolder(str(folder))
            weights = {n: stored.read(n) for n in stored.names()}
            made[kind] = settings, Trace(log_probs, metrics, weights)
        return made[kind]

    return get


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "DP2": (2, {}),
    "TP2": (2, {"tensor_model_parallel_size": 2}),
    "TP2+SP": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "CP2": (2, {"context_parallel_size": 2}),
    "PP2": (2, {"pipeline_model_parallel_size": 2}),
    "TP2+SP x PP2": (
        4,
        {"tensor_model_parallel_size": 2, "sequence_parallel": True, "pipeline_model_parallel_size": 2},
    ),
    "CP2 x DP2": (4, {"context_parallel_size": 2}),
    "EP2": (2, {"expert_model_parallel_size": 2}),
    "TP2+SP x EP2": (
        4,
        {"tensor_model_parallel_size": 2, "sequence_parallel": True, "expert_model_parallel_size": 2},
    ),
    "PP2 x EP2": (4, {"pipeline_model_parallel_size": 2, "expert_model_parallel_size": 2}),
}
WITHOUT_EXPERTS = [layout for layout in LAYOUTS if "EP2" not in layout]
WITH_EXPERTS = ["one rank", "EP2", "TP2+SP x EP2", "PP2 x EP2"]


CASES = [
    *(("plain", layout) for layout in ("one rank", "DP2", "PP2")),
    *(("everything", layout) for layout in WITHOUT_EXPERTS),
    *(("experts", layout) for layout in WITH_EXPERTS),
    *(("gspo", layout) for layout in ("one rank", "CP2", "CP2 x DP2", "TP2+SP x PP2")),
    *(("cispo", layout) for layout in ("one rank", "CP2 x DP2")),
]


@pytest.mark.parametrize(
    # Two ranks show each kind of parallelism alone; the slow ones show two kinds together.
    ("kind", "layout"),
    [pytest.param(*case, marks=[pytest.mark.slow] * (LAYOUTS[case[1]][0] > 2)) for case in CASES],
)
def test_log_probs_losses_and_weights_equal_the_oracle(
    oracle: Callable[[str], tuple[s.TrainSettings, Trace]], run_ranks: RunRanks, kind: str, layout: str
) -> None:
    settings, expected = oracle(kind)
    world, parallel = LAYOUTS[layout]
    settings = dataclasses.replace(settings, parallel=s.ParallelSettings(**parallel))
    traces: list[Trace] = run_ranks(run_trainer, world, settings)
    for trace in traces:
        for got, want in zip(trace.log_probs, expected.log_probs, strict=True):
            assert got.dtype == np.float32
            np.testing.assert_allclose(got, want, atol=1e-5)
        for step, want_metrics in zip(trace.metrics, expected.metrics, strict=True):
            for name in ("loss", "grad_norm", "clip_fraction"):
                assert step[f"train/{name}"] == pytest.approx(want_metrics[name], abs=1e-5), name
            if kind != "plain":
                assert step["train/kl_ref"] == pytest.approx(want_metrics["kl_ref"], abs=1e-5)
            assert step["staleness/max"] == 1
        assert trace.weights.keys() == expected.weights.keys()
        for name, want_tensor in expected.weights.items():
            torch.testing.assert_close(trace.weights[name], want_tensor, rtol=0, atol=1e-5, msg=name)
    if kind != "plain":
        assert expected.metrics[0]["clip_fraction"] > 0


def test_the_weights_have_moved(oracle: Callable[[str], tuple[s.TrainSettings, Trace]], reference: Any) -> None:
    """Guards the test above: both oracles change the weights by far more than its tolerance."""
    from transformers import Qwen3ForCausalLM

    start = Qwen3ForCausalLM.from_pretrained(reference("qwen3").folder).state_dict()
    for kind in ("plain", "everything"):  # of one model
        moved = [(start[n] - w).abs().max().item() for n, w in oracle(kind)[1].weights.items()]
        assert min(moved) > 1e-4


OWN_RLOO = """
import numpy as np

def rloo(inputs):
    found = []
    for i, mask in zip(inputs.own, inputs.masks):
        others = inputs.rewards[(inputs.group_ids == inputs.group_ids[i]) & (np.arange(len(inputs.rewards)) != i)]
        found.append(np.full(len(mask), inputs.rewards[i] - others.mean()))
    return found
"""


def test_a_function_of_the_user_trains_as_the_same_one_of_the_table(
    reference: Any, run_ranks: RunRanks, tmp_path: Path
) -> None:
    (tmp_path / "own_rloo.py").write_text(OWN_RLOO)
    folder = str(reference("qwen3").folder)
    traces = []
    for name in ("rloo", f"{tmp_path}/own_rloo.py:rloo", "grpo"):
        settings = make_settings(folder, None, {"algorithm": {"advantage_estimator": name}, "batch": {}})
        traces.append(run_ranks(run_trainer, 2, settings))
    for table, own, other in zip(*traces, strict=True):
        for weight, tensor in table.weights.items():
            torch.testing.assert_close(own.weights[weight], tensor, rtol=0, atol=1e-6)
        assert max((other.weights[n] - t).abs().max().item() for n, t in table.weights.items()) > 1e-5


def _straight(settings: s.TrainSettings) -> dict[str, torch.Tensor]:
    from relax_train.trainer import Trainer

    trainer = Trainer(settings, temperature=TEMPERATURE)
    trainer.setup()
    for i in range(4):
        trainer.train(make_batch(i), version=i)
    weights = {n: t.clone() for bucket in trainer.weight_buckets(1 << 20) for n, t in bucket.items()}
    trainer.close()
    return weights


def _until_saved(settings: s.TrainSettings, folder: str) -> Any:
    from relax_train.trainer import Trainer

    trainer = Trainer(settings, temperature=TEMPERATURE)
    trainer.setup()
    nothing = trainer.load(folder)
    for i in range(2):
        trainer.train(make_batch(i), version=i)
    trainer.save(folder, 1, {"cursor": [3, "x"]})
    trainer.train(make_batch(7), version=2)  # what comes after the checkpoint is lost
    trainer.close()
    return nothing


def _resumed(settings: s.TrainSettings, folder: str) -> tuple[Any, dict[str, torch.Tensor], list[float]]:
    from relax_train.trainer import Trainer

    trainer = Trainer(settings, temperature=TEMPERATURE)
    trainer.setup()
    loaded = trainer.load(folder)
    metrics = [trainer.train(make_batch(i), version=i) for i in range(2, 4)]
    weights = {n: t.clone() for bucket in trainer.weight_buckets(1 << 20) for n, t in bucket.items()}
    trainer.save_hf(f"{folder}/hf/last")
    trainer.close()
    return loaded, weights, [m["train/lr"] for m in metrics]


@pytest.mark.parametrize(
    # What a checkpoint holds under each layout is in test_checkpoint_resume.py.
    "layout",
    ["DP2", *(pytest.param(layout, marks=pytest.mark.slow) for layout in ("one rank", "TP2+SP"))],
)
def test_a_resumed_run_ends_with_the_weights_of_a_straight_one(
    oracle: Callable[[str], tuple[s.TrainSettings, Trace]], run_ranks: RunRanks, tmp_path: Path, layout: str
) -> None:
    from transformers import Qwen3ForCausalLM

    settings, _ = oracle("everything")
    world, parallel = LAYOUTS[layout]
    schedule = dataclasses.replace(settings.optimizer, lr_decay_style="linear", lr_decay_iters=8, lr_warmup_iters=2)
    settings = dataclasses.replace(settings, parallel=s.ParallelSettings(**parallel), optimizer=schedule)
    folder = str(tmp_path / "checkpoints")
    expected = run_ranks(_straight, world, settings)[0]
    assert run_ranks(_until_saved, world, settings, folder) == [None] * world
    for loaded, weights, rates in run_ranks(_resumed, world, settings, folder):
        assert (loaded.rollout_id, loaded.extra) == (1, {"cursor": [3, "x"]})
        assert loaded.folder == tmp_path / "checkpoints" / "rollout_1"
        assert rates == pytest.approx([ADAM["lr"] * 3 / 6, ADAM["lr"] * 1 / 6])  # steps 5 and 7 of 2 + 6
        for name, tensor in expected.items():
            assert torch.equal(weights[name], tensor), name
    exported = Qwen3ForCausalLM.from_pretrained(f"{folder}/hf/last").state_dict()
    for name, tensor in expected.items():
        assert torch.equal(exported[name], tensor), name
