"""The learning rate of each optimizer step."""

from types import SimpleNamespace

import pytest
from relax_train.backend.optimizer import Schedule


def rates(steps: int, *, warmup: int, style: str = "constant", decay: int = 100, skip: int = 0) -> list[float]:
    """The rates of ``steps`` steps at a largest rate of 1, after ``skip`` steps that a checkpoint counts."""
    group: dict[str, float] = {"lr": 0.0}
    options = {"lr_decay_style": style, "lr_decay_steps": decay, "start_wd": 0.0, "end_wd": 0.0, "wd_incr_steps": 0}
    schedule = Schedule(
        SimpleNamespace(param_groups=[group]),
        init_lr=0.0,
        max_lr=1.0,
        min_lr=0.0,
        lr_warmup_steps=warmup,
        wd_incr_style="constant",
        **options,
    )
    if skip:
        schedule.load_state_dict({**schedule.state_dict(), "num_steps": skip})
    found = []
    for _ in range(steps):
        found.append(group["lr"])
        schedule.step(increment=1)
    return found


@pytest.mark.parametrize("warmup", [1, 3, 10])
def test_step_i_of_n_warm_up_steps_has_i_over_n_of_the_rate(warmup: int) -> None:
    expected = [i / warmup for i in range(1, warmup + 1)]
    assert rates(warmup + 2, warmup=warmup) == pytest.approx([*expected, 1.0, 1.0])


def test_a_resume_within_the_warm_up_goes_on_in_it() -> None:
    assert rates(3, warmup=4, skip=2) == pytest.approx([0.75, 1.0, 1.0])


def test_without_warm_up_the_first_step_has_the_whole_rate() -> None:
    assert rates(2, warmup=0) == [1.0, 1.0]


def test_the_decay_ends_where_it_did() -> None:
    assert rates(7, warmup=2, style="linear", decay=6) == pytest.approx([0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0])
