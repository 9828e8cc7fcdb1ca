"""The list of a checkpoint's files, ``files.json``: what it must hold, and which files a checkpoint cannot lack."""

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from relax_train.checkpoint.folders import FILES, CheckpointError, regular

MANIFEST = "relax.json"
FORMAT = 2
OLD_FORMAT = 1
"""Format of earlier versions; its optimizer state is cut as the ranks held it and loads under their layout only."""
_INDEX = ".metadata"
_SHARD = re.compile(rb"__[0-9]+_[0-9]+\.distcp")


@dataclasses.dataclass(frozen=True)
class FileList:
    """Content of ``files.json``.

    Attributes:
        sizes: bytes of each file by its name.
        sums: CRC-32 of each file by its name; None in lists of earlier versions, which had sizes alone.
    """

    sizes: dict[str, int]
    sums: dict[str, int] | None


def read_list(folder: Path, version: int) -> FileList | None:
    """The list of a checkpoint; None where none is and the checkpoint is of format 1, whose first ones had none.

    Args:
        folder: of the checkpoint.
        version: its format.

    Raises:
        CheckpointError: the list is missing or not what a save writes; the message says what is wrong.
    """
    file = folder / FILES
    try:
        content = json.loads(regular(file).read_text(encoding="utf-8"))
    except FileNotFoundError:
        if version == OLD_FORMAT:
            return None
        raise CheckpointError(
            f"{file} is missing: a save writes it last, so this checkpoint may be half of one"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} is damaged: it holds no JSON object")
    for key, what in (("files", "sizes"), ("crc32", "checksums")):
        if key == "crc32" and key not in content and version == OLD_FORMAT:
            continue
        numbers = content.get(key)
        if not isinstance(numbers, dict):
            raise CheckpointError(f"{file} is damaged: it has no entry {key!r} with the {what} of files by name")
        _check_entries(file, key, numbers)
    sizes, sums = content["files"], content.get("crc32")
    if sums is not None and sums.keys() != sizes.keys():
        name = min(sums.keys() ^ sizes.keys())
        lacking = "crc32" if name in sizes else "files"
        raise CheckpointError(f"{file} is damaged: its {lacking!r} lacks {name[:100]!r}")
    return FileList(sizes, sums)


def _check_entries(file: Path, key: str, numbers: Mapping[str, object]) -> None:
    for name, number in numbers.items():
        # Only a name of one part stays inside of the folder.
        if name in ("", ".", "..") or "/" in name or not name.isprintable():
            raise CheckpointError(
                f"{file} is damaged: its {key!r} names {name[:100]!r}, which is no name of a file of this folder"
            )
        if type(number) is not int or number < 0:
            raise CheckpointError(f"{file} is damaged: {name[:100]!r} has no whole number in its {key!r}")


def needed_files(folder: Path, manifest: Mapping[str, Any]) -> Iterator[str]:
    """Names of the files without which a checkpoint does not load: those of the format, and what the index names.

    The index is not unpickled, only looked through for names of shards: that needs no torch and runs no code.

    Args:
        folder: of the checkpoint.
        manifest: content of its ``relax.json``.

    Raises:
        OSError: the index is there and cannot be read.
    """
    yield MANIFEST
    yield _INDEX
    if (folder / _INDEX).exists():
        yield from sorted({name.decode() for name in _SHARD.findall(regular(folder / _INDEX).read_bytes())})
    if manifest["format"] != OLD_FORMAT:
        yield from ("common.pt", "metadata.json")
        yield from (f"rng_{rank}.pt" for rank in range(manifest["world_size"]))
