"""Invariant 1: whatever is interrupted, killed and resumed, each prompt is returned once or counted as dropped."""

import asyncio
import base64
import datetime
import json
import os
import pickle
import random
import tempfile
import uuid
import zoneinfo
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from relax_data.prompts.ledger import PromptLedger
from relax_data.prompts.saved_groups import SAMPLES_FILE
from relax_data.serialization import from_plain, to_plain
from relax_data.types import Prompt, SampleGroup
from relax_rollout.loop.rollout_loop import RolloutLoop
from relax_rollout.rewards import build_reward
from relax_rollout.settings import RewardSettings, RolloutSettings

Make = Callable[..., Any]

PROMPTS = 14


@pytest.fixture(scope="module")
def exact_match() -> Any:
    return build_reward(RewardSettings(rm_type="exact-match"))


Saved = tuple[dict[str, Any], bytes]


def saved(loop: RolloutLoop) -> Saved:
    """The state as it is in a checkpoint: what came through JSON, and the file of the samples."""
    with tempfile.TemporaryDirectory() as name:
        state = json.loads(json.dumps(loop.save_state(Path(name))))
        (file,) = Path(name).iterdir()
        assert file.name == SAMPLES_FILE
        return state, file.read_bytes()


def load(loop: RolloutLoop, state: Saved) -> None:
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / SAMPLES_FILE).write_bytes(state[1])
        loop.load_state(state[0], Path(name))


async def run_with_kills(
    make_loop: Callable[[int], RolloutLoop], kills: list[int | None]
) -> tuple[list[int], dict[int, str], int]:
    """Rollouts until the source is used up.

    Before each, the state is stored; ``kills`` says after how many turns of the event loop the next one is killed
    (None: not at all), after which a new loop goes on from the stored state.

    Returns:
        Prompt ids in the order returned, reason by prompt_id of the dropped ones, number of kills that hit a rollout.
    """
    returned: list[int] = []
    dropped: dict[int, str] = {}
    hits = 0
    kill = iter(kills)
    version = 0
    loop = make_loop(version)
    while not loop.exhausted:
        state = saved(loop)
        task = asyncio.ensure_future(loop.generate(version, version))
        turns = next(kill, None)
        for _ in range(turns or 0):
            await asyncio.sleep(0)
        if turns is not None and not task.done():
            hits += 1
            # A checkpoint may be written in the middle, too: it must hold everything.
            state = saved(loop) if turns % 2 else state
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            loop = make_loop(version)
            load(loop, state)
            dropped |= {d["prompt_id"]: d["reason"] for d in state[0]["dropped"]}
            continue
        result = await task
        returned += [g.prompt.prompt_id for g in result.groups]
        assert not {d.prompt_id for d in result.dropped} & set(returned)
        dropped |= {d.prompt_id: d.reason for d in result.dropped}
        version += 1
    return returned, dropped, hits


@pytest.mark.slow
@hypothesis.settings(max_examples=15, deadline=None, suppress_health_check=list(hypothesis.HealthCheck))
@hypothesis.given(
    batch=st.integers(1, 4),
    extra=st.integers(0, 4),
    samples=st.integers(1, 2),
    rejected=st.sets(st.integers(0, PROMPTS - 1), max_size=6),
    max_staleness=st.sampled_from([None, 0, 1]),
    kills=st.lists(st.none() | st.integers(0, 40), max_size=6),
    seed=st.integers(0, 1000),
)
def test_each_prompt_once_or_dropped(
    make_engine: Make,
    make_source: Make,
    exact_match: Any,
    tokenizer: Any,
    batch: int,
    extra: int,
    samples: int,
    rejected: set[int],
    max_staleness: int | None,
    kills: list[int | None],
    seed: int,
) -> None:
    settings = RolloutSettings(
        rollout_batch_size=batch,
        over_sampling_batch_size=batch + extra,
        n_samples_per_prompt=samples,
        rollout_max_response_len=2,
    )
    turns = random.Random(seed)

    def keep(group: SampleGroup) -> tuple[bool, str]:
        return group.prompt.prompt_id not in rejected, "unlucky"

    def make_loop(version: int) -> RolloutLoop:
        return RolloutLoop(
            settings,
            engines=[make_engine(version=version, delay=lambda r, i: turns.randrange(12))],
            source=make_source(PROMPTS // 2, num_epoch=2),
            reward=exact_match,
            tokenizer=tokenizer,
            filter=keep,
            max_staleness=max_staleness,
        )

    returned, dropped, _ = asyncio.run(run_with_kills(make_loop, kills))
    assert sorted(returned) == sorted(set(range(PROMPTS)) - rejected)
    assert dropped == dict.fromkeys(rejected, "unlucky")


async def test_kills_of_the_property_test_do_hit(
    make_engine: Make, make_source: Make, exact_match: Any, tokenizer: Any
) -> None:
    settings = RolloutSettings(rollout_batch_size=2, over_sampling_batch_size=3, rollout_max_response_len=2)

    def make_loop(version: int) -> RolloutLoop:
        return RolloutLoop(
            settings,
            engines=[make_engine(version=version)],
            source=make_source(6, num_epoch=1),
            reward=exact_match,
            tokenizer=tokenizer,
        )

    returned, _, hits = await run_with_kills(make_loop, [3, None, 4])
    assert sorted(returned) == list(range(6))
    assert hits == 2


async def test_state_keeps_every_token_of_a_surplus_group(
    make_engine: Make, make_source: Make, length_reward: Any, tokenizer: Any
) -> None:
    def make_loop(n_samples: int = 2, **options: Any) -> RolloutLoop:
        settings = RolloutSettings(
            rollout_batch_size=1,
            over_sampling_batch_size=3,
            n_samples_per_prompt=n_samples,
            rollout_max_response_len=3,
            **options,
        )
        return RolloutLoop(
            settings, engines=[make_engine()], source=make_source(), reward=length_reward, tokenizer=tokenizer
        )

    loop = make_loop()
    await loop.generate(0, 0)
    state = saved(loop)
    had_tokens = sum(bool(s.tokens) for g in loop.ledger.groups() for s in g.samples)
    assert len(loop.ledger.ready) >= 1
    resumed = make_loop()
    load(resumed, state)
    assert saved(resumed) == state
    expected = [g.samples for g in (await loop.generate(1, 0)).groups]
    assert [g.samples for g in (await resumed.generate(1, 0)).groups] == expected

    wider = make_loop(n_samples=4, partial_rollout=True)  # which restarts none of its own
    load(wider, state)
    assert {g.start_version for g in wider.ledger.groups()} == {None}, "they start again"
    results = [await wider.generate(rollout_id, 0) for rollout_id in (1, 2)]
    assert [len(g.samples) for result in results for g in result.groups] == [4, 4]
    assert [r.metrics["rollout/restarted_samples"] for r in results] == [had_tokens, 0], "told once"


def test_state_of_another_format_is_refused(
    make_engine: Make, make_source: Make, length_reward: Any, tokenizer: Any
) -> None:
    loop = RolloutLoop(
        RolloutSettings(), engines=[make_engine()], source=make_source(), reward=length_reward, tokenizer=tokenizer
    )
    before = loop.state_dict()
    # Format 1 kept the loop and the ledger beside each other, as two books; format 2 had all samples as JSON.
    first: dict[str, Any] = {
        "loop": {"format": 1, "buffer": {"source": {"position": 3}, "ready": [], "waiting": []}, "dropped": []},
        "ledger": {"step": 1, "trained": 3, "dropped": {}, "open": [], "closed_below": 3, "closed": []},
    }
    for found, state in [
        ("99", before | {"format": 99}),
        ("2", before | {"format": 2}),
        ("1", first),
        ("1", first["loop"]),
        ("None", {}),
    ]:
        with pytest.raises(ValueError, match=rf"has format {found}, this version reads 3: .*--hf-checkpoint instead"):
            loop.load_state(state, Path("not looked at"))
        assert loop.state_dict() == before


def test_numpy_values_become_plain_and_what_has_no_plain_form_is_refused() -> None:
    value = {"n": np.float32(0.5), "rows": np.arange(3), "pair": (1, b"\xff")}
    assert from_plain(json.loads(json.dumps(to_plain(value, "row")))) == {
        "n": 0.5,
        "rows": [0, 1, 2],
        "pair": [1, b"\xff"],
    }
    with pytest.raises(ValueError, match="row holds a value of type date"):
        to_plain({"day": datetime.date(2024, 2, 29)}, "row")


@pytest.mark.parametrize(
    "value",
    [
        Decimal("2.50"),
        datetime.date(2024, 2, 29),
        datetime.datetime(2024, 2, 29, 12, tzinfo=datetime.UTC),
        datetime.datetime(2024, 2, 29, 12, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin")),
        datetime.timedelta(seconds=1.5),
        uuid.UUID(int=7),
        {"a"},  # the order of several would depend on the seed of their hashes
        [(1, {"x": Decimal(2)})],
        b"\x00\xff",
        [("key", 1), ("of a map", 2)],
        {1: "a", "1": "b"},
        {"__bytes__": "no base64"},
        {"__object__": "no pickle"},
        {"__dict__": {"__bytes__": ""}},
        [1, 2.5, None, True, "a", {"nested": [Decimal(1)]}],
    ],
    ids=repr,
)
def test_labels_and_metadata_of_every_type_survive_a_checkpoint(value: Any) -> None:
    prompt = Prompt(0, 0, "x.parquet:1", "p", [1], label=value, metadata={"entry": value})
    ledger, again = PromptLedger(), PromptLedger()
    ledger.hand_out([SampleGroup.start(prompt, 1)])
    state = ledger.state_dict()
    samples = state.pop("samples")
    again.load_state_dict(json.loads(json.dumps(state)) | {"samples": samples})
    (restored,) = (g.prompt for g in again.groups())
    assert restored == prompt
    assert type(restored.label) is type(value)
    assert repr(restored.label) == repr(value)


class Program:
    """A pickle of it makes a folder when it is read."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._path),)


def test_a_value_of_a_checkpoint_runs_no_code(tmp_path: Path) -> None:
    pickled = base64.b64encode(pickle.dumps(Program(tmp_path / "ran"))).decode()
    with pytest.raises(ValueError, match=r"cannot be read back: .*mkdir"):
        from_plain({"label": [{"__object__": pickled}]})
    assert not (tmp_path / "ran").exists()


def test_times_of_parquet_survive_a_checkpoint() -> None:
    """Also those in nanoseconds and with a time zone."""
    import pyarrow as pa

    for kind in (pa.timestamp("ns"), pa.timestamp("ns", "Europe/Berlin"), pa.timestamp("us", "UTC"), pa.duration("ns")):
        (value,) = pa.array([1_700_000_000_000_001], kind).to_pylist()
        again = from_plain(json.loads(json.dumps(to_plain(value, "row", objects=True))))
        assert (type(again), repr(again)) == (type(value), repr(value))


def test_what_could_not_be_read_back_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"row 3 holds a value of type Program, which cannot be stored"):
        to_plain({"label": Program(tmp_path / "ran")}, "row 3", objects=True)
    assert not (tmp_path / "ran").exists()
