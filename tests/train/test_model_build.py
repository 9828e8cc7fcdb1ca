"""Models from Hugging Face configurations, and attention: what is built, and what is refused with a reason."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch


def _logits(harness: Any, reference: Any) -> torch.Tensor:
    return harness(reference.folder, {}).logits(reference.rows[0][0])


KINDS = [
    *("qwen2", "qwen3", "qwen3_moe", "llama"),
    *("llama+linear", "llama+llama3", "llama+yarn", "qwen2+yarn", "qwen3+yarn", "qwen3+llama3", "qwen3_moe+yarn"),
]


@pytest.mark.parametrize("kind", KINDS)
def test_logits_of_a_packed_row_are_those_of_each_document_alone(
    kind: str, run_ranks: Callable[..., Any], harness: Any, reference: Any
) -> None:
    oracle = reference(kind)
    logits = run_ranks(_logits, 1, harness, oracle)[0]
    torch.testing.assert_close(logits, oracle.logits, rtol=1e-4, atol=1e-5)


def _padded_logits(harness: Any, reference: Any) -> tuple[int, torch.Tensor]:
    from relax_train.models.build import PADDING_LOGIT

    run = harness(reference.folder, {"tensor_model_parallel_size": 2})
    logits = run.logits(reference.rows[0][0])
    assert run.model.padded_vocab_size == 98
    assert run.model.vocab_size == 97
    return run.parallel.tp_rank, logits == PADDING_LOGIT


def test_padding_of_the_vocabulary_has_no_probability(run_ranks: Any, harness: Any, reference: Any) -> None:
    for rank, padding in run_ranks(_padded_logits, 2, harness, reference("qwen2")):
        assert padding[:, -1].all() if rank == 1 else not padding[:, -1].any()
        assert not padding[:, :-1].any()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "mistral"}, "model_type 'mistral'"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"attention_bias": True}, "attention_bias"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0}}, "'longrope'"),
    ],
)
def test_configurations_that_are_not_built(change: dict[str, Any], words: str, reference: Any, tmp_path: Path) -> None:
    from relax_train.models.build import load_shape

    config = json.loads((reference("qwen3").folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(ValueError, match=words):
        load_shape(str(tmp_path))


def test_layers_with_experts() -> None:
    from relax_train.models.architectures import ARCHITECTURES

    config = {"mlp_only_layers": [3], "decoder_sparse_step": 2, "num_experts": 4}
    kinds = ARCHITECTURES["qwen3_moe"].layer_kinds(config, 5)
    assert [kind == "experts" for kind in kinds] == [False, True, False, False, False]
    assert set(ARCHITECTURES["qwen3"].layer_kinds(config, 5)) == {"dense"}


def _dense(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Causal attention written out, the last query seeing the last key: ``[tokens, heads, dim]``."""
    repeat = query.size(1) // key.size(1)
    key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) / query.size(-1) ** 0.5
    seen = torch.ones(query.size(0), key.size(0), dtype=torch.bool).tril(key.size(0) - query.size(0))
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, float("-inf")).softmax(-1), value)


@pytest.mark.parametrize("dim", [16, 64, 128])
@pytest.mark.parametrize("cp_size", [1, 2, 3])
def test_attention_plan_of_every_context_parallel_rank(cp_size: int, dim: int) -> None:
    """Both ways to run a plan: padded, and as the variable-length kernel is called on a GPU."""
    from relax_train.backend.mcore import PackedSeqParams
    from relax_train.models.attention import _padded, _Plan
    from relax_train.models.context_parallel import zigzag_positions

    borders = [0, 12, 36, 36, 48, 408]  # the last one is too long to be padded to, and another is empty
    cu = torch.tensor(borders, dtype=torch.int32)
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=360, max_seqlen_kv=360)
    torch.manual_seed(0)
    query, key, value = (torch.randn(408, heads, dim, dtype=torch.float64) for heads in (4, 2, 2))
    spans = [(a, b) for a, b in itertools.pairwise(borders) if a < b]
    whole = torch.cat([_dense(query[a:b], key[a:b], value[a:b]) for a, b in spans])
    held = [torch.from_numpy(zigzag_positions(borders, cp_size, rank)) for rank in range(cp_size)]
    assert sorted(torch.cat(held).tolist()) == list(range(408))
    gathered_key, gathered_value = key[torch.cat(held)], value[torch.cat(held)]
    for rank in range(cp_size):
        plan = _Plan(packed, cp_size, rank, torch.device("cpu"))
        mine, expected = query[held[rank]], whole[held[rank]]
        padded = _padded(mine, gathered_key[plan.key_order], gathered_value[plan.key_order], plan, None)
        torch.testing.assert_close(padded, expected)
        assert 1 < len(plan.batches) < len(plan.segments), "short ones together, the long one alone"
        cu_q, cu_k, longest_q, longest_k = plan.varlen
        keys, values = gathered_key[plan.key_index], gathered_value[plan.key_index]
        pairs = list(zip(itertools.pairwise(cu_q.tolist()), itertools.pairwise(cu_k.tolist()), strict=True))
        kernel = torch.cat([_dense(mine[a:b], keys[c:d], values[c:d]) for (a, b), (c, d) in pairs])
        torch.testing.assert_close(kernel, expected)
        assert longest_q == max(b - a for (a, b), _ in pairs)
        assert longest_k == max(d - c for _, (c, d) in pairs)


def test_rows_of_long_documents_are_attended_one_by_one() -> None:
    from relax_train.backend.mcore import PackedSeqParams
    from relax_train.models.attention import LONG, _Plan

    def long(*lengths: int, cp_size: int = 1) -> bool:
        cu = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
        packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=max(lengths))
        return _Plan(packed, cp_size, 0, torch.device("cpu")).long

    assert long(LONG)
    assert long(2 * LONG - 40, 40)
    assert not long(LONG, 40)
    assert not long(*[1024] * 32)
    assert not long(2 * LONG, cp_size=2)
