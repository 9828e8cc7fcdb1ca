"""Every prompt of a run is booked: through the real source and loop state, over checkpoints and resumes."""

import asyncio
import json
import random
from typing import Any

import pytest
from relax_cli.config.resolution import resolve
from relax_cli.workers.accounts import BookedSource
from relax_cli.workers.rollout import RolloutActor
from relax_data.prompts.ledger import LedgerError
from relax_data.types import Prompt, SampleGroup
from relax_rollout.loop.context import DroppedPrompt
from relax_rollout.loop.rollout_loop import RolloutResult


class Numbers:
    """Prompts 0, 1, 2, ... up to ``n``."""

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


def result(groups: list[Prompt], dropped: list[Prompt]) -> RolloutResult:
    return RolloutResult(
        groups=[SampleGroup.start(p, 1) for p in groups],
        metrics={},
        dropped=[DroppedPrompt(prompt_id=p.prompt_id, source=p.source, reason="too long") for p in dropped],
    )


def test_books_of_two_rollouts() -> None:
    source = BookedSource(Numbers(10))  # type: ignore[arg-type]
    taken = source.next(5)
    counts = source.book(result(taken[:3], taken[3:4]))
    assert counts == {"prompts/out": 3, "prompts/buffered": 1, "prompts/trained": 0, "prompts/dropped": 1}
    source.settle()
    counts = source.book(result([*taken[4:], *source.next(2)], []))
    assert counts == {"prompts/out": 3, "prompts/buffered": 0, "prompts/trained": 3, "prompts/dropped": 1}
    with pytest.raises(LedgerError, match="prompt 0 cannot become dropped: it was closed already"):
        source.book(result([], taken[:1]))


def test_what_is_only_generated_is_not_booked_as_trained() -> None:
    source = BookedSource(Numbers(4), trains=False)  # type: ignore[arg-type]
    source.book(result(source.next(2), []))
    source.settle()
    assert source.ledger.counts()["dropped/generated only"] == 2
    assert source.ledger.trained == 0


@pytest.mark.parametrize("seed", range(20))
def test_killed_between_checkpoints_every_prompt_is_booked_once(seed: int) -> None:
    draw, total = random.Random(seed), 40
    source, held, saved = BookedSource(Numbers(total)), list[Prompt](), None  # type: ignore[arg-type]
    while source.ledger.trained + source.ledger.dropped.total() < total:
        pool = held + source.next(draw.randint(1, 6))
        draw.shuffle(pool)
        cut = draw.randint(0, len(pool))
        rest = draw.randint(cut, len(pool))
        source.book(result(pool[:cut], pool[cut:rest]))
        held = pool[rest:]
        source.settle()
        if draw.random() < 0.3:
            saved = json.dumps([source.state_dict(), source.ledger_state(), [p.prompt_id for p in held]])
        elif saved is not None and draw.random() < 0.2:  # a crash
            source = BookedSource(Numbers(total))  # type: ignore[arg-type]
            position, ledger, prompt_ids = json.loads(saved)
            source.load_state_dict(position)
            source.load_ledger(ledger, prompt_ids)
            held = [p for p in source.ledger.open() if p.prompt_id in prompt_ids]
            assert all(p.multimodal == {"image": [b"\x00\xff"]} for p in held)
            saved = None
    source.ledger.check(total)
    assert source.ledger.open() == []


def test_the_actor_saves_books_and_loop_together(task: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = resolve(task.flags(), {})

    async def run() -> None:
        actor = RolloutActor(config)
        await actor.connect([])
        taken = actor._loop._buffer.take(3)
        for group in taken[1:]:
            actor._loop._buffer.put_back(group)
        actor._loop._buffer.release(taken[0])
        actor._source.book(RolloutResult(groups=taken[:1], metrics={}, dropped=[]))
        state = json.loads(json.dumps(await actor.state_dict()))
        again = RolloutActor(config)
        await again.connect([])
        await again.load_state_dict(state)
        assert again._source.ledger.trained == 1
        assert await again.state_dict() == state
        assert [p.prompt_id for p in again._source.next(1)] == [3]
        state["loop"]["buffer"]["waiting"].pop()
        with pytest.raises(ValueError, match=r"disagree about prompts \[2\]"):
            await again.load_state_dict(state)

    asyncio.run(run())
