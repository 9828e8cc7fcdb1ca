"""Checks of the Triton kernels: against plain torch, and small models with them against the same models without.

TRITON_INTERPRET=1 python tests/train/kernel_checks.py      on a CPU, in Triton's interpreter
python tests/train/kernel_checks.py                         on a GPU
"""

import math
import os
import socket
from typing import Any


def check_all() -> None:
    """Compares every kernel with torch in float64; raises where they differ."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    for dtype, tolerance in ((torch.float32, 2e-5), (torch.bfloat16, 2e-2)):
        _softmax(device, dtype, tolerance)
        for weighted in (False, True):
            _swiglu(device, dtype, tolerance, weighted)
        for adds in (False, True):
            _norm(device, dtype, tolerance, adds)
        _sums(device, dtype, tolerance)
        sizes = [(True, 2, 3, 16), (False, 1, 1, 32)] + [(True, 8, 4, 128), (False, 4, 7, 64)] * (device == "cuda")
        for norm, groups, per_group, dim in sizes:
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
        return
    inner, again = grad.clone(), up.clone()
    swiglu.exchange(inner, again)
    close("swiglu made again", inner, out.detach(), tolerance)
    close("gradient of swiglu in place", again, wide.grad, tolerance)


def _norm(device, dtype, tolerance, adds):  # type: ignore[no-untyped-def]
    import torch
    from relax_train.kernels import norm

    rows, size, eps = 7, 80, 1e-6
    norm.PROGRAMS = 3  # of several rows each, the last ones of fewer
    x, residual, grad_total, grad_out = (torch.randn(rows, size, device=device).to(dtype) for _ in range(4))
    weight = torch.rand(size, device=device).to(dtype)
    got_total, out, scales = norm.forward(x, residual if adds else None, weight, eps)
    total = got_total.double().requires_grad_()
    close("sum before the norm", got_total, x.double() + residual.double() if adds else x, tolerance)
    wide_weight = weight.double().requires_grad_()
    expected = torch.nn.functional.rms_norm(total, (size,), wide_weight, eps)
    torch.autograd.backward((expected, total), (grad_out.double(), grad_total.double()))
    close("norm", out, expected.detach(), tolerance)
    grad, grad_weight = norm.backward(grad_total, grad_out, got_total, scales, weight)
    close("gradient of the sum", grad, total.grad, tolerance)
    close("gradient of the norm", grad_weight, wide_weight.grad, tolerance)


def _sums(device, dtype, tolerance):  # type: ignore[no-untyped-def]
    import torch
    from relax_train.kernels import routing

    rows, places = torch.randn(12, 48, device=device).to(dtype), torch.randperm(12, device=device).view(4, 3)
    close("sums of rows", routing.sums(rows, places), rows.double()[places].sum(1), tolerance)


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
    grads: Any = tuple(torch.randn(x.shape, device=device).to(dtype) for x in expected)
    torch.autograd.backward(expected, [g.double() for g in grads])
    for name, got, want in zip("qkv", qkv.forward(mixed, tables, norms, eps, groups), expected, strict=True):
        close(name, got, want.detach(), tolerance)
    grad_mixed, grad_norms = qkv.backward(mixed, grads, tables, norms, eps, groups)
    close("gradient of the projection", grad_mixed, wide.grad, tolerance)
    for got, weight in zip(grad_norms or (), wide_norms, strict=True):
        close("gradient of a norm", got, weight.grad, tolerance)


def _step_of(folder, recompute, fused):  # type: ignore[no-untyped-def]
    """Gradient buffers and metrics of one step of a small model, with the kernels or without."""
    import numpy as np
    import torch
    from relax_data.types import TrainBatch
    from relax_train import settings as s
    from relax_train.algorithms import logprobs
    from relax_train.backend.parallel import setup_parallel, teardown_parallel
    from relax_train.models import build, experts
    from relax_train.models import fused as fused_layers
    from relax_train.models.build import build_model
    from relax_train.models.hf_mapping import load_hf_weights
    from relax_train.step import ForwardBackward

    for module in (logprobs, fused_layers, experts):
        vars(module)["fuses"] = lambda tensor: fused and tensor.dtype in (torch.float32, torch.bfloat16)
    vars(build)["adds_products"] = lambda _: fused
    settings = s.TrainSettings(
        model=s.ModelSettings(hf_checkpoint=str(folder), bf16=False),
        parallel=s.ParallelSettings(**recompute),
        algorithm=s.AlgorithmSettings(entropy_coef=0.01),
        batch=s.BatchSettings(micro_batch_size=3),
    )
    rng = np.random.default_rng(0)
    lengths = np.array([5, 9, 2])
    columns = {
        name: {i: rng.random(n).astype(np.float32) - shift for i, n in enumerate(lengths)}
        for name, shift in (("advantages", 0.5), ("rollout_log_probs", 4), ("weights", 0))
    }
    columns["mask"] = {i: np.ones(n, np.float32) for i, n in enumerate(lengths)}
    batch = TrainBatch(
        rollout_id=0,
        tokens=[rng.integers(0, 96, n + 4) for n in lengths],
        response_lengths=lengths,
        loss_masks=list(columns["mask"].values()),
        rollout_log_probs=list(columns["rollout_log_probs"].values()),
        rewards=np.zeros(3, np.float32),
        group_ids=np.zeros(3, np.int64),
        oldest_versions=np.zeros(3, np.int64),
        names=["a", "b", "c"],
    )
    free_port()
    model = build_model(settings, setup_parallel(settings.parallel))
    load_hf_weights(model)
    runs = ForwardBackward(model, settings, temperature=0.8)
    for chunk in model.chunks:
        chunk.zero_grad_buffer()
    metrics, left = memory_left(model, lambda: runs.gradient(batch, columns))
    # Tables of cosines and sines belong to the micro-batch, which attention holds on to until the next one.
    tables = 2 * sum(len(row) for row in batch.tokens) * 16 * 4
    # So do the indices by which it gathers documents of similar length. One residual stream that is left is 3.5 kB.
    assert left < tables + 3072, (folder, recompute, left, tables)
    metrics["log_prob"] = float(np.concatenate(runs.log_probs(batch)).sum())
    grads = {name: p.main_grad.clone() for name, p in model.gpt[0].named_parameters()}
    teardown_parallel()
    return grads, metrics


def memory_left(model, run):  # type: ignore[no-untyped-def]
    """What ``run`` gives, and bytes of the tensors it made that are still there, beside the memory of the weights."""
    import gc

    import torch
    from torch.multiprocessing.reductions import StorageWeakRef
    from torch.utils._python_dispatch import TorchDispatchMode

    held = [t.untyped_storage() for p in model.gpt[0].parameters() for t in (p, p.main_grad)]
    own, made = {storage.data_ptr() for storage in held}, {}

    class Note(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            result = func(*args, **(kwargs or {}))
            for tensor in torch.utils._pytree.tree_leaves(result):
                if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in own:
                    storage = tensor.untyped_storage()
                    made[storage.data_ptr()] = StorageWeakRef(storage), storage.nbytes()
            return result

    with Note():
        result = run()
    gc.collect()
    return result, sum(size for reference, size in made.values() if not reference.expired())


def free_port() -> None:
    """Lets the next process group of this process listen on a port that nobody has."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        os.environ["MASTER_PORT"] = str(probe.getsockname()[1])


def check_models() -> None:
    """A step with the kernels gives the gradient that it gives without; raises where it does not."""
    import tempfile

    import torch
    from transformers import (
        Qwen2Config,
        Qwen2ForCausalLM,
        Qwen3Config,
        Qwen3ForCausalLM,
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
    )

    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    sizes = dict(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, dtype="float32",
    )  # fmt: skip
    torch.manual_seed(3)
    models = {
        "qwen3": Qwen3ForCausalLM(Qwen3Config(**sizes, head_dim=16, tie_word_embeddings=True)),  # type: ignore[arg-type]
        "qwen2": Qwen2ForCausalLM(Qwen2Config(**sizes | {"hidden_size": 64}, tie_word_embeddings=False)),  # type: ignore[arg-type]
    }
    moe: dict[str, Any] = sizes | dict(
        num_experts=6, num_experts_per_tok=3, moe_intermediate_size=16, norm_topk_prob=True, mlp_only_layers=[0],
        head_dim=16, tie_word_embeddings=False,
    )  # fmt: skip
    models["moe"] = Qwen3MoeForCausalLM(Qwen3MoeConfig(**moe))
    choices: dict[str, dict[str, object]] = {
        "nothing recomputed": {},
        "selective": {"recompute_granularity": "selective"},
        "block": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
        "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    }
    with tempfile.TemporaryDirectory() as folder:
        for name, model in models.items():
            model.save_pretrained(f"{folder}/{name}")
            expected, metrics = _step_of(f"{folder}/{name}", {}, fused=False)
            for choice, options in choices.items():
                grads, got = _step_of(f"{folder}/{name}", options, fused=True)
                wrong = {
                    k: (v, metrics[k])
                    for k, v in got.items()
                    if not math.isclose(v, metrics[k], rel_tol=1e-4, abs_tol=1e-5)
                }
                assert not wrong, (name, choice, wrong)
                for parameter, grad in grads.items():
                    close(f"{name}, {choice}, gradient of {parameter}", grad, expected[parameter], 1e-4)


def _kept(folder, layers):  # type: ignore[no-untyped-def]
    """Bytes that a forward pass of that many layers keeps beside the weights, and the model's shape and its tokens."""
    import torch
    from relax_train import settings as s
    from relax_train.backend.device_context import DeviceContext
    from relax_train.backend.mcore import PackedSeqParams
    from relax_train.backend.parallel import setup_parallel, teardown_parallel
    from relax_train.models.build import build_model
    from transformers import Qwen3Config

    sizes = {"hidden_size": 32, "intermediate_size": 80, "num_attention_heads": 4, "num_key_value_heads": 2}
    Qwen3Config(vocab_size=96, num_hidden_layers=layers, head_dim=16, **sizes).save_pretrained(folder)  # type: ignore[arg-type]
    # The kernel of attention takes half precision only; what torch has for the rest keeps more.
    settings = s.TrainSettings(model=s.ModelSettings(hf_checkpoint=folder, bf16=torch.cuda.is_available()))
    free_port()
    model = build_model(settings, setup_parallel(settings.parallel))
    weights = {p.untyped_storage().data_ptr() for p in model.gpt[0].parameters()}
    tokens, kept = 64, {}

    def note(tensor):  # type: ignore[no-untyped-def]
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    ids = torch.zeros(1, tokens, dtype=torch.int64, device=model.parallel.device)
    cu = torch.tensor([0, tokens], dtype=torch.int32, device=model.parallel.device)
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=tokens)
    with DeviceContext(), model.without_head(), torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        out = model.chunks[0](ids, ids, None, packed_seq_params=packed)
    found = sum(size for address, size in kept.items() if address not in weights)
    assert out.requires_grad
    shape = model.shape
    teardown_parallel()
    return found, shape, tokens


def check_activations() -> None:
    """A layer keeps about what the plan says."""
    import tempfile

    import torch
    from relax_train.models import fused
    from relax_train.models.costs import Activations

    class One:
        tp = pp = cp = dp = ep = etp = expert_dp = 1

    vars(fused)["fuses"] = lambda tensor: tensor.dtype in (torch.float32, torch.bfloat16)
    with tempfile.TemporaryDirectory() as folder:
        (three, shape, tokens), (one, *_) = _kept(folder, 3), _kept(folder, 1)
    cuda = torch.cuda.is_available()
    memory = Activations(shape=shape, sizes=One(), sequence_parallel=False, width=2 if cuda else 4)
    ratio = (three - one) / 2 / (tokens * memory.layer("dense"))
    # Beside it: a number for each row of norm and attention; of attention on the CPU an intermediate result.
    assert 0.95 < ratio < (1.1 if cuda else 1.15), ratio


if __name__ == "__main__":
    check_all()
    check_models()
    check_activations()
    print("all kernels agree")
