"""The CPU layer stands between megatron-core and torch only where it must, and leaves nothing behind."""

import subprocess
import sys

import pytest
import torch
from packaging.version import Version


def test_megatron_is_a_version_we_tested() -> None:
    from relax_train.backend import mcore

    low, high = (Version(".".join(map(str, v))) for v in mcore.TESTED_VERSIONS)
    assert low <= Version(mcore.VERSION) < high, "run the parity tests with this version, then widen TESTED_VERSIONS"


def test_every_name_that_is_replaced_exists() -> None:
    from relax_train.backend import cpu_device

    for owner, name, _ in cpu_device._replacements():
        assert hasattr(owner, name), f"{owner} has no {name} any more"


@pytest.mark.parametrize("fails", [False, True])
def test_shim_is_gone_after_the_last_exit(fails: bool) -> None:
    from relax_train.backend import cpu_device
    from relax_train.backend.device_context import DeviceContext

    before = [getattr(owner, name) for owner, name, _ in cpu_device._replacements()]
    try:
        with DeviceContext():
            with DeviceContext():
                pass
            assert torch.zeros(2, device="cuda").device.type == "cpu"
            assert torch.ones(1).cuda().type() == "torch.cuda.FloatTensor"
            if fails:
                raise KeyError
    except KeyError:
        assert fails
    assert [getattr(owner, name) for owner, name, _ in cpu_device._replacements()] == before
    assert torch.ones(1).type() == "torch.FloatTensor"
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(2, device="cuda")


def test_products_outside_of_autograd_are_those_of_torch() -> None:
    """Of both shapes and all strides that megatron's linear layers have; what autograd follows stays torch's."""
    from relax_train.backend.device_context import DeviceContext

    torch.manual_seed(0)
    x, weight, grad = torch.randn(7, 1, 12), torch.randn(20, 12), torch.randn(7, 1, 20)
    pairs = [(x, weight.t()), (grad, weight), (grad[:, 0].t(), x[:, 0]), (x[:, 0], x[0, 0])]
    pairs += [(grad[:0, 0].t(), x[:0, 0]), (x[:0], weight.t())]  # of an expert without tokens
    for a, b in [*pairs, *((a.double(), b.double()) for a, b in pairs)]:
        expected = torch.matmul(a, b)
        with DeviceContext(), torch.no_grad():
            for product in (torch.matmul(a, b), a.matmul(b)):
                torch.testing.assert_close(product, expected)
                assert not product._is_view(), (
                    "megatron's cross entropy writes into it, also inside an autograd function"
                )
    weight.requires_grad_()
    with DeviceContext():
        torch.matmul(x, weight.t()).sum().backward()
    torch.testing.assert_close(weight.grad, x.sum((0, 1)).expand(20, 12))


def test_cuda_never_sees_the_shim(monkeypatch: pytest.MonkeyPatch) -> None:
    from relax_train.backend import device_context

    monkeypatch.setattr(device_context, "has_cuda", lambda: True)
    monkeypatch.delitem(sys.modules, "relax_train.backend.cpu_device", raising=False)
    with device_context.DeviceContext():
        pass
    assert "relax_train.backend.cpu_device" not in sys.modules


def test_dtype_follows_the_flag() -> None:
    from relax_train.backend.device import default_dtype

    assert (default_dtype(True), default_dtype(False)) == (torch.bfloat16, torch.float32)
    assert default_dtype(None) == torch.float32  # this test runs without CUDA


def test_settings_need_no_torch() -> None:
    code = "import sys, relax_train.settings, relax_train.observer; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.strip() == "False"


def test_megatron_does_not_bring_wandb_and_others_still_can_import_it() -> None:
    code = """if True:
        import sys
        import relax_train.backend.mcore
        assert "wandb" not in sys.modules
        import wandb
        print(wandb.__name__)
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.strip() == "wandb"


def test_norm_and_scale_of_many_gradients() -> None:
    from relax_train.backend import mcore

    assert mcore.clip_grads.l2_norm_impl is mcore._l2_norm
    assert mcore.clip_grads.multi_tensor_scale_impl is mcore._scale
    tensors = [torch.randn(3, 4), torch.randn(7), torch.zeros(2)]
    norm, _ = mcore._l2_norm(0, None, [tensors], False)
    assert norm.shape == (1,)
    torch.testing.assert_close(norm[0], torch.cat([t.flatten() for t in tensors]).norm())
    expected, targets = [t * 0.25 for t in tensors], [torch.empty_like(t) for t in tensors]
    mcore._scale(0, None, [tensors, targets], 0.25)
    assert all(torch.equal(a, b) for a, b in zip(targets, expected, strict=True))
    mcore._scale(0, None, [tensors, tensors], 0.25)
    assert all(torch.equal(a, b) for a, b in zip(tensors, expected, strict=True))
