"""What the terminal says of an error that came through Ray."""

import pytest
from relax_cli.run.launch import explanation


def test_the_message_stands_without_the_traceback_below_it() -> None:
    error = ValueError(
        "a.jsonl:7 response 0: my:reward raised KeyError: 'x'\nTraceback (most recent call last):\n  File"
    )
    assert explanation(error) == "a.jsonl:7 response 0: my:reward raised KeyError: 'x'"
    assert explanation(RuntimeError("several\nlines")) == "RuntimeError: several\nlines"


@pytest.mark.ray
@pytest.mark.slow
def test_what_an_actor_raised_is_found_below_rays_wrapping(ray_cluster: None) -> None:
    import ray

    class Unpicklable(Exception):
        def __init__(self) -> None:
            super().__init__("cannot travel")
            self.handle = open("/dev/null")  # noqa: SIM115 - a file cannot be pickled

    @ray.remote(num_cpus=0)
    def fail(unpicklable: bool) -> None:
        if unpicklable:
            raise Unpicklable
        raise ValueError("--lr -1: must be positive")

    with pytest.raises(ValueError, match="must be positive") as plain:
        ray.get(fail.remote(False), timeout=300)
    assert explanation(plain.value) == "--lr -1: must be positive"
    with pytest.raises(ray.exceptions.RayError) as wrapped:
        ray.get(fail.remote(True), timeout=300)
    assert "cannot travel" in explanation(wrapped.value)
    assert "\n" not in explanation(wrapped.value)
