"""The bucket of weights that trainer and engines exchange."""

import pytest
import torch
from relax_data.weights import Bucket

TENSORS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.randn(4, 6)[:, ::2], "c": torch.tensor(2.5)}


def test_the_tensors_come_back_as_views_without_gaps() -> None:
    bucket = Bucket.of(TENSORS.items())
    assert bucket.names == ("a", "b", "c")
    assert bucket.shapes == ((2, 3), (4, 3), ())
    assert (bucket.dtype, bucket.nbytes, len(bucket)) == ("float32", 4 * 19, 3)
    assert bucket.offsets == [0, 6, 18]
    for name, view in bucket.items():
        assert torch.equal(view, TENSORS[name])
        assert view.untyped_storage().data_ptr() == bucket.flat.untyped_storage().data_ptr()


def test_parameters_give_plain_values() -> None:
    bucket = Bucket.of([("a", torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16)))])
    assert bucket.dtype == "bfloat16"
    assert not bucket.flat.requires_grad


def test_what_is_no_bucket_is_refused() -> None:
    with pytest.raises(ValueError, match="empty bucket"):
        Bucket.of([])
    with pytest.raises(ValueError, match=r"one dtype, not \['torch.bfloat16', 'torch.float32'\]"):
        Bucket.of([("a", torch.zeros(2)), ("b", torch.zeros(2, dtype=torch.bfloat16))])
    with pytest.raises(ValueError, match="2 names but 1 shapes"):
        Bucket(("a", "b"), ((2,),), "float32", torch.zeros(2))
    for flat in (torch.zeros(5), torch.zeros(2, 2)):
        with pytest.raises(ValueError, match="have 4 elements, but its flat tensor has the shape"):
            Bucket(("a",), ((2, 2),), "float32", flat)
    with pytest.raises(
        ValueError, match=r"shape \(4,\) and strides \(2,\); it must be one-dimensional and without gaps"
    ):
        Bucket(("a",), ((2, 2),), "float32", torch.zeros(8)[::2])
    with pytest.raises(ValueError, match=r"said to be float32, but its tensor is torch.bfloat16"):
        Bucket(("a",), ((2, 2),), "float32", torch.zeros(4, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="holds a twice"):
        Bucket.of([("a", torch.zeros(2)), ("b", torch.zeros(1)), ("a", torch.ones(1))])


def test_split_keeps_the_order_and_gives_a_large_tensor_a_bucket_of_its_own() -> None:
    tensors = [(f"t{i}", torch.full((n,), float(i))) for i, n in enumerate([2, 2, 9, 1, 3])]
    buckets = list(Bucket.split(tensors, 16))
    assert [list(bucket.names) for bucket in buckets] == [["t0", "t1"], ["t2"], ["t3", "t4"]]
    assert [name for bucket in buckets for name, _ in bucket.items()] == [name for name, _ in tensors]
