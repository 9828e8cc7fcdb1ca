"""Step windows on their two clocks."""

import pytest
from relax_profiling.recorders.windows import LaunchOffset, RolloutId, StepWindow
from relax_profiling.settings import SGLangProfileSettings, TrainProfileSettings


def test_both_ends_are_inclusive() -> None:
    window = StepWindow(LaunchOffset, first=2, last=4)
    assert [i for i in range(7) if LaunchOffset(i) in window] == [2, 3, 4]
    assert not window.is_over(LaunchOffset(4))
    assert window.is_over(LaunchOffset(5))


def test_a_list_wins_over_a_range() -> None:
    settings = SGLangProfileSettings(
        sglang_profile=True, sglang_profile_step_start=0, sglang_profile_step_end=1, sglang_profile_steps=(2, 5, 10)
    )
    window = settings.window()
    assert [i for i in range(12) if RolloutId(i) in window] == [2, 5, 10]
    assert window.is_over(RolloutId(11))
    assert not window.is_over(RolloutId(10))


@pytest.mark.parametrize(
    ("start", "end", "inside"),
    [(None, None, range(0, 9)), (3, None, range(3, 9)), (None, 3, range(0, 4)), (2, 2, range(2, 3))],
)
def test_open_ends(start: int | None, end: int | None, inside: range) -> None:
    settings = SGLangProfileSettings(sglang_profile=True, sglang_profile_step_start=start, sglang_profile_step_end=end)
    assert [i for i in range(9) if RolloutId(i) in settings.window()] == list(inside)


def test_a_window_refuses_the_other_clock() -> None:
    with pytest.raises(TypeError, match="counts in LaunchOffset, not in RolloutId"):
        RolloutId(3) in StepWindow(LaunchOffset, first=2, last=4)  # type: ignore[operator]  # noqa: B015
    with pytest.raises(TypeError, match="counts in RolloutId, not in int"):
        3 in TrainProfileToRollout  # type: ignore[operator]  # noqa: B015


TrainProfileToRollout = StepWindow(RolloutId, first=0)


@pytest.mark.parametrize(
    ("bounds", "said"),
    [
        ({"first": -1}, "negative"),
        ({"first": 4, "last": 2}, "ends at 2 before it starts at 4"),
        ({"steps": frozenset()}, "empty"),
        ({"steps": frozenset({3, -2})}, "-2 is negative"),
    ],
)
def test_impossible_windows_say_what_is_wrong(bounds: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        StepWindow(RolloutId, **bounds)


def test_the_training_window_is_that_of_the_flags() -> None:
    window = TrainProfileSettings(use_pytorch_profiler=True, profile_step_start=2, profile_step_end=4).window()
    assert window.counter is LaunchOffset
    assert [i for i in range(7) if LaunchOffset(i) in window] == [2, 3, 4]
