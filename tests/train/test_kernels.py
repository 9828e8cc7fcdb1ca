"""The Triton kernels against plain torch, on a CPU in Triton's interpreter and on a GPU as they are."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


def check_all() -> None:
    """Compares every kernel with torch in float64; raises where they differ."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    for dtype, tolerance in ((torch.float32, 2e-5), (torch.bfloat16, 2e-2)):
        _softmax(device, dtype, tolerance)
        for weighted in (False, True):
            _swiglu(device, dtype, tolerance, weighted)
        for norm, groups, per_group, dim in ((True, 2, 3, 16), (False, 1, 1, 32)):
            _qkv(device, dtype, tolerance, norm, (groups, per_group, dim))


def close(name, got, expected, tolerance):  # type: ignore[no-untyped-def]
    error = (got.double() - expected.double()).abs().max() / expected.double().abs().max().clamp(min=1e-3)
    assert error < tolerance, f"{name}: {error:.1e}"


def _softmax(device, dtype, tolerance):  # type: ignore[no-untyped-def]
    import torch
    from relax_train.kernels import softmax

    logits = (torch.randn(3, 5000, device=device) * 4).to(dtype)
    logits[1, 100:4500] = -torch.inf
    width, temperature = 4990, 0.7
    labels = torch.tensor([4, -1, 4989], device=device)
    g, h = torch.tensor([0.5, -1.0, 2.0], device=device), torch.tensor([0.3, 0.1, -0.2], device=device)
    wide = logits[:, :width].double().requires_grad_()
    log_p = (wide / temperature).log_softmax(1).clamp_min(-1e4)
    entropy = -(log_p.exp() * log_p).sum(1)
    here = labels >= 0
    chosen = log_p.gather(1, labels.clamp(min=0)[:, None]).squeeze(1)
    z = (wide / temperature).logsumexp(1)
    # Where the label lies elsewhere the log-prob is -z plus a constant of another rank.
    ((torch.where(here, chosen, -z) * g).sum() + (entropy * h).sum()).backward()
    got_z, p_log_p = softmax.statistics(logits, width, temperature)
    close("log sum exp", got_z, z.detach(), 1e-5)
    close("entropy", -p_log_p, entropy.detach(), 1e-4)
    out = logits.clone()
    softmax.write_gradient(
        out, out, labels, got_z, g, width=width, temperature=temperature, entropy=-p_log_p, grad_entropy=h
    )
    assert wide.grad is not None
    close("gradient of logits", out[:, :width], wide.grad, tolerance)
    assert (out[:, width:] == 0).all()


def _swiglu(device, dtype, tolerance, weighted):  # type: ignore[no-untyped-def]
    import torch
    from relax_train.kernels import swiglu

    up = torch.randn(5, 2 * 48, device=device).to(dtype)
    weights = torch.rand(5, device=device) if weighted else None
    grad = torch.randn(5, 48, device=device).to(dtype)
    wide = up.double().requires_grad_()
    wide_weights = torch.ones(5, device=device).double() if weights is None else weights.double()
    wide_weights.requires_grad_()
    gate, linear = wide.chunk(2, -1)
    out = torch.nn.functional.silu(gate) * linear * wide_weights[:, None]
    out.backward(grad.double())
    close("swiglu", swiglu.forward(up, weights), out.detach(), tolerance)
    grad_up, grad_weights = swiglu.backward(grad, up, weights)
    close("gradient of swiglu", grad_up, wide.grad, tolerance)
    if weighted:
        close("gradient of the weights of swiglu", grad_weights, wide_weights.grad, tolerance)


def _qkv(device, dtype, tolerance, norm, sizes):  # type: ignore[no-untyped-def]
    import torch
    from relax_train.kernels import qkv
    from relax_train.models.rotary import rotate

    groups, per_group, dim = sizes
    tokens, eps = 37, 1e-6
    mixed = torch.randn(tokens, groups * (per_group + 2) * dim, device=device).to(dtype)
    angles = torch.rand(tokens, dim // 2, device=device) * 6
    angles = torch.cat([angles, angles], -1)
    tables = angles.cos(), angles.sin()
    norms = (torch.rand(dim, device=device).to(dtype), torch.rand(dim, device=device).to(dtype)) if norm else None
    wide = mixed.double().requires_grad_()
    wide_norms = [w.double().requires_grad_() for w in norms or ()]
    parts = wide.view(tokens, groups, per_group + 2, dim)
    q, k, v = parts[:, :, :per_group].reshape(tokens, -1, dim), parts[:, :, per_group], parts[:, :, -1]
    if norm:
        q, k = (torch.nn.functional.rms_norm(x, (dim,), w, eps) for x, w in zip((q, k), wide_norms, strict=True))
    q, k = (rotate(x, *(t.double()[:, None] for t in tables)) for x in (q, k))
    expected = q, k, v
    grads = tuple(torch.randn(x.shape, device=device).to(dtype) for x in expected)
    torch.autograd.backward(expected, [g.double() for g in grads])
    for name, got, want in zip("qkv", qkv.forward(mixed, tables, norms, eps, groups), expected, strict=True):
        close(name, got, want.detach(), tolerance)
    grad_mixed, grad_norms = qkv.backward(mixed, grads, tables, norms, eps, groups)
    close("gradient of the projection", grad_mixed, wide.grad, tolerance)
    for got, weight in zip(grad_norms or (), wide_norms, strict=True):
        close("gradient of a norm", got, weight.grad, tolerance)


@pytest.mark.slow
def test_kernels_agree_with_torch() -> None:
    pytest.importorskip("triton")
    import torch

    if torch.cuda.is_available():
        check_all()
        return
    # The interpreter is chosen while triton is imported, so that it takes a process of its own.
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(Path(__file__))], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]


if __name__ == "__main__":
    check_all()
