"""First steps of an actor's process."""

import gc
import weakref

from relax_cli.workers.process import spare_what_stays


class Knot:
    """Refers to itself, so that only a collection frees it."""

    def __init__(self) -> None:
        self.itself = self


def test_what_stays_is_not_collected_again_and_garbage_goes_first() -> None:
    knot = weakref.ref(Knot())
    kept = [Knot()]
    try:
        spare_what_stays()
        assert knot() is None, "garbage is collected, not kept"
        assert gc.get_freeze_count() > 1000, "the modules of this process"
        assert not any(thing is kept[0] for thing in gc.get_objects()), "no collection looks at it"
    finally:
        gc.unfreeze()
    assert any(thing is kept[0] for thing in gc.get_objects())
    spare_what_stays()  # as it was: the tests' own process spares the modules too
