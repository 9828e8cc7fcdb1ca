"""Digests of the pictures of a data set, to tell at a resume that one has changed."""

import hashlib
import os
import re
from collections.abc import Iterable
from typing import Any

from relax_data.errors import DataError
from relax_data.types import Prompt

_ROWS = 256
"""Rows that share a digest: so a message can say where to look, and a checkpoint of a million rows has 4000."""
OTHER_PICTURES = (
    "is another than at the checkpoint: an exact resume needs the same pictures; put it back, or start a new run from "
    "the saved weights (--hf-checkpoint instead of --load)"
)


class PictureDigests:
    """One digest for the pictures of each block of rows; none for blocks without pictures."""

    def __init__(self) -> None:
        self._blocks: dict[str, Any] = {}

    def add(self, prompt: Prompt) -> None:
        """Takes note of a prompt's pictures; prompts come in the order of the files."""
        digest = prompt.features.get("picture_digest")
        if digest is None:
            return
        file, _, line = prompt.source.rpartition(":")
        block = self._blocks.setdefault(_block(file, int(line)), hashlib.blake2b(digest_size=8))
        block.update(f"{line} ".encode() + digest.tobytes())

    def state(self) -> dict[str, str]:
        """The digest of each block by its name."""
        return {name: block.hexdigest() for name, block in self._blocks.items()}

    def check(self, saved: dict[str, str] | None) -> None:
        """Holds that the pictures are those of :meth:`state`.

        Args:
            saved: None, in checkpoints of before it was kept, says nothing.

        Raises:
            DataError: they are not; the message names the rows.
        """
        for name in self._changed(saved):
            raise DataError(f"{name}: a picture of theirs {OTHER_PICTURES}")

    def _changed(self, saved: dict[str, str] | None) -> list[str]:
        now = self.state()
        return [name for name, digest in (saved or {}).items() if now.get(name) != digest]

    def among_changed(self, saved: dict[str, str] | None, problems: Iterable[str]) -> list[str]:
        """Those problems, each of which begins with ``file:line``, of rows in blocks that are not as in ``saved``."""
        changed = set(self._changed(saved))
        places = ((problem, re.match(r"(.*?):([0-9]+): ", problem)) for problem in problems)
        return [problem for problem, place in places if place and _block(place[1], int(place[2])) in changed]


def _block(file: str, line: int) -> str:
    first = (line - 1) // _ROWS * _ROWS
    return f"{os.path.basename(file)}, rows {first + 1} to {first + _ROWS}"
