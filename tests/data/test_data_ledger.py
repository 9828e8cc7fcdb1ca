"""The prompt ledger: a run killed at any point trains every prompt once or has it dropped with a reason."""

import json
import random
from collections import Counter

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from relax_data.errors import DataError
from relax_data.prompts.ledger import LedgerError, PromptLedger, PromptState
from relax_data.prompts.open import open_prompts
from relax_data.settings import DataSettings
from relax_data.types import Prompt


def prompts(*prompt_ids):
    return [Prompt(i, 0, f"f.jsonl:{i + 1}", f"p{i}", [i]) for i in prompt_ids]


def test_the_life_of_prompts():
    ledger = PromptLedger()
    ledger.hand_out(prompts(0, 1, 2, 3, 4))
    ledger.interrupt([1])
    ledger.buffer([2])
    ledger.drop([3], "all rewards equal")
    ledger.train([0, 4])
    assert ledger.step == 1
    assert ledger.counts() == {
        "out": 0,
        "partial": 1,
        "buffered": 1,
        "trained": 2,
        "dropped": 1,
        "dropped/all rewards equal": 1,
    }
    assert [p.prompt_id for p in ledger.open()] == [1, 2]
    assert [p.prompt_id for p in ledger.open(PromptState.PARTIAL)] == [1]
    ledger.take_back([1, 2])
    assert ledger.state_of(1) is PromptState.OUT
    ledger.train([1, 2])
    ledger.check(5)
    with pytest.raises(LedgerError, match="6 prompts were handed out and 5 are accounted for"):
        ledger.check(6)


def test_wrong_moves_are_refused_and_change_nothing():
    ledger = PromptLedger()
    ledger.hand_out(prompts(0, 1, 2))
    ledger.train([0])
    ledger.interrupt([1])
    before = json.dumps(ledger.state_dict())
    for move, message in [
        (lambda: ledger.train([2, 0]), "prompt 0 cannot become trained: it was closed already"),
        (lambda: ledger.train([2, 1]), r"prompt 1 \(f.jsonl:2\) cannot become trained: it is partial"),
        (lambda: ledger.buffer([2, 9]), "prompt 9 cannot become buffered: it was never handed out"),
        (lambda: ledger.train([2, 2]), "named twice"),
        (lambda: ledger.hand_out(prompts(3, 0)), r"prompt 0 \(f.jsonl:1\) is handed out twice"),
        (lambda: ledger.hand_out(prompts(3, 3)), "handed out twice"),
        (lambda: ledger.hand_out(prompts(3, 1)), "handed out twice"),
    ]:
        with pytest.raises(LedgerError, match=message):
            move()
        assert json.dumps(ledger.state_dict()) == before
    with pytest.raises(ValueError, match="for a reason"):
        ledger.drop([2], "")


def test_closed_prompts_take_no_memory():
    ledger = PromptLedger()
    for i in range(0, 5000, 5):
        ledger.hand_out(prompts(*range(i, i + 5)))
        ledger.train(range(i, i + 5))
    assert len(json.dumps(ledger.state_dict())) < 150
    ledger.hand_out(prompts(5000, 5001))
    ledger.train([5001])
    assert ledger.state_dict()["closed"] == [[5001, 5002]]


def test_saved_with_the_model_and_refused_with_another(tmp_path):
    ledger = PromptLedger()
    ledger.hand_out(prompts(0, 1, 2))
    ledger.train([1])
    path = tmp_path / "ledger.json"
    ledger.save(path)
    again = PromptLedger.load(path, step=1)
    assert again.state_dict() == ledger.state_dict()
    assert again.open() == ledger.open()
    assert [p.name for p in tmp_path.iterdir()] == ["ledger.json"]
    with pytest.raises(DataError, match="after 1 training steps and the model has 2"):
        PromptLedger.load(path, step=2)
    path.write_text(path.read_text()[:-10])
    with pytest.raises(DataError, match=r"ledger.json is no readable prompt ledger"):
        PromptLedger.load(path)


def test_a_save_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    ledger = PromptLedger()
    path = tmp_path / "ledger.json"
    ledger.save(path)
    ledger.hand_out(prompts(0))

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        ledger.save(path)
    assert PromptLedger.load(path).open() == []
    assert [p.name for p in tmp_path.iterdir()] == ["ledger.json"]


def test_recover_gives_what_nobody_holds():
    ledger = PromptLedger()
    ledger.hand_out(prompts(0, 1, 2))
    ledger.interrupt([0])
    ledger.buffer([1])
    restored = PromptLedger()
    restored.load_state_dict(json.loads(json.dumps(ledger.state_dict())))
    # The buffer of the checkpoint kept the partial one, the buffered one was lost.
    assert [p.prompt_id for p in restored.recover(held=[0])] == [1, 2]
    assert restored.state_of(0) is PromptState.PARTIAL
    assert restored.state_of(1) is PromptState.OUT
    with pytest.raises(LedgerError, match="the buffer holds prompt 7"):
        restored.recover(held=[7])


class Killed(Exception):
    pass


class Run:
    """A trainer with over-sampling, interruption, filter and checkpoints, that can be killed before any operation."""

    BATCH, EXTRA = 4, 2

    def __init__(self, open_source, folder, seed, kills):
        self.open_source, self.folder, self.kills = open_source, folder, set(kills)
        self.rng = random.Random(seed)
        self.operations = 0
        self.disk = None

    def step(self):
        self.operations += 1
        if self.operations in self.kills:
            raise Killed

    def start(self):
        self.source, self.ledger, self.buffer, self.model = self.open_source(), PromptLedger(), [], []
        self.again = []
        if self.disk is not None:
            cursor, buffer, model = json.loads(self.disk)
            self.source.load_state_dict(cursor)
            self.ledger = PromptLedger.load(self.folder / f"ledger{len(model)}.json", step=len(model))
            self.model = model
            # Only partial and buffered samples are in the checkpoint; what was out is generated again.
            self.buffer = [i for i in buffer if self.ledger.state_of(i) is not PromptState.OUT]
            self.again = [p.prompt_id for p in self.ledger.recover(held=self.buffer)]

    def rollout(self):
        """Takes the buffer first, then lost ones, then new prompts; ends with a batch and leftovers in the buffer."""
        ready = [i for i in self.buffer if self.ledger.state_of(i) is PromptState.BUFFERED]
        partial = [i for i in self.buffer if self.ledger.state_of(i) is PromptState.PARTIAL]
        self.buffer = []
        self.ledger.take_back(partial)
        self.step()
        running = partial + self.again
        self.again = []
        while len(ready) < self.BATCH:
            if not running:
                new = self.source.next(self.BATCH + self.EXTRA)
                self.step()
                self.ledger.hand_out(new)
                running = [p.prompt_id for p in new]
                if not new:
                    break
            done = running.pop(self.rng.randrange(len(running)))
            self.step()
            if self.rng.random() < 0.2:
                self.ledger.drop([done], self.rng.choice(["all rewards equal", "generation failed"]))
            else:
                self.ledger.buffer([done])
                ready.append(done)
        self.ledger.interrupt(running)
        self.step()
        batch, rest = ready[: self.BATCH], ready[self.BATCH :]
        self.buffer = rest + running
        return batch

    def train(self, batch):
        self.step()
        self.ledger.train(batch)
        self.model.append(batch)
        self.step()
        if self.rng.random() < 0.5:
            self.ledger.save(self.folder / f"ledger{len(self.model)}.json")
            self.step()
            # The commit of a checkpoint is one rename; before it the old one counts.
            self.disk = json.dumps([self.source.state_dict(), self.buffer, self.model])
        self.step()

    def to_the_end(self):
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
    write_jsonl, tokenizer, tmp_path, n, seed, kills, streaming
):
    path = write_jsonl([{"input": f"q{i}", "id": i} for i in range(n)])
    options = DataSettings(prompt_data=(path,), rollout_shuffle=True, use_streaming_dataset=streaming)
    run = Run(lambda: open_prompts(options, tokenizer, num_epoch=2), tmp_path, seed, kills)
    run.to_the_end()
    trained = Counter(i for batch in run.model for i in batch)
    assert set(trained.values()) <= {1}
    assert len(trained) == run.ledger.trained
    run.ledger.check(2 * n)
    assert run.ledger.open() == []
    assert len(trained) + run.ledger.dropped.total() == 2 * n


def test_killed_at_every_single_point(write_jsonl, tokenizer, tmp_path):
    path = write_jsonl([{"input": f"q{i}"} for i in range(11)])
    options = DataSettings(prompt_data=(path,), rollout_shuffle=True)

    def finished(kills):
        run = Run(lambda: open_prompts(options, tokenizer, num_epoch=1), tmp_path, 5, kills)
        run.to_the_end()
        run.ledger.check(11)
        assert run.ledger.trained + run.ledger.dropped.total() == 11
        assert max(Counter(i for batch in run.model for i in batch).values()) == 1
        return run.operations

    for point in range(1, finished([]) + 1):
        finished([point])
