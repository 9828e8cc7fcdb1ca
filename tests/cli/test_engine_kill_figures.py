"""What `tests/cli/gpu_engine_kill_check.py` says of the engines that go on while one is gone."""

from typing import Any

import pytest
from cli.gpu_engine_kill_check import others_of

LOG = "[  54.5 s] engine1 was lost (engine1 is gone): restarting it, 1 of 3; its requests go on at engine0, engine2\n"


def step(tokens: float, *busy: float) -> dict[str, Any]:
    """A step of two seconds."""
    shares = {f"async/engine_busy_share/engine{i}": share for i, share in enumerate(busy)}
    return {"time/step": 2.0, "rollout/tokens": tokens, "async/engine_busy_share": sum(busy) / len(busy), **shares}


def test_the_rate_is_that_of_the_time_with_requests() -> None:
    before = [step(3000, 0.5, 0.5, 0.5)]  # 3 s of an engine
    gone = [step(2000, 0.5, 0.5, 0.5), step(3000, 0.5, 0.0, 0.25), step(3000, 0.25, 0.0, 0.5)]  # the first has all
    assert others_of(LOG, 3, before, gone) == (
        "an engine that was busy made 1000 tokens/s before, each of the others 2000 while it was gone, "
        "in 2 steps of 2.0 s;"
    )


@pytest.mark.parametrize(
    ("log", "gone"),
    [
        (LOG, []),
        (LOG, [step(0, 0.5, 0.5, 0.5), step(0, 0.5, 0.0, 0.0), step(0, 0.5, 0.0, 0.0)]),
        (LOG + LOG.replace("engine1", "engine2"), [step(0, 0.5, 0.5, 0.5)]),
    ],
    ids=["no step", "one does nothing", "two lost"],
)
def test_others_that_do_not_go_on_are_a_fault(log: str, gone: list[dict[str, Any]]) -> None:
    assert others_of(log, 3, [step(3000, 0.5, 0.5, 0.5)], gone).startswith("FAIL ")
