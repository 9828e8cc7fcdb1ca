"""Rollouts as JSON lines: ``--save-debug-rollout-data`` writes them, ``--load-debug-rollout-data`` reads them."""

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson
from relax_data.types import Prompt, Sample, SampleGroup, SampleStatus


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
    if not path.is_file():
        raise ValueError(
            f"--load-debug-rollout-data: {path} does not exist. Write it with --save-debug-rollout-data, and start "
            "with the rollout ids that were saved (--start-rollout-id, --num-rollout)."
        )
    groups = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                groups.append(_group_from_dict(orjson.loads(line)))
            except (orjson.JSONDecodeError, KeyError, TypeError, ValueError) as error:
                raise ValueError(
                    f"--load-debug-rollout-data: {path}:{number} is not a saved group: {error!r}"
                ) from error
    if not groups:
        raise ValueError(f"--load-debug-rollout-data: {path} is empty")
    return groups


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
    return SampleGroup(prompt, samples)
