"""The objective against a loop over tokens in plain Python."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from relax_train.algorithms.losses import (
    Documents,
    kl_estimate,
    metric_names,
    policy_loss,
    tis_weights,
    token_weights,
)
from relax_train.settings.algorithm import AlgorithmSettings


def columns(n: int = 40, seed: int = 0) -> dict[str, Any]:
    """Random columns of ``n`` tokens in float64, far enough apart to be clipped on both sides."""
    g = torch.Generator().manual_seed(seed)

    def normal(scale: float = 1.0) -> torch.Tensor:
        return torch.randn(n, generator=g, dtype=torch.float64) * scale

    old = -normal().abs() - 0.1
    mask = (torch.rand(n, generator=g) > 0.3).double()
    weights = mask / mask.sum()
    return {
        "log_probs": (old + normal(0.4)).requires_grad_(),
        "entropy": normal().abs().requires_grad_(),
        "weights": weights,
        "mask": mask,
        "advantages": normal(),
        "rollout_log_probs": old + normal(0.5),
        "old_log_probs": old,
        "ref_log_probs": old + normal(0.3),
    }


def reference(c: dict[str, torch.Tensor], s: AlgorithmSettings) -> tuple[float, dict[str, float]]:
    """The same loss, one token at a time."""
    loss, m = 0.0, {k: 0.0 for k in ("clip_low", "clip_high", "ratio", "gap", "gap_max", "tis_clipped", "n")}
    for i in range(len(c["mask"])):
        if c["mask"][i] == 0:
            continue
        lp, old, a = c["log_probs"][i].item(), c["old_log_probs"][i].item(), c["advantages"][i].item()
        rho = math.exp(lp - old)
        bounded = min(max(rho, 1 - s.eps_clip), 1 + (s.eps_clip_high or s.eps_clip))
        token = -min(rho * a, bounded * a)
        gap = old - c["rollout_log_probs"][i].item()
        if s.use_tis:
            token *= min(math.exp(gap), s.tis_clip)
        if s.use_kl_loss:
            r = math.exp(c["ref_log_probs"][i].item() - lp)
            kinds = {"k1": -math.log(r), "k2": math.log(r) ** 2 / 2, "k3": r - 1 - math.log(r)}
            kinds["low_var_kl"] = min(kinds["k3"], 10.0)
            token += s.kl_loss_coef * kinds[s.kl_loss_type]
        token -= s.entropy_coef * c["entropy"][i].item()
        loss += c["weights"][i].item() * token
        m["clip_low"] += rho < 1 - s.eps_clip and a < 0
        m["clip_high"] += rho > 1 + (s.eps_clip_high or s.eps_clip) and a > 0
        m["ratio"] += rho
        m["gap"] += abs(gap)
        m["gap_max"] = max(m["gap_max"], abs(gap))
        m["tis_clipped"] += gap > math.log(s.tis_clip)
        m["n"] += 1
    return loss, m


@pytest.mark.parametrize(
    "settings",
    [
        AlgorithmSettings(),
        AlgorithmSettings(eps_clip=0.1, eps_clip_high=0.28),
        AlgorithmSettings(use_tis=True, tis_clip=1.2),
        AlgorithmSettings(entropy_coef=0.05),
        *(AlgorithmSettings(use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type=k) for k in ("k1", "k2", "k3")),
        AlgorithmSettings(
            use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="low_var_kl", use_tis=True, entropy_coef=0.1
        ),
    ],
)
def test_loss_gradient_and_metrics_equal_the_loop(settings: AlgorithmSettings) -> None:
    c = columns()
    ref = c.pop("ref_log_probs")
    loss, sums = policy_loss(**c, ref_log_probs=ref if settings.use_kl_loss else None, settings=settings)
    c["ref_log_probs"] = ref
    expected, m = reference(c, settings)
    assert loss.item() == pytest.approx(expected, abs=1e-12)
    assert sums["loss"].item() == loss.item()
    assert sums["tokens"].item() == m["n"]
    assert m["clip_low"] > 0
    assert m["clip_high"] > 0
    assert sums["clip_fraction_low"].item() == m["clip_low"]
    assert sums["clip_fraction_high"].item() == m["clip_high"]
    assert sums["clip_fraction"].item() == m["clip_low"] + m["clip_high"]
    assert sums["ratio_mean"].item() == pytest.approx(m["ratio"])
    assert sums["logprob_diff_mean"].item() == pytest.approx(m["gap"])
    assert sums["logprob_diff_max"].item() == pytest.approx(m["gap_max"])
    if settings.use_tis:
        assert sums["tis_clip_fraction"].item() == m["tis_clipped"] > 0
    assert set(sums) == {*metric_names(settings), "tokens"}

    # Gradient of the loss by central differences, token by token.
    loss.backward()
    for i, name in itertools.product(range(0, 40, 3), ("log_probs", "entropy")):
        values = []
        for step in (1e-6, -1e-6):
            moved = {**c, name: c[name].detach().clone()}
            moved[name][i] += step
            values.append(reference(moved, settings)[0])
        grad = c[name].grad
        assert (0.0 if grad is None else grad[i].item()) == pytest.approx((values[0] - values[1]) / 2e-6, abs=1e-7)


def test_at_the_first_step_the_current_log_probs_are_the_old_ones() -> None:
    c = columns()
    c["old_log_probs"] = c["log_probs"].detach().clone()
    grads = []
    for old in (c["old_log_probs"], None):
        c["log_probs"].grad = None
        loss, _ = policy_loss(**{**c, "old_log_probs": old}, settings=AlgorithmSettings(use_tis=True))
        loss.backward()
        grads.append((loss.item(), c["log_probs"].grad.clone()))
    assert grads[0][0] == grads[1][0]
    assert torch.equal(grads[0][1], grads[1][1])
    # rho is 1, so this is the policy gradient: -w tis A.
    tis = tis_weights(c["old_log_probs"], c["rollout_log_probs"], 2.0)
    torch.testing.assert_close(grads[1][1], -c["weights"] * tis * c["advantages"])


def test_masked_tokens_take_no_part_whatever_they_hold() -> None:
    settings = AlgorithmSettings(use_kl_loss=True, kl_loss_coef=0.1, use_tis=True, entropy_coef=0.1)
    c = columns()
    clean, clean_sums = policy_loss(**c, settings=settings)
    clean.backward()
    clean_grad = c["log_probs"].grad.clone()
    c["log_probs"].grad = None
    off = c["mask"] == 0
    for name in ("advantages", "rollout_log_probs", "old_log_probs", "ref_log_probs"):
        c[name] = c[name].masked_fill(off, float("nan"))
    dirty, sums = policy_loss(**c, settings=settings)
    dirty.backward()
    assert dirty.item() == clean.item()
    assert all(torch.equal(sums[k], clean_sums[k]) for k in sums)
    assert torch.equal(c["log_probs"].grad, clean_grad)
    assert (clean_grad[off] == 0).all()


def test_log_probs_that_are_far_apart_give_a_finite_loss() -> None:
    c = columns()
    c["log_probs"] = (c["old_log_probs"] + 500).requires_grad_()
    settings = AlgorithmSettings(use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="low_var_kl", use_tis=True)
    loss, sums = policy_loss(**c, settings=settings)
    loss.backward()
    assert loss.isfinite()
    assert c["log_probs"].grad.isfinite().all()
    assert all(v.isfinite() for v in sums.values())


def test_estimators_agree_with_the_true_divergence_in_the_mean() -> None:
    g = torch.Generator().manual_seed(1)
    p, q = (torch.randn(6, generator=g, dtype=torch.float64).log_softmax(0) for _ in "pq")
    true = (p.exp() * (p - q)).sum().item()
    for kind in ("k1", "k3", "low_var_kl"):
        assert (p.exp() * kl_estimate(p, q, kind)).sum().item() == pytest.approx(true, abs=1e-12)
    assert (kl_estimate(p, q, "k3") >= 0).all()
    huge = kl_estimate(torch.tensor([-50.0]), torch.tensor([0.0]), "low_var_kl")
    assert huge.item() == 10.0


def test_weights_of_a_step_add_up_to_one() -> None:
    masks = [np.array(m, dtype=np.float32) for m in ([1, 1, 0, 1], [0, 0], [1])]
    per_token = token_weights(masks, per_token=True)
    np.testing.assert_allclose(np.concatenate(per_token), np.array([1, 1, 0, 1, 0, 0, 1]) / 4)
    per_sample = token_weights(masks, per_token=False)
    np.testing.assert_allclose(np.concatenate(per_sample), np.array([1 / 3, 1 / 3, 0, 1 / 3, 0, 0, 1]) / 2)
    assert not np.concatenate(token_weights([np.zeros(3)], per_token=False)).any()


# ---------------------------------------------------------------------- cispo


def test_cispo_by_hand() -> None:
    """Three tokens with ratios 2, 1 and 1/4, clipped to 1.3, 1 and 0.6; the fourth is masked."""
    old = torch.tensor([-1.0, -2.0, -0.5, -3.0], dtype=torch.float64)
    log_probs: Any = (old + torch.tensor([2.0, 1.0, 0.25, 5.0], dtype=torch.float64).log()).requires_grad_()
    column = {
        "weights": [0.5, 0.25, 0.25, 0.0],
        "mask": [1.0, 1.0, 1.0, 0.0],
        "advantages": [1.0, -2.0, -1.0, 9.0],
        "rollout_log_probs": old.tolist(),
    }
    tensors: dict[str, Any] = {name: torch.tensor(values, dtype=torch.float64) for name, values in column.items()}
    settings = AlgorithmSettings(loss_type="cispo", eps_clip=0.4, eps_clip_high=0.3)
    loss, sums = policy_loss(log_probs, torch.zeros(4), old_log_probs=old, settings=settings, **tensors)
    first, third = -1 + math.log(2), -0.5 - math.log(4)
    expected = -(0.5 * 1.3 * 1 * first + 0.25 * 1 * -2 * -2 + 0.25 * 0.6 * -1 * third)
    assert loss.item() == pytest.approx(expected, abs=1e-12)
    loss.backward()
    # The clip function has no gradient at the first and the third token; cispo keeps theirs.
    np.testing.assert_allclose(log_probs.grad, [-0.5 * 1.3, 0.25 * 2, 0.25 * 0.6, 0], atol=1e-15)
    assert [sums[f"clip_fraction{end}"].item() for end in ("", "_low", "_high")] == [2, 1, 1]


@pytest.mark.parametrize("use_tis", [False, True])
def test_cispo_on_random_tokens(use_tis: bool) -> None:
    settings = AlgorithmSettings(loss_type="cispo", eps_clip=0.1, eps_clip_high=0.28, use_tis=use_tis, tis_clip=1.2)
    c = columns()
    loss, sums = policy_loss(**c, settings=settings)
    loss.backward()
    weight, value = [], 0.0
    for i in range(40):
        lp, old, w = c["log_probs"][i].item(), c["old_log_probs"][i].item(), c["weights"][i].item()
        factor = w * c["advantages"][i].item() * min(max(math.exp(lp - old), 0.9), 1.28)
        if use_tis:
            factor *= min(math.exp(old - c["rollout_log_probs"][i].item()), 1.2)
        weight.append(-factor)
        value -= factor * lp
    assert loss.item() == pytest.approx(value, abs=1e-12)
    np.testing.assert_allclose(c["log_probs"].grad, weight, atol=1e-12)
    rho = (c["log_probs"] - c["old_log_probs"]).exp()
    clipped = ((rho < 0.9) | (rho > 1.28)) & (c["mask"] > 0)
    assert sums["clip_fraction"].item() == clipped.sum() > 10
    assert (c["log_probs"].grad[clipped] != 0).all()


@pytest.mark.parametrize("loss_type", ["clip", "cispo"])
def test_at_the_first_step_both_losses_have_the_gradient_of_the_policy(loss_type: str) -> None:
    c = columns()
    c["old_log_probs"] = None
    loss, _ = policy_loss(**c, settings=AlgorithmSettings(loss_type=loss_type))
    loss.backward()
    torch.testing.assert_close(c["log_probs"].grad, -c["weights"] * c["advantages"])


# ---------------------------------------------------------------------- gspo

LENGTHS = [9, 1, 14, 6, 10]
"""Tokens of the documents of :func:`columns`; the last one is not trained at all."""


def response_columns(per_token: bool = False) -> tuple[dict[str, Any], Documents]:
    """Columns of five responses with one advantage each, whose ratios lie on both sides of a narrow range."""
    c = columns()
    index = torch.repeat_interleave(torch.arange(5), torch.tensor(LENGTHS))
    c["mask"][9] = 1
    c["mask"][index == 4] = 0
    c["advantages"] = torch.tensor([1.0, -0.5, -2.0, 0.7, 3.0], dtype=torch.float64)[index]
    masks = [m.numpy() for m in c["mask"].split(LENGTHS)]
    c["weights"] = torch.from_numpy(np.concatenate(token_weights(masks, per_token=per_token)))
    return c, Documents(index, 5)


def gspo_settings(**changes: Any) -> AlgorithmSettings:
    return AlgorithmSettings(**{"advantage_estimator": "gspo", "eps_clip": 0.05, "eps_clip_high": 0.06, **changes})


def test_the_ratio_of_a_response_by_hand() -> None:
    """Two responses: log-ratios 0.2 and -0.6 (one more is masked), mean -0.2; and 0.3."""
    old = torch.full((4,), -1.0, dtype=torch.float64)
    log_probs: Any = (old + torch.tensor([0.2, -0.6, 5.0, 0.3], dtype=torch.float64)).requires_grad_()
    column = {
        "weights": [0.25, 0.25, 0.0, 0.5],
        "mask": [1.0, 1.0, 0.0, 1.0],
        "advantages": [2.0, 2.0, 2.0, 1.0],
        "rollout_log_probs": [-1.0] * 4,
    }
    tensors: dict[str, Any] = {name: torch.tensor(values, dtype=torch.float64) for name, values in column.items()}
    documents = Documents(torch.tensor([0, 0, 0, 1]), 2)
    loss, sums = policy_loss(
        log_probs, torch.zeros(4), old_log_probs=old, documents=documents, settings=gspo_settings(), **tensors
    )
    # s = exp(-0.2) is below 0.95 but its advantage pulls up, so it is not clipped; exp(0.3) is clipped to 1.06.
    assert loss.item() == pytest.approx(-(math.exp(-0.2) * 2 + 1.06) / 2, abs=1e-12)
    loss.backward()
    np.testing.assert_allclose(log_probs.grad, [-0.25 * math.exp(-0.2) * 2] * 2 + [0, 0], atol=1e-15)
    assert sums["clip_fraction_high"].item() == 1
    assert sums["ratio_mean"].item() == pytest.approx(2 * math.exp(-0.2) + math.exp(0.3))


@pytest.mark.parametrize("per_token", [False, True])
def test_gspo_has_the_value_and_the_gradient_of_the_sequence_objective(per_token: bool) -> None:
    """GSPO equation 5 with autograd through the whole mean, which the code does not need."""
    c, documents = response_columns(per_token)
    loss, sums = policy_loss(**c, documents=documents, settings=gspo_settings())
    loss.backward()
    got = c["log_probs"].grad.clone()
    c["log_probs"].grad = None

    total, clipped = torch.zeros((), dtype=torch.float64), 0
    names = ("log_probs", "old_log_probs", "mask", "weights", "advantages")
    for lp, old, mask, weights, advantages in zip(*(c[n].split(LENGTHS) for n in names), strict=True):
        if mask.sum() == 0:
            continue
        s, a = (((lp - old) * mask).sum() / mask.sum()).exp(), advantages[0]
        total = total - weights.sum() * torch.minimum(s * a, s.clamp(0.95, 1.06) * a)
        clipped += int(mask.sum()) * bool((s < 0.95 and a < 0) or (s > 1.06 and a > 0))
    total.backward()
    assert loss.item() == pytest.approx(total.item(), abs=1e-12)
    torch.testing.assert_close(got, c["log_probs"].grad, rtol=0, atol=1e-12)
    assert sums["clip_fraction"].item() == clipped
    assert 0 < clipped < c["mask"].sum()
    assert got.abs().max() > 1e-3


def test_gspo_with_importance_sampling_weights_each_token() -> None:
    c, documents = response_columns()
    settings = gspo_settings(use_tis=True, tis_clip=1.2, eps_clip=0.9, eps_clip_high=9.0)
    loss, _ = policy_loss(**c, documents=documents, settings=settings)
    loss.backward()
    tis = tis_weights(c["old_log_probs"], c["rollout_log_probs"], 1.2)
    s = documents.mean(c["log_probs"] - c["old_log_probs"], c["mask"]).exp()
    torch.testing.assert_close(c["log_probs"].grad, -c["weights"] * tis * s * c["advantages"], rtol=0, atol=1e-12)
    assert loss.item() == pytest.approx(-(c["weights"] * tis * s * c["advantages"]).sum().item(), abs=1e-12)


@pytest.mark.parametrize("settings", [gspo_settings(), AlgorithmSettings(loss_type="cispo")])
def test_masked_tokens_take_no_part_in_the_other_losses_either(settings: AlgorithmSettings) -> None:
    c, documents = response_columns()
    results = []
    for _ in range(2):
        c["log_probs"].grad = None
        loss, sums = policy_loss(**c, documents=documents, settings=settings)
        loss.backward()
        results.append((loss.item(), {k: v.item() for k, v in sums.items()}, c["log_probs"].grad.clone()))
        off = c["mask"] == 0
        for name in ("advantages", "rollout_log_probs", "old_log_probs", "ref_log_probs"):
            c[name] = c[name].masked_fill(off, float("nan"))
    assert results[0][:2] == results[1][:2]
    assert torch.equal(results[0][2], results[1][2])
    assert (results[0][2][off] == 0).all()


def test_the_ratio_of_a_response_is_finite_and_exact_in_float32() -> None:
    """A response of 20,000 tokens that moved by 3e-4 each: float32 sums would be off by more than the clip range."""
    n = 20_000
    old = -torch.rand(n, generator=torch.Generator().manual_seed(0)) * 8
    documents = Documents(torch.zeros(n, dtype=torch.int64), 1)
    mean = documents.mean((old + 3e-4) - old, torch.ones(n))
    assert mean[0].item() == pytest.approx(3e-4, abs=2e-7)
    far = columns(n=40)
    far["log_probs"] = (far["old_log_probs"] + 500).requires_grad_()
    loss, _ = policy_loss(**far, documents=Documents(torch.zeros(40, dtype=torch.int64), 1), settings=gspo_settings())
    loss.backward()
    assert loss.isfinite()
    assert far["log_probs"].grad.isfinite().all()


@pytest.mark.parametrize("column", sorted(columns(2)))
def test_columns_of_different_shapes_are_refused(column: str) -> None:
    """A single value would be spread over all tokens, and would count as often as there are tokens."""
    given = columns()
    given[column] = given[column][:1]
    log_probs, entropy = given.pop("log_probs"), given.pop("entropy")
    with pytest.raises(ValueError, match="one shape"):
        policy_loss(log_probs, entropy, settings=AlgorithmSettings(), **given)
