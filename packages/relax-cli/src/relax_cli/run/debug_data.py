"""Rollouts as JSON lines: ``--save-debug-rollout-data`` writes them, ``--load-debug-rollout-data`` reads them.

The rollout worker writes a file; the driver reads its manifest; each rank of the trainer reads its own rows from it. On
a cluster it has to lie where all of them see it.
"""

import dataclasses
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from relax_data.types import (
    ROW_COLUMNS,
    BatchRows,
    Prompt,
    RowSource,
    Sample,
    SampleGroup,
    SampleStatus,
    StepManifest,
    TrainBatch,
)

_NO_COLUMNS = {"rollout_id", "names", "row_ids", "picture_ids"}
"""Fields of a manifest that are not an array of all samples, or have nothing in a file's."""


def path_for(template: str, rollout_id: int) -> Path:
    """The file of one rollout: ``{rollout_id}`` in ``template`` filled in, ``{rollout_id:04d}`` too."""
    return Path(template.format(rollout_id=rollout_id))


def save_groups(groups: Sequence[SampleGroup], path: Path) -> None:
    """Writes one line a group. The file appears whole or not at all; an older one of the same name is replaced."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".tmp")
    with partial.open("wb") as out:
        for group in groups:
            out.write(orjson.dumps(_group_to_dict(group), option=orjson.OPT_APPEND_NEWLINE, default=str))
    os.replace(partial, path)


def load_groups(path: Path) -> list[SampleGroup]:
    """Reads what :func:`save_groups` wrote.

    Raises:
        ValueError: the file is missing or a line of it is not a group; the message names file and line.
    """
    return list(_read_groups(path))


def _read_groups(path: Path) -> Iterator[SampleGroup]:
    """One group after the other; raises as :func:`load_groups`."""
    if not path.is_file():
        raise ValueError(
            f"--load-debug-rollout-data: {path} does not exist. Write it with --save-debug-rollout-data, and start "
            "with the rollout ids that were saved (--start-rollout-id, --num-rollout)."
        )
    empty = True
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                group = _group_from_dict(orjson.loads(line))
            except (orjson.JSONDecodeError, KeyError, TypeError, ValueError) as error:
                what = str(error) if type(error) is ValueError else repr(error)
                raise ValueError(f"--load-debug-rollout-data: {path}:{number} is not a saved group: {what}") from error
            empty = False
            yield group
    if empty:
        raise ValueError(f"--load-debug-rollout-data: {path} is empty")


def read_manifest(path: Path, rollout_id: int) -> tuple[StepManifest, float]:
    """Reads the manifest of a saved rollout, with one group of its rows in memory at a time.

    Args:
        rollout_id: that the step is to have.

    Returns:
        the manifest, and the mean reward of the samples.

    Raises:
        ValueError: as :func:`load_groups`; or a sample cannot be trained on.
    """
    parts, rewards = [], []
    for group in _read_groups(path):
        parts.append(StepManifest.of(TrainBatch.from_groups([group], rollout_id)))
        rewards += group.rewards
    columns = [f.name for f in dataclasses.fields(StepManifest) if f.name not in _NO_COLUMNS]
    arrays = {name: np.concatenate([getattr(part, name) for part in parts]) for name in columns}
    names = [name for part in parts for name in part.names]
    return StepManifest(rollout_id=rollout_id, names=names, **arrays), sum(rewards) / len(rewards)


@dataclasses.dataclass(frozen=True)
class FileRows:
    """The rows of a saved rollout, named by its file: each rank reads its own from there.

    Attributes:
        path: of the file.
        rollout_id: that the step has.
    """

    path: Path
    rollout_id: int

    def for_rank(self, rank: int, manifest: StepManifest) -> RowSource:
        """Gives this very source: every rank reads the same file."""
        return self

    def fetch(self, indices: Sequence[int], columns: Sequence[str] = ROW_COLUMNS) -> dict[str, list[np.ndarray]]:
        """The rows of the samples at ``indices``; the rest of the file is read over.

        Raises:
            ValueError: as :func:`load_groups`.
        """
        wanted, found, first = set(indices), dict[int, dict[str, np.ndarray]](), 0
        for group in _read_groups(self.path):
            here = [i for i in range(first, first + len(group.samples)) if i in wanted]
            if here:
                batch = TrainBatch.from_groups([group], self.rollout_id)
                rows = BatchRows(batch).fetch([i - first for i in here], columns)
                found |= {i: {name: rows[name][k] for name in columns} for k, i in enumerate(here)}
            first += len(group.samples)
        assert found.keys() == wanted, f"{self.path} has {first} samples, not {sorted(wanted - found.keys())}"
        return {name: [found[i][name] for i in indices] for name in columns}


def _group_to_dict(group: SampleGroup) -> dict[str, Any]:
    samples = []
    for sample in group.samples:
        columns = {f.name: getattr(sample, f.name) for f in dataclasses.fields(sample) if f.name != "prompt"}
        samples.append(columns)
    prompt = {f.name: getattr(group.prompt, f.name) for f in dataclasses.fields(group.prompt)}
    return {"prompt": prompt, "samples": samples}


def _group_from_dict(data: dict[str, Any]) -> SampleGroup:
    prompt = Prompt(**data["prompt"])
    samples = [Sample(prompt=prompt, **{**s, "status": SampleStatus(s["status"])}) for s in data["samples"]]
    for sample in samples:
        sample.check_columns()
        if not isinstance(sample.reward, int | float | None):
            raise ValueError(f"{sample.name}: its reward is {sample.reward!r}, not a number")
    if not all(type(token) is int for token in prompt.input_ids):
        raise ValueError(f"{prompt.source}: its input_ids are not integers alone")
    return SampleGroup(prompt, samples)
