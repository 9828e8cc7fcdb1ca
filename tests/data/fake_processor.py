"""A processor that does what it is told; a module of its own, because spawned processes import it by name."""

import os
import threading
from pathlib import Path

import numpy as np


class Fake:
    """Takes orders as its ``audio``."""

    def __init__(self, marks=None):
        self.marks = marks
        self.finished = threading.Semaphore(0)

    def __call__(self, audio=None, return_tensors=None):
        order = audio[0]
        if order == "die":
            os._exit(7)
        if order == "die once" and not os.path.exists(self.marks):
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

    def __init__(self, marks=None, works=True):
        self.marks, self.works = marks, works

    def __call__(self):
        if not self.works:
            raise OSError("no weights")
        return Fake(self.marks)


class DieLoading:
    """The process dies while it loads."""

    def __call__(self):
        os._exit(9)
