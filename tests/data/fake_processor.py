"""A processor that does what it is told; a module of its own, because spawned processes import it by name."""

import os
import threading
from pathlib import Path
from typing import Any

import numpy as np


class Fake:
    """Takes orders as its ``audio``."""

    def __init__(self, marks: str | None = None) -> None:
        self.marks = marks
        self.finished = threading.Semaphore(0)

    def __call__(self, audio: Any = None, return_tensors: Any = None) -> Any:
        order = audio[0]
        if order == "die":
            os._exit(7)
        if order == "die once" and self.marks is not None and not os.path.exists(self.marks):
            Path(self.marks).touch()
            os._exit(7)
        if order == "hang":
            threading.Event().wait()
        if order == "raise":
            raise ArithmeticError("no such thing")
        if order == "exit":
            raise SystemExit(3)
        odd = {
            "objects": {"a": np.array([None, "x"], dtype=object)},
            "records": {"a": np.zeros(2, dtype=[("x", "i4")])},
            "ragged": {"a": [[1], [1, 2]]},
            "list": [1],
        }
        if order in odd:
            return odd[order]
        if order == "after the next":
            assert self.finished.acquire(timeout=300)
        else:
            self.finished.release()
        return {"pid": np.array([os.getpid()]), "empty": np.zeros((0, 3), np.int16), "order": np.array(list(order))}


class LoadFake:
    """Loads one, or fails to."""

    def __init__(self, marks: str | None = None, works: bool = True) -> None:
        self.marks, self.works = marks, works

    def __call__(self) -> Any:
        if not self.works:
            raise OSError("no weights")
        return Fake(self.marks)


class DieLoading:
    """The process dies while it loads."""

    def __call__(self) -> Any:
        os._exit(9)
