"""Pictures of packed samples: which token each of their pieces belongs to, and the positions of all tokens.

The positions are those of Qwen2-VL (arXiv 2409.12191, section 2.1): three numbers a token, time, height and width. Of
text all three are the same and count on; the pieces of a picture share the time, and count rows and columns from it;
the text behind goes on after the largest of them.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from relax_train.models.vision.shape import VisionShape


class PictureRow(Protocol):
    """Samples with pictures: what the processor made of those of each, by its place; none where it has none."""

    @property
    def pixel_values(self) -> Sequence[np.ndarray] | Mapping[int, np.ndarray]:
        """float32 ``[patches, numbers of a patch]``."""
        ...

    @property
    def image_grid_thw(self) -> Sequence[np.ndarray] | Mapping[int, np.ndarray]:
        """int64 ``[pictures, 3]``: frames, rows and columns of patches of each picture."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pictures:
    """The pictures of one packed row. ``local`` are the positions that a context-parallel rank holds.

    Attributes:
        pixel_values: float32 ``[patches, numbers of a patch]``, of all pictures one after another; pictures that
            several samples share are there once.
        image_grid_thw: int64 ``[pictures, 3]``.
        positions: int64 ``[3, local]``: time, height and width of each token.
        slots: int64 ``[m]``, local positions of the tokens that stand for pieces of pictures.
        pieces: int64 ``[m]``, number of the piece that each of them stands for, in the order of the pictures.
    """

    pixel_values: NDArray[np.float32]
    image_grid_thw: NDArray[np.int64]
    positions: NDArray[np.int64]
    slots: NDArray[np.int64]
    pieces: NDArray[np.int64]


def pieces_of(grid: np.ndarray, merge: int) -> NDArray[np.int64]:
    """int64 ``[pictures]``: tokens that stand for each picture of ``grid``, int ``[pictures, 3]``."""
    result: NDArray[np.int64] = grid.prod(axis=1).astype(np.int64) // merge**2
    return result


def picture_positions(
    tokens: np.ndarray, prompt: int, grid: np.ndarray, vision: VisionShape, name: str
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Positions of a sample's tokens, and which of them stand for pieces of its pictures.

    Args:
        tokens: int64 ``[n]``, prompt and response.
        prompt: length of the prompt. A mark of a picture that the model writes itself is text.
        grid: int64 ``[pictures, 3]``.
        vision: the token and the merging.
        name: of the sample, for messages.

    Returns:
        int64 ``[3, n]``, and int64 ``[pieces]``: indices into the tokens, in the order of the pieces.

    Raises:
        ValueError: the marks in the prompt are not those of the pictures.
    """
    marks = np.flatnonzero(tokens[:prompt] == vision.image_token)
    counts = pieces_of(grid, vision.merge)
    if len(marks) != counts.sum():
        raise ValueError(
            f"{name}: its prompt has {len(marks)} tokens of pictures, its {len(grid)} pictures have {counts.sum()} "
            "pieces: the prompt was tokenised by another processor than that of its pictures"
        )
    positions = np.zeros((3, len(tokens)), np.int64)
    done = at = first = 0
    for (frames, rows, columns), count in zip(grid.tolist(), counts.tolist(), strict=True):
        begin = int(marks[first])
        end = begin + count
        if int(marks[first + count - 1]) != end - 1:
            raise ValueError(f"{name}: the tokens of a picture are not one behind the other")
        positions[:, done:begin] = at + np.arange(begin - done)
        at += begin - done
        box = np.indices((frames, rows // vision.merge, columns // vision.merge)).reshape(3, -1)
        positions[:, begin:end] = at + box
        at += max(rows, columns) // vision.merge
        done, first = end, first + count
    positions[:, done:] = at + np.arange(len(tokens) - done)
    return positions, marks


def lay_out_pictures(
    batch: PictureRow,
    samples: Sequence[tuple[int, np.ndarray, int, str]],
    borders: np.ndarray,
    held: np.ndarray,
    vision: VisionShape,
) -> Pictures | None:
    """Lays out the pictures of one packed row.

    Args:
        batch: where the pictures are.
        samples: place in the batch, tokens, length of the prompt and name of each sample, in the order of the row.
        borders: int ``[documents + 1]``, borders of the padded documents.
        held: int64 ``[local]``, positions of the row that this rank holds.
        vision: the tower.

    Returns:
        None when no sample of the row has a picture.

    Raises:
        ValueError: as :func:`picture_positions`.
    """
    grids = [np.asarray(batch.image_grid_thw[i]).reshape(-1, 3) for i, *_ in samples]
    for grid, (_, tokens, prompt, name) in zip(grids, samples, strict=True):
        if not len(grid) and (tokens[:prompt] == vision.image_token).any():
            raise ValueError(f"{name}: its prompt has tokens of pictures, and the pictures are not there")
    if not any(len(grid) for grid in grids):
        return None
    total = int(borders[-1])
    positions, piece = np.zeros((3, total), np.int64), np.full(total, -1, np.int64)
    for start, end in zip(borders[:-1].tolist(), borders[1:].tolist(), strict=True):
        positions[:, start:end] = np.arange(end - start)
    pixels: list[np.ndarray] = []
    used: list[np.ndarray] = []
    known: dict[int, int] = {}
    pieces = 0
    for start, grid, (place, tokens, prompt, name) in zip(borders.tolist(), grids, samples, strict=False):
        if not len(grid):
            continue
        values = batch.pixel_values[place]
        if values.shape != (int(grid.prod(axis=1).sum()), vision.patch_values):
            raise ValueError(
                f"{name}: its pictures are {list(values.shape)} numbers, but {len(grid)} of "
                f"{grid.prod(axis=1).tolist()} patches with {vision.patch_values} numbers each were promised: is the "
                "processor of another model in --hf-checkpoint?"
            )
        own, marks = picture_positions(tokens, prompt, grid, vision, name)
        positions[:, start : start + len(tokens)] = own
        if id(values) not in known:
            known[id(values)] = pieces
            pixels.append(values)
            used.append(grid)
            pieces += len(marks)
        piece[start + marks] = known[id(values)] + np.arange(len(marks))
    mine = piece[held]
    slots = np.flatnonzero(mine >= 0)
    return Pictures(
        pixel_values=np.concatenate(pixels),
        image_grid_thw=np.concatenate(used).astype(np.int64),
        positions=positions[:, held],
        slots=slots,
        pieces=mine[slots],
    )
