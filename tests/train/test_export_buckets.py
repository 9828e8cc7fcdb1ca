"""Weights in buckets: every rank gets every tensor whole, in one order, and two buckets exist at most."""

import itertools
import time
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from relax_train.models.hf_mapping import SafetensorsFolder

SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
LIMIT = 5000  # bytes: less than an embedding, more than a norm


def _buckets(harness: Any, reference: Any, parallel: dict[str, Any]) -> Any:
    from relax_train.models.export import weight_buckets

    run = harness(reference.folder, parallel)
    sizes, alive, most, tensors = [], [], 0, {}
    for bucket in weight_buckets(run.model, LIMIT):
        flat = bucket.flat
        assert all(tensor._base is flat for _, tensor in bucket.items())
        assert bucket.dtype == str(flat.dtype).removeprefix("torch.")
        alive.append(weakref.ref(flat))
        most = max(most, _living(alive))
        sizes.append([(name, tensor.numel() * tensor.element_size()) for name, tensor in bucket.items()])
        tensors.update({name: tensor.clone() for name, tensor in bucket.items()})
        del flat
    # The ranks tell each other once what there is; a push after that exchanges weights alone.
    with mock.patch("torch.distributed.all_gather_object", side_effect=AssertionError("asked again")):
        again = [name for bucket in weight_buckets(run.model, 1 << 30) for name in bucket.names]
    return sizes, most, tensors, again


def _living(buckets: list[Any]) -> int:
    """How many are left; gloo's thread lets go of a tensor a moment after the call that sent it has returned."""
    end = time.monotonic() + 60
    while (left := sum(reference() is not None for reference in buckets)) > 2 and time.monotonic() < end:
        time.sleep(0.01)
    return left


@pytest.mark.parametrize(
    ("kind", "world", "parallel"),
    [
        ("qwen3", 1, {}),
        ("qwen2", 2, SP),
        ("qwen3", 2, {"pipeline_model_parallel_size": 2}),
        ("qwen3_moe", 4, {**SP, "expert_model_parallel_size": 2}),
        (
            "qwen3_moe",
            4,
            {"expert_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
        ),
    ],
    ids=["one", "tp2-padded", "pp2-tied", "ep2-tp2", "ep2-pp2"],
)
def test_buckets(
    kind: str, world: int, parallel: Any, run_ranks: Callable[..., Any], harness: Any, reference: Any
) -> None:
    oracle = reference(kind)
    stored = SafetensorsFolder(str(oracle.folder))
    results = run_ranks(_buckets, world, harness, oracle, parallel)
    for sizes, most, tensors, again in results:
        assert most <= 2
        for bucket in sizes:
            assert len(bucket) == 1 or sum(size for _, size in bucket) <= LIMIT
        # No two neighbours would have fitted together, but where the pipeline is cut.
        loose = sum(sum(s for _, s in a) + b[0][1] <= LIMIT for a, b in itertools.pairwise(sizes))
        assert loose <= parallel.get("pipeline_model_parallel_size", 1) - 1
        names = [name for bucket in sizes for name, _ in bucket]
        assert names == again == [name for bucket in results[0][0] for name, _ in bucket]
        assert sorted(names) == sorted(stored.names())
        assert all(torch.equal(tensor, stored.read(name)) for name, tensor in tensors.items())
