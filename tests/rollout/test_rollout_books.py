"""One book of prompts: through any schedule each prompt is in one state, and nothing is lost or duplicated.

The schedules run through :class:`RolloutLoop` with a rollout function that does at random what such a function may do;
what the books must say is worked out beside it by a model that knows nothing of the ledger.
"""

import asyncio
import copy
import dataclasses
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from relax_data.hooks import load_function
from relax_data.prompts.ledger import LedgerError, PromptState
from relax_data.prompts.template import Drops
from relax_data.serialization import check_format
from relax_data.types import Prompt, SampleGroup, SampleStatus
from relax_rollout.loop.context import RolloutContext
from relax_rollout.loop.rollout_loop import RolloutLoop
from relax_rollout.settings import RolloutSettings

Collect = Callable[[RolloutContext], Awaitable[list[SampleGroup]]]
MakeLoop = Callable[..., RolloutLoop]


class Numbers:
    """Prompts 0, 1, 2, ... up to ``n``."""

    drops = Drops()

    def __init__(self, n: int) -> None:
        self.n, self.at = n, 0

    def next(self, n: int) -> list[Prompt]:
        first, self.at = self.at, min(self.n, self.at + n)
        image = {"image": [b"\x00\xff"]}
        return [Prompt(i, 0, f"a:{i + 1}", "1+1=", [5], multimodal=image) for i in range(first, self.at)]

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]

    def restore(self, prompt: Prompt) -> None:
        prompt.features = {"made_anew": np.zeros(1)}

    def __len__(self) -> int:
        return self.n


@pytest.fixture
def make_loop(make_engine: Any, length_reward: Any, tokenizer: Any, hooks: Callable[[str, str], str]) -> MakeLoop:
    """``make_loop(collect, n)``: a loop on prompts 0 to n - 1 whose rollouts are collected by ``collect``."""
    path = hooks("collected", "async def run(rollout):\n    return await collect(rollout)\n")
    engine = make_engine()

    def make(collect: Collect, n: int, n_samples: int = 1, **options: Any) -> RolloutLoop:
        load_function("--rollout-function-path", f"{path}:run").__globals__["collect"] = collect
        settings = RolloutSettings(
            rollout_batch_size=2, n_samples_per_prompt=n_samples, rollout_function_path=f"{path}:run"
        )
        return RolloutLoop(
            settings,
            engines=[engine],
            source=Numbers(n),
            reward=length_reward,
            tokenizer=tokenizer,
            **options,
        )

    return make


def finish(group: SampleGroup, token: int = 7) -> SampleGroup:
    for sample in group.samples:
        if not sample.status.finished:
            sample.append([token, 1], [-0.5, -0.25], 0)
            sample.status, sample.reward = SampleStatus.COMPLETED, float(token)
    return group


def ids(groups: list[SampleGroup]) -> list[int]:
    return [g.prompt.prompt_id for g in groups]


class Broken(Exception):
    """A rollout that fails."""


@dataclasses.dataclass
class Books:
    """What the books must say, kept the naive way: a state for each prompt, and the tokens of each finished sample."""

    state: dict[int, str]
    tokens: dict[tuple[int, int], list[int]]
    reasons: Counter[str]
    untold: list[int]
    """Dropped since the last result."""

    def of(self, state: str) -> list[int]:
        return sorted(i for i, s in self.state.items() if s == state)

    def move(self, old: str, new: str) -> None:
        for i in self.of(old):
            self.state[i] = new


class Schedule:
    """One random life of a run, with checkpoints at any moment, failed rollouts and resumes."""

    def __init__(self, make_loop: MakeLoop, seed: int) -> None:
        self.draw = random.Random(seed)
        self.total = self.draw.randint(1, 14)
        self.n_samples = self.draw.randint(1, 2)
        self.trains = self.draw.random() < 0.9
        self.unlucky = {i for i in range(self.total) if self.draw.random() < 0.2}
        self.make = lambda: make_loop(
            self.collect,
            self.total,
            self.n_samples,
            filter=lambda g: (g.prompt.prompt_id not in self.unlucky, "unlucky"),
            max_rejected=10**6,
            trains=self.trains,
        )
        self.books = Books(dict.fromkeys(range(self.total), "unread"), {}, Counter(), [])
        self.saved: tuple[tuple[str, bytes], Books] | None = None
        self.seen: Counter[str] = Counter()
        self.loop = self.make()

    def book_returned(self) -> None:
        if not self.trains:
            self.books.reasons["generated only"] += len(self.books.of("assigned"))
        self.books.move("assigned", "trained" if self.trains else "dropped")

    def text(self) -> tuple[str, bytes]:
        """The state of the loop as JSON, and the samples beside it."""
        state = self.loop.state_dict()
        samples = state["ledger"].pop("samples")
        return json.dumps(state), samples

    def restore(self, text: tuple[str, bytes]) -> None:
        state = json.loads(text[0])
        state["ledger"]["samples"] = text[1]
        self.loop.load_state_dict(state)
        assert all(group.prompt.features for group in self.loop.ledger.groups()), "pictures are read again"

    def save(self) -> None:
        """What a checkpoint of this moment has to give back."""
        text = self.text()
        self.book_returned()
        books = copy.deepcopy(self.books)
        books.move("out", "partial")
        self.saved = text, books
        self.seen["saved in a rollout" if self.loop._busy else "saved"] += 1

    def load(self) -> None:
        assert self.saved is not None
        text, books = self.saved
        self.books, self.loop = copy.deepcopy(books), self.make()
        self.restore(text)
        assert self.text() == text
        self.seen["loaded"] += 1

    def check(self) -> None:
        ledger, books = self.loop.ledger, self.books
        views = {"out": ledger.active, "partial": ledger.waiting, "buffered": ledger.ready, "assigned": ledger.assigned}
        assert {state: ids(view) for state, view in views.items()} == {state: books.of(state) for state in views}
        assert ids(ledger.groups()) == sorted(i for view in views.values() for i in ids(view))
        assert ledger.handed_out == self.total - len(books.of("unread"))
        assert ledger.trained == len(books.of("trained"))
        assert ledger.dropped == books.reasons
        for group in ledger.groups():
            assert group.prompt.multimodal == {"image": [b"\x00\xff"]}
            for sample in group.samples:
                if sample.status.finished:
                    assert sample.tokens == books.tokens[group.prompt.prompt_id, sample.index]
                else:
                    assert (group.prompt.prompt_id, sample.index) not in books.tokens
                    # At rest nothing is half done.
                    assert not sample.tokens or books.state[group.prompt.prompt_id] == "out"

    # ------------------------------------------------------------------ inside a rollout

    async def collect(self, rollout: RolloutContext) -> list[SampleGroup]:
        taken: dict[int, SampleGroup] = {}
        for _ in range(self.draw.randint(1, 8)):
            await self.act(rollout, taken)
            self.check()
        whole = [g for i, g in taken.items() if self.books.state[i] in ("out", "buffered") and g.scored]
        batch = self.draw.sample(whole, self.draw.randint(0, min(3, len(whole))))
        for group in batch:
            self.books.state[group.prompt.prompt_id] = "assigned"
        return batch

    async def act(self, rollout: RolloutContext, taken: dict[int, SampleGroup]) -> None:  # noqa: C901  # one branch an event
        books, out = self.books, [taken[i] for i in self.books.of("out")]
        match self.draw.choice(["take", "take", "ready", "sample", "finish", "keep", "keep", "drop", "save", "break"]):
            case "take":
                n = self.draw.randint(1, 4)
                # Groups with tokens first: they have a deadline.
                with_tokens = {i for i, _ in books.tokens}
                waiting = sorted(books.of("partial"), key=lambda i: i not in with_tokens)
                expected = (waiting + books.of("unread"))[:n]
                new = rollout.take(n)
                assert ids(new) == expected
                taken |= {g.prompt.prompt_id: g for g in new}
                books.state |= dict.fromkeys(expected, "out")
            case "ready":
                new = rollout.chosen()
                assert ids(new) == books.of("buffered")[: rollout.settings.rollout_batch_size]
                taken |= {g.prompt.prompt_id: g for g in new}
            case "sample" if out:  # one gets a token, and is perhaps left half done
                sample = self.draw.choice(self.draw.choice(out).samples)
                if not sample.status.finished:
                    sample.append([self.draw.randrange(100)], [-1.0], 0)
                    if self.draw.random() < 0.5:
                        sample.status, sample.reward = SampleStatus.TRUNCATED, 0.5
                        books.tokens[sample.prompt.prompt_id, sample.index] = list(sample.tokens)
            case "finish" if out:
                group = finish(self.draw.choice(out), self.draw.randrange(100))
                books.tokens |= {(group.prompt.prompt_id, s.index): list(s.tokens) for s in group.samples}
            case "keep":
                groups = [g for i, g in taken.items() if books.state[i] in ("out", "buffered") and g.scored]
                if groups:
                    group = self.draw.choice(groups)
                    i = group.prompt.prompt_id
                    assert rollout.keep(group) == (i not in self.unlucky)
                    if i in self.unlucky:
                        self.dropped(i, "unlucky")
                    else:
                        books.state[i] = "buffered"
            case "drop" if taken:
                i = self.draw.choice(list(taken))
                if books.state[i] == "dropped":
                    with pytest.raises(LedgerError, match=f"prompt {i} cannot become dropped: it was closed already"):
                        rollout.drop(taken[i], "too hard")
                else:
                    rollout.drop(taken[i], "too hard")
                    self.dropped(i, "too hard")
            case "save":
                self.save()
            case "break" if self.draw.random() < 0.3:
                self.seen["broken"] += 1
                if self.draw.random() < 0.5:
                    raise Broken
                task = asyncio.current_task()
                assert task is not None
                task.cancel()
                await asyncio.sleep(0)

    def dropped(self, i: int, reason: str) -> None:
        self.books.state[i] = "dropped"
        self.books.reasons[reason] += 1
        self.books.untold.append(i)
        self.books.tokens = {key: tokens for key, tokens in self.books.tokens.items() if key[0] != i}

    # ------------------------------------------------------------------ between rollouts

    async def rollout(self, rollout_id: int) -> None:
        self.book_returned()
        task = asyncio.ensure_future(self.loop.generate(rollout_id, 0))
        (result,) = await asyncio.gather(task, return_exceptions=True)
        self.books.move("out", "partial")
        if isinstance(result, Broken | asyncio.CancelledError):
            return
        if isinstance(result, BaseException):
            raise result
        books = self.books
        assert ids(result.groups) == books.of("assigned")
        assert [d.prompt_id for d in result.dropped] == books.untold
        assert result.metrics["rollout/dropped"] == len(books.untold)
        books.untold = []
        at_rest = len(books.of("partial") + books.of("buffered"))
        assert result.metrics["rollout/buffered_groups"] == at_rest
        assert {name: n for name, n in result.metrics.items() if name.startswith("prompts/")} == {
            "prompts/out": len(result.groups),
            "prompts/buffered": at_rest,
            "prompts/trained": len(books.of("trained")),
            "prompts/dropped": len(books.of("dropped")),
        }

    async def run(self) -> None:
        for rollout_id in range(self.draw.randint(1, 6)):
            await self.rollout(rollout_id)
            self.check()
            match self.draw.choice(["", "", "book", "save", "load"]):
                case "book":
                    self.loop.book_returned()
                    self.book_returned()
                case "save":
                    self.save()
                case "load" if self.saved is not None:
                    self.load()
            self.check()
        self.draw = random.Random(0)
        await self.finish()

    async def finish(self) -> None:
        """Trains all that is left: then each prompt was trained or dropped, once."""

        async def everything(rollout: RolloutContext) -> list[SampleGroup]:
            groups = rollout.ledger.ready + [finish(g) for g in rollout.take(self.total + 1)]
            return [g for g in groups if rollout.keep(g)]

        text = self.text()
        self.book_returned()
        self.collect = everything  # type: ignore[method-assign]
        self.loop = self.make()
        self.restore(text)
        result = await self.loop.generate(99, 0)
        rest = [i for i, state in self.books.state.items() if state not in ("trained", "dropped")]
        # A group that is kept already was judged.
        unlucky = self.unlucky.intersection(rest)
        assert set(ids(result.groups)) == set(rest) - unlucky
        assert {d.prompt_id for d in result.dropped} == set(self.books.untold) | unlucky
        assert self.loop.exhausted
        self.loop.book_returned()
        self.loop.ledger.check(self.total)
        assert self.loop.ledger.groups() == []


@pytest.mark.parametrize("schedules", [300, pytest.param(1500, marks=pytest.mark.slow)])
async def test_any_schedule_keeps_each_prompt_in_one_state(make_loop: MakeLoop, schedules: int) -> None:
    """The slow one takes about 5 s of CPU time."""
    seen: Counter[str] = Counter()
    for seed in range(schedules):
        schedule = Schedule(make_loop, seed)
        try:
            await schedule.run()
        except BaseException as error:
            error.add_note(f"schedule {seed}")
            raise
        seen += schedule.seen
    assert min(seen[what] for what in ("saved", "saved in a rollout", "loaded", "broken")) > schedules // 15, seen


async def test_books_of_two_rollouts(make_loop: MakeLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    async def collect(rollout: RolloutContext) -> list[SampleGroup]:
        if rollout.rollout_id == 0:
            groups = rollout.take(5)
            rollout.drop(groups[3], "too long")
            return [finish(g) for g in groups[:3]]
        if rollout.rollout_id == 1:
            return [finish(g) for g in rollout.take(3)]
        rollout.drop(first, "too late")
        return []

    loop = make_loop(collect, 10)

    def books(metrics: dict[str, float]) -> dict[str, float]:
        return {name: n for name, n in metrics.items() if name.startswith("prompts/")}

    result = await loop.generate(0, 0)
    first = result.groups[0]
    assert books(result.metrics) == {
        "prompts/out": 3,
        "prompts/buffered": 1,
        "prompts/trained": 0,
        "prompts/dropped": 1,
    }
    monkeypatch.setattr(type(loop._source.drops), "unusable", 2)
    result = await loop.generate(1, 0)
    assert ids(result.groups) == [4, 5, 6]
    assert books(result.metrics) == {
        "prompts/bad_rows": 2,
        "prompts/out": 3,
        "prompts/buffered": 0,
        "prompts/trained": 3,
        "prompts/dropped": 1,
    }
    with pytest.raises(LedgerError, match="prompt 0 cannot become dropped: it was closed already"):
        await loop.generate(2, 0)


async def test_what_is_only_generated_is_not_booked_as_trained(make_loop: MakeLoop) -> None:
    async def collect(rollout: RolloutContext) -> list[SampleGroup]:
        return [finish(g) for g in rollout.take(2)]

    loop = make_loop(collect, 4, trains=False)
    await loop.generate(0, 0)
    assert loop.ledger.state_of(0) is PromptState.ASSIGNED
    loop.book_returned()
    assert loop.ledger.counts()["dropped/generated only"] == 2
    assert loop.ledger.trained == 0
    loop.book_returned()
    assert loop.ledger.dropped.total() == 2


async def test_a_damaged_state_is_refused_and_loads_nothing(make_loop: MakeLoop, tmp_path: Path) -> None:
    async def collect(rollout: RolloutContext) -> list[SampleGroup]:
        groups = rollout.take(3)
        rollout.keep(finish(groups[2]))
        return [finish(groups[0])]

    loop = make_loop(collect, 9)
    await loop.generate(0, 0)
    state = loop.state_dict()
    assert [(p["prompt"]["prompt_id"], p["state"]) for p in state["ledger"]["open"]] == [
        (1, "partial"),
        (2, "buffered"),
    ]
    other = make_loop(collect, 9)
    for damage, message in [
        (lambda opened: opened[1]["prompt"].update(prompt_id=1), r"prompts \[1\] are twice in it"),
        (lambda opened: opened[0]["prompt"].update(prompt_id=8), r"prompts \[8\] are not among the 3"),
        (lambda opened: opened[1].update(state="flying"), r"prompts \[2\] are in state 'flying'"),
        (lambda opened: opened.pop(), r"samples\.npz is of other groups: it has 2"),
    ]:
        damaged = copy.deepcopy(state)
        damage(damaged["ledger"]["open"])
        with pytest.raises(ValueError, match=message):
            other.load_state_dict(damaged)
    for odd in (state | {"dropped": 7}, state | {"dropped": [{}]}, {k: v for k, v in state.items() if k != "source"}):
        with pytest.raises(ValueError, match=r"state of the checkpoint is damaged: .*; load another checkpoint"):
            other.load_state_dict(odd)
    written = loop.save_state(tmp_path)
    for odd in (written | {"ledger": 7}, {k: v for k, v in written.items() if k != "ledger"}):
        with pytest.raises(ValueError, match=r"is damaged: .*; load another checkpoint"):
            other.load_state(odd, tmp_path)
    with pytest.raises(ValueError, match=r"samples\.npz cannot be read: .*; copy the checkpoint again"):
        other.load_state(written, tmp_path / "nothing")
    with pytest.raises(ValueError, match="is damaged: it is no object, but '\\[\\]'"):
        check_format([])
    assert ids((await other.generate(0, 0)).groups) == [0], "it starts with the first prompt"


@pytest.mark.parametrize(
    ("cursor", "message"),
    [(2, r"prompt 2 \(a:3\) is handed out twice"), (4, r"prompt 4 \(a:5\) is handed out where prompt 3 is the next")],
)
async def test_a_cursor_of_another_checkpoint_is_found_when_prompts_are_taken(
    make_loop: MakeLoop, cursor: int, message: str
) -> None:
    async def collect(rollout: RolloutContext) -> list[SampleGroup]:
        return [finish(g) for g in rollout.take(3)]

    loop = make_loop(collect, 9)
    await loop.generate(0, 0)
    state = loop.state_dict() | {"source": {"at": cursor}}
    resumed = make_loop(collect, 9)
    resumed.load_state_dict(state)
    with pytest.raises(LedgerError, match=message):
        await resumed.generate(1, 0)
