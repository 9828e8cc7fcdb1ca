"""The prompt ledger: a run killed at any point trains every prompt once or has it dropped with a reason."""

import base64
import copy
import json
import random
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from relax_data.errors import DataError
from relax_data.prompts.ledger import LedgerError, PromptLedger, PromptState
from relax_data.prompts.open import open_prompts
from relax_data.prompts.source import PromptSource
from relax_data.settings import DataSettings
from relax_data.types import Prompt, SampleGroup, SampleStatus


def groups(*prompt_ids: int, scored: bool = True) -> list[SampleGroup]:
    """Groups of one sample, whole and scored unless told otherwise."""
    made = [SampleGroup.start(Prompt(i, 0, f"f.jsonl:{i + 1}", f"p{i}", [i]), 1) for i in prompt_ids]
    return [finish(g) for g in made] if scored else made


def finish(group: SampleGroup) -> SampleGroup:
    for sample in group.samples:
        if not sample.status.finished:
            sample.append([7, 1], [-0.5, -0.25], 3)
            sample.status, sample.reward = SampleStatus.COMPLETED, 1.0
    group.start_version = 3
    return group


def ids(view: Iterable[SampleGroup]) -> list[int]:
    return [g.prompt.prompt_id for g in view]


def copied(ledger: PromptLedger) -> PromptLedger:
    """The ledger after a checkpoint and a resume."""
    again = PromptLedger()
    again.load_state_dict(through_json(ledger.state_dict()))
    return again


def through_json(state: dict[str, Any]) -> dict[str, Any]:
    """The state after a checkpoint, which has the arrays of the samples in a file of their own."""
    words = {name: value for name, value in state.items() if name != "samples"}
    read: dict[str, Any] = json.loads(json.dumps(words))
    return read | {"samples": state["samples"]}


def test_the_life_of_prompts() -> None:
    ledger = PromptLedger()
    ledger.hand_out(groups(0, 1, 2, 3, 4))
    ledger.interrupt([1])
    ledger.buffer([2, 4])
    ledger.drop([3], "all rewards equal")
    ledger.assign([0, 4])
    assert (ids(ledger.active), ids(ledger.waiting), ids(ledger.ready), ids(ledger.assigned)) == ([], [1], [2], [0, 4])
    ledger.train([0, 4])
    assert ledger.step == 1
    assert ledger.counts() == {
        "out": 0,
        "partial": 1,
        "buffered": 1,
        "assigned": 0,
        "trained": 2,
        "dropped": 1,
        "dropped/all rewards equal": 1,
    }
    assert ids(ledger.groups()) == [1, 2]
    assert ids(ledger.groups(PromptState.PARTIAL)) == [1]
    ledger.interrupt([2])  # its samples got too old
    ledger.take_back([1, 2])
    assert ledger.state_of(1) is PromptState.OUT
    assert ids(ledger.active) == [1, 2]
    ledger.assign([1, 2])
    ledger.train([1, 2])
    assert ledger.group(1) is None
    assert ledger.state_of(1) is None
    ledger.check(5)
    with pytest.raises(LedgerError, match="6 prompts were handed out and 5 are accounted for"):
        ledger.check(6)


def test_wrong_moves_are_refused_and_change_nothing() -> None:
    ledger = PromptLedger()
    ledger.hand_out(groups(0, 1, 2))
    ledger.hand_out(groups(3, scored=False))
    ledger.assign([0])
    ledger.train([0])
    ledger.interrupt([1])
    state, states = ledger.state_dict(), [ledger.state_of(i) for i in range(5)]
    for move, message in [
        (lambda: ledger.assign([2, 0]), "prompt 0 cannot become assigned: it was closed already"),
        (lambda: ledger.assign([2, 1]), r"prompt 1 \(f.jsonl:2\) cannot become assigned: it is partial"),
        (lambda: ledger.train([2]), r"prompt 2 \(f.jsonl:3\) cannot become trained: it is out"),
        (lambda: ledger.take_back([1, 2]), r"prompt 2 \(f.jsonl:3\) cannot become out: it is out"),
        (lambda: ledger.interrupt([2, 1]), "cannot become partial: it is partial"),
        (lambda: ledger.buffer([2, 9]), "prompt 9 cannot become buffered: it was never handed out"),
        (lambda: ledger.buffer([2, 3]), r"prompt 3 \(f.jsonl:4\) cannot become buffered: its group is not whole"),
        (lambda: ledger.assign([2, 3]), r"prompt 3 \(f.jsonl:4\) cannot become assigned: its group is not whole"),
        (lambda: ledger.assign([2, 2]), "named twice"),
        (lambda: ledger.drop([-1], "why"), "prompt -1 cannot become dropped: it was never handed out"),
        (lambda: ledger.hand_out(groups(4, 0)), r"prompt 0 \(f.jsonl:1\) is handed out twice"),
        (lambda: ledger.hand_out(groups(4, 4)), "handed out twice"),
        (lambda: ledger.hand_out(groups(4, 1)), "handed out twice"),
        (lambda: ledger.hand_out(groups(4, 6)), r"prompt 6 \(f.jsonl:7\) is handed out where prompt 5 is the next"),
    ]:
        with pytest.raises(LedgerError, match=message):
            move()
        assert ledger.state_dict() == state
        assert [ledger.state_of(i) for i in range(5)] == states
    with pytest.raises(ValueError, match="for a reason"):
        ledger.drop([2], "")


def test_closed_prompts_take_no_memory() -> None:
    ledger = PromptLedger()
    for i in range(0, 5000, 5):
        ledger.hand_out(groups(*range(i, i + 5)))
        ledger.assign(range(i, i + 5))
        ledger.train(range(i, i + 5))
    state = ledger.state_dict()
    assert len(state.pop("samples")) < 4096
    assert len(json.dumps(state)) < 150


def test_a_resumed_ledger_has_every_open_group_at_rest() -> None:
    ledger = PromptLedger()
    ledger.hand_out(groups(0, 1, 2))
    ledger.hand_out(groups(3, 4, scored=False))
    ledger.interrupt([0, 3])
    ledger.buffer([1])
    ledger.assign([2])
    again = copied(ledger)
    assert again.groups() == ledger.groups()
    # 4 was being generated, 2 was assigned to a step that the saved model has not made.
    assert (ids(again.waiting), ids(again.ready)) == ([0, 3, 4], [1, 2])
    assert again.state_dict() == ledger.state_dict()
    again.hand_out(groups(5))
    again.drop([3], "filter")
    assert ids(ledger.groups()) == [0, 1, 2, 3, 4], "the two share nothing"


OF_A_LOST_MODULE = {"__object__": base64.b64encode(b"cno_such_module\nThing\n.").decode()}


def change(number: int, **fields: Any) -> Callable[[Any], None]:
    return lambda opened: opened[number].update(fields)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda opened: opened.append(copy.deepcopy(opened[1])), "samples.npz is of other groups: it has 3"),
        (lambda opened: opened[1]["prompt"].update(prompt_id=1), r"prompts \[1\] are twice in it"),
        (lambda opened: opened[0]["prompt"].update(prompt_id=7), r"prompts \[7\] are not among the 4 that were handed"),
        (lambda opened: opened[0]["prompt"].update(prompt_id=-1), r"prompts \[-1\] are not among the 4"),
        (change(1, state="flying"), r"prompts \[2\] are in state 'flying', which no saved prompt has"),
        (change(1, state="trained"), r"prompts \[2\] are in state 'trained', which no saved prompt has"),
        (change(2, state="buffered"), r"prompts \[3\] are buffered, but their groups are not whole and scored"),
        (lambda opened: opened.pop(), "samples.npz is of other groups: it has 3"),
        (lambda opened: opened[0]["samples"].pop(), "samples.npz is of other groups: it has 3 with 3 samples, and 3 w"),
        (lambda opened: opened[0].pop("samples"), "KeyError"),
        (lambda opened: opened[0]["prompt"].update(label={"__object__": ""}), "cannot be read back: EOFError"),
        (
            lambda opened: opened[0]["prompt"].update(label={"__object__": "AAAA"}),
            "cannot be read back: UnpicklingError",
        ),
        (
            lambda opened: opened[0]["prompt"].update(label=OF_A_LOST_MODULE),
            "cannot be read back: UnpicklingError: it names no_such_module",
        ),
    ],
)
def test_a_damaged_state_is_refused_with_its_prompts_and_changes_nothing(
    damage: Callable[[Any], Any], message: str
) -> None:
    ledger = PromptLedger()
    ledger.hand_out(groups(0, 1, 2))
    ledger.hand_out(groups(3, scored=False))
    ledger.assign([0])
    ledger.train([0])
    ledger.buffer([1])
    state = through_json(ledger.state_dict())
    damage(state["open"])
    other = PromptLedger()
    other.hand_out(groups(0))
    before = other.state_dict()
    with pytest.raises(DataError, match=f"ledger is damaged: .*{message}.*; load another checkpoint"):
        other.load_state_dict(state)
    assert other.state_dict() == before


class Killed(Exception):
    pass


class Run:
    """A trainer with over-sampling, interruption, filter and checkpoints, that can be killed before any operation."""

    BATCH, EXTRA = 4, 2

    def __init__(self, open_source: Callable[[], PromptSource], seed: int, kills: list[int]) -> None:
        self.open_source, self.kills = open_source, set(kills)
        self.rng = random.Random(seed)
        self.operations = 0
        self.disk: tuple[str, bytes] | None = None
        self.model: list[list[int]] = []

    def step(self) -> None:
        self.operations += 1
        if self.operations in self.kills:
            raise Killed

    def start(self) -> None:
        self.source, self.ledger, self.model = self.open_source(), PromptLedger(), []
        if self.disk is not None:
            text, samples = self.disk
            cursor, ledger, self.model = json.loads(text)
            self.source.load_state_dict(cursor)
            self.ledger.load_state_dict(ledger | {"samples": samples})

    def rollout(self) -> list[int]:
        """Goes on with what was interrupted, then new prompts; ends with a batch, and the surplus at rest."""
        running = ids(self.ledger.waiting)
        self.ledger.take_back(running)
        self.step()
        while len(self.ledger.ready) < self.BATCH:
            if not running:
                new = [SampleGroup.start(p, 1) for p in self.source.next(self.BATCH + self.EXTRA)]
                self.step()
                self.ledger.hand_out(new)
                running = ids(new)
                if not new:
                    break
            done = running.pop(self.rng.randrange(len(running)))
            group = self.ledger.group(done)
            assert group is not None
            finish(group)
            self.step()
            if self.rng.random() < 0.2:
                self.ledger.drop([done], self.rng.choice(["all rewards equal", "generation failed"]))
            else:
                self.ledger.buffer([done])
        self.ledger.interrupt(running)
        self.step()
        batch = ids(self.ledger.ready)[: self.BATCH]
        self.ledger.assign(batch)
        return batch

    def train(self, batch: list[int]) -> None:
        self.step()
        if self.rng.random() < 0.1:  # an emergency checkpoint before the step: the batch is trained after a resume
            self.save()
        self.ledger.train(batch)
        self.model.append(batch)
        self.step()
        if self.rng.random() < 0.5:
            self.save()
        self.step()

    def save(self) -> None:
        ledger = self.ledger.state_dict()
        samples = ledger.pop("samples")
        saved = json.dumps([self.source.state_dict(), ledger, self.model]), samples
        self.step()
        # The commit of a checkpoint is one rename; before it the old one counts.
        self.disk = saved

    def to_the_end(self) -> None:
        while True:
            try:
                self.start()
                while batch := self.rollout():
                    self.train(batch)
                return
            except Killed:
                continue


@hypothesis_settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    n=st.integers(1, 40),
    seed=st.integers(0, 10**6),
    kills=st.lists(st.integers(1, 300), max_size=6),
    streaming=st.booleans(),
)
def test_killed_anywhere_every_prompt_is_trained_once_or_dropped(
    write_jsonl: Callable[..., str], tokenizer: Any, n: int, seed: int, kills: list[int], streaming: bool
) -> None:
    path = write_jsonl([{"input": f"q{i}", "id": i} for i in range(n)])
    options = DataSettings(prompt_data=(path,), rollout_shuffle=True, use_streaming_dataset=streaming)
    run = Run(lambda: open_prompts(options, tokenizer, num_epoch=2), seed, kills)
    run.to_the_end()
    trained = Counter(i for batch in run.model for i in batch)
    assert set(trained.values()) <= {1}
    assert len(trained) == run.ledger.trained
    run.ledger.check(2 * n)
    assert run.ledger.groups() == []
    assert len(trained) + run.ledger.dropped.total() == 2 * n


def test_killed_at_every_single_point(write_jsonl: Callable[..., str], tokenizer: Any) -> None:
    path = write_jsonl([{"input": f"q{i}"} for i in range(11)])
    options = DataSettings(prompt_data=(path,), rollout_shuffle=True)

    def finished(kills: list[int]) -> int:
        run = Run(lambda: open_prompts(options, tokenizer, num_epoch=1), 5, kills)
        run.to_the_end()
        run.ledger.check(11)
        assert run.ledger.trained + run.ledger.dropped.total() == 11
        assert max(Counter(i for batch in run.model for i in batch).values()) == 1
        return run.operations

    for point in range(1, finished([]) + 1):
        finished([point])
