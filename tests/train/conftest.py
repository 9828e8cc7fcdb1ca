"""Ranks as forked processes, and Hugging Face models as the oracle of the trainer's numbers."""

import dataclasses
import faulthandler
import gc
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
import torch.nn.functional as F
from relax_train import settings as train_settings

DEADLINE = 300.0
"""Seconds that one group of ranks may take."""


def _rank_main(rank: int, function: Callable[..., Any], args: tuple[Any, ...], world: int, port: int, out: str) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    torch.set_num_threads(1)
    # A rank that dies by a signal says where: in Python, and in the libraries below it.
    faulthandler.enable(file=2)
    torch._C._set_print_stack_traces_on_fatal_signal(True)
    from relax_train.backend.parallel import teardown_parallel

    try:
        result = function(*args)
    finally:
        teardown_parallel()
    torch.save(result, f"{out}/rank{rank}.pt")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


RunRanks = Callable[..., list[Any]]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests that fork ranks: most of the time of the suite's quick tests is theirs.

    They come first: what forks may have no threads that work at that moment, and Ray, once a test has started it, has
    some thirty of them in this process until the end.
    """
    for item in items:
        if "run_ranks" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.ranks)
    items.sort(key=lambda item: item.get_closest_marker("ranks") is None)


@pytest.fixture
def run_ranks(tmp_path_factory: pytest.TempPathFactory) -> RunRanks:
    """``run_ranks(function, world, *args)``: what ``function(*args)`` returns on each of ``world`` forked ranks.

    The libraries are imported once, here, so that a group of ranks costs little more than its work.
    """
    import relax_train.backend.parallel
    import relax_train.models.build  # noqa: F401

    def run(function: Callable[..., Any], world: int, *args: Any) -> list[Any]:
        out = str(tmp_path_factory.mktemp("ranks"))
        gc.collect()
        gc.freeze()  # a collection in a rank would copy the pages of all that is there already
        context = mp.start_processes(
            _rank_main,
            args=(function, args, world, _free_port(), out),
            nprocs=world,
            join=False,
            start_method="fork",
        )
        end = time.monotonic() + DEADLINE
        try:
            while not context.join(timeout=1.0):
                assert time.monotonic() < end, f"{world} ranks of {function.__name__} took more than {DEADLINE:.0f} s"
        finally:
            for process in context.processes:
                if process.is_alive():
                    process.kill()
                process.join(10)
        return [torch.load(f"{out}/rank{r}.pt", weights_only=False) for r in range(world)]

    return run


@dataclasses.dataclass(frozen=True)
class Row:
    """One packed micro-batch: documents one after another. Labels and mask are random, so that no token is special."""

    tokens: torch.Tensor
    labels: torch.Tensor
    mask: torch.Tensor
    borders: list[int]


@dataclasses.dataclass(frozen=True)
class Reference:
    """A Hugging Face model, the same rows for three AdamW steps, and what transformers makes of them.

    Attributes:
        folder: weights before.
        after: weights after the last step.
        rows: for each step its four rows.
        logits: of the first row of the first step, each document run alone.
    """

    folder: Path
    after: Path
    rows: list[list[Row]]
    losses: list[float]
    grad_norms: list[float]
    logits: torch.Tensor


LR, STEPS, EPS = 1e-2, 3, 1e-3  # a large epsilon keeps Adam from turning rounding noise into whole steps


SCALED: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"factor": 8.0, "original_max_position_embeddings": 32},
}
"""Scalings of the rotary embedding that act on texts of a few tokens."""


def _hf_model(kind: str) -> Any:
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        MistralConfig,
        MistralForCausalLM,
        Qwen2Config,
        Qwen2ForCausalLM,
        Qwen3Config,
        Qwen3ForCausalLM,
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
    )

    common: dict[str, Any] = dict(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        dtype="float32",
    )
    kind, _, scaling = kind.partition("+")
    if scaling:
        common["rope_parameters"] = {"rope_type": scaling, "rope_theta": 1e4, **SCALED[scaling]}
    if kind == "qwen3":
        config = Qwen3Config(vocab_size=96, head_dim=16, tie_word_embeddings=True, **common)
        return Qwen3ForCausalLM(config)
    if kind == "qwen2":  # biases, no tie, a vocabulary that no tensor-parallel size divides
        return Qwen2ForCausalLM(Qwen2Config(vocab_size=97, tie_word_embeddings=False, **common))
    if kind == "llama":  # Llama 3.1 has a head of its own size and no tie; SmolLM2 neither size nor missing tie
        plain = {"tie_word_embeddings": True} if not scaling else {"tie_word_embeddings": False, "head_dim": 16}
        return LlamaForCausalLM(LlamaConfig(vocab_size=96, **plain, **common))
    if kind == "mistral":  # not among the architectures: a test brings its record
        return MistralForCausalLM(MistralConfig(vocab_size=96, head_dim=16, sliding_window=None, **common))
    assert kind == "qwen3_moe"
    experts = Qwen3MoeConfig(
        vocab_size=96,
        head_dim=16,  # type: ignore[call-arg]  # the class takes it as one of its further keys
        tie_word_embeddings=False,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        norm_topk_prob=True,
        mlp_only_layers=[0],
        decoder_sparse_step=1,
        **common,
    )
    return Qwen3MoeForCausalLM(experts)


def _rows(vocab: int) -> list[list[Row]]:
    generator = torch.Generator().manual_seed(3)

    def row(lengths: list[int]) -> Row:
        total = sum(lengths)
        tokens, labels = (torch.randint(0, vocab, (total,), generator=generator) for _ in range(2))
        mask = (torch.rand(total, generator=generator) > 0.25).float()
        return Row(tokens, labels, mask, [0, *torch.tensor(lengths).cumsum(0).tolist()])

    lengths = [[8, 20, 4], [16, 16], [4, 28, 8], [24, 12]]
    return [[row(n) for n in lengths] for _ in range(STEPS)]


def _make_reference(kind: str, base: Path) -> Reference:
    torch.manual_seed(7)
    model = _hf_model(kind)
    with torch.no_grad():
        for param in model.parameters():
            if param.dim() > 1:
                param.normal_(0, 0.1)
            else:
                param.uniform_(0.5, 1.5)
    model.save_pretrained(base / "before")
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), eps=EPS, weight_decay=0.0)
    rows = _rows(model.config.vocab_size)
    losses: list[float] = []
    norms: list[float] = []
    first_logits: list[torch.Tensor] = []
    for step in rows:
        optimizer.zero_grad()
        total, count = 0.0, sum(row.mask.sum().item() for row in step)
        for row in step:
            for start, end in zip(row.borders[:-1], row.borders[1:], strict=True):
                logits = model(input_ids=row.tokens[None, start:end]).logits[0]
                if len(first_logits) < len(rows[0][0].borders) - 1:
                    first_logits.append(logits.detach())
                loss = F.cross_entropy(logits, row.labels[start:end], reduction="none") * row.mask[start:end]
                (loss.sum() / count).backward()
                total += loss.sum().item()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        losses.append(total / count)
        optimizer.step()
    model.save_pretrained(base / "after")
    return Reference(base / "before", base / "after", rows, losses, norms, torch.cat(first_logits))


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    """``reference(kind)`` for llama, qwen2, qwen3, qwen3_moe and mistral; each is made once.

    ``qwen3+yarn`` is a qwen3 whose rotary embedding is scaled, one of ``SCALED``.
    """
    made: dict[str, Reference] = {}

    def get(kind: str) -> Reference:
        if kind not in made:
            made[kind] = _make_reference(kind, tmp_path_factory.mktemp(kind))
        return made[kind]

    return get


class Harness:
    """One model with its optimizer on this rank, and a plain cross-entropy step over rows."""

    def __init__(self, folder: Path, parallel: dict[str, Any], *, bf16: bool = False, **optimizer: Any) -> None:
        from relax_train.backend.optimizer import build_optimizer
        from relax_train.backend.parallel import setup_parallel
        from relax_train.models.build import build_model
        from relax_train.models.hf_mapping import load_hf_weights

        self.settings = train_settings.TrainSettings(
            model=train_settings.ModelSettings(hf_checkpoint=str(folder), bf16=bf16),
            parallel=train_settings.ParallelSettings(**parallel),
            optimizer=train_settings.OptimizerSettings(
                **{"lr": LR, "weight_decay": 0.0, "adam_beta2": 0.95, "adam_eps": EPS, **optimizer}
            ),
        )
        self.parallel = setup_parallel(self.settings.parallel)
        self.model = build_model(self.settings, self.parallel)
        load_hf_weights(self.model)
        self.optimizer = build_optimizer(self.settings, self.model)

    def _inputs(self, row: Row) -> tuple[dict[str, torch.Tensor], Any]:
        from relax_train.backend.mcore import PackedSeqParams
        from relax_train.models.context_parallel import zigzag_positions

        device = self.parallel.device
        index = zigzag_positions(row.borders, self.parallel.cp_size, self.parallel.cp_rank)
        held = {k: getattr(row, k)[index][None].to(device) for k in ("tokens", "labels", "mask")}
        cu = torch.tensor(row.borders, dtype=torch.int32, device=device)
        longest = int(cu.diff().max())
        packed = PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=longest, max_seqlen_kv=longest
        )
        return held, packed

    def logits(self, row: Row) -> torch.Tensor:
        """Of a single-process model: ``[tokens, vocabulary]``."""
        from relax_train.backend.device_context import DeviceContext

        held, packed = self._inputs(row)
        with DeviceContext(), torch.no_grad():
            out: torch.Tensor = self.model.chunks[0](
                held["tokens"], torch.zeros_like(held["tokens"]), None, packed_seq_params=packed
            )[0]
        return out

    def step(self, rows: list[Row]) -> tuple[float, float]:
        """One optimizer step on this rank's share of ``rows``; global mean loss and gradient norm."""
        import torch.distributed as dist
        from relax_train.backend.device_context import DeviceContext
        from relax_train.backend.mcore import get_forward_backward_func

        parallel = self.parallel

        def forward_step(iterator: Iterator[Row], chunk: Any) -> Any:
            held, packed = self._inputs(next(iterator))
            labels, mask = held["labels"], held["mask"]
            out = chunk(held["tokens"], torch.zeros_like(held["tokens"]), None, labels=labels, packed_seq_params=packed)

            def loss_func(per_token: torch.Tensor) -> Any:
                total, count = (per_token.float() * mask).sum(), mask.sum().int()
                return total, count, {"sums": torch.stack([total.detach(), count.float()])}

            return out, loss_func

        with DeviceContext():
            self.optimizer.zero_grad()
            mine = rows[parallel.dp_rank :: parallel.dp_size]
            reports = get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=iter(mine),
                model=self.model.chunks[0],
                num_microbatches=len(mine),
                seq_length=rows[0].borders[-1],
                micro_batch_size=1,
                forward_only=False,
            )
            sums = torch.zeros(2, device=parallel.device)
            if parallel.is_last_stage:
                sums = sum((r["sums"] for r in reports), sums)
                dist.all_reduce(sums, group=parallel.dp_cp_group)
            dist.broadcast(sums, dist.get_global_rank(parallel.pp_group, parallel.pp_size - 1), group=parallel.pp_group)
        result = self.optimizer.step()
        return (sums[0] / sums[1]).item(), result.grad_norm

    def weights(self, max_bytes: int = 1 << 20) -> dict[str, torch.Tensor]:
        """All weights under their Hugging Face names."""
        from relax_train.models.export import weight_buckets

        return {n: t.clone().cpu() for bucket in weight_buckets(self.model, max_bytes) for n, t in bucket.items()}


@pytest.fixture(scope="session")
def harness() -> type[Harness]:
    """The class, for test functions that run on ranks."""
    return Harness
