"""Weights as files: one rank writes a folder of safetensors, and every engine reads it. Works wherever both see it.

Slower than the other ways, and without their needs: no common GPU, no process group, no open port of the trainer.
"""

import asyncio
import json
import shutil
import tempfile
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from pathlib import Path
from typing import BinaryIO

import torch
from relax_data.types import WeightVersion
from relax_data.weights import Bucket

from relax_rollout.engines.base import Engine, EngineAddress, FolderEngine, updating
from relax_rollout.weight_sync.base import PushReport, TransportSetup
from relax_rollout.weight_sync.outcome import conclude
from relax_rollout.weight_sync.push import in_words, let_go
from relax_rollout.weight_sync.ranks import OneRank, Ranks, TorchRanks

_INDEX = "model.safetensors.index.json"
_DTYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def disk_transport(setup: TransportSetup) -> "DiskTransport":
    """Builds this rank's end; collective. Rank 0 writes, the others only help to make the buckets.

    Raises:
        ValueError: no folder is given.
    """
    if setup.folder is None:
        raise ValueError("weights over disk need a folder that the trainer's rank 0 writes and every engine reads")
    ranks: Ranks = OneRank() if setup.world_size == 1 else TorchRanks([])
    return DiskTransport(setup.folder, setup.engines, setup.connect, ranks, writes=setup.rank == 0)


class DiskTransport:
    """This rank's end; the files of a push are gone when it is over."""

    def __init__(
        self,
        folder: Path,
        engines: Sequence[EngineAddress],
        connect: Callable[[EngineAddress], Engine],
        ranks: Ranks,
        *,
        writes: bool,
    ) -> None:
        """Stores them.

        Args:
            folder: exists or can be made; holds one copy of the model during a push.
            engines: all engines of the run.
            connect: makes the client of an engine.
            ranks: the trainer's ranks.
            writes: this is the rank that writes, and talks to the engines.
        """
        self._folder, self._engines, self._connect = folder, tuple(engines), connect
        self._ranks, self._writes = ranks, writes

    def push(
        self, buckets: Iterable[Bucket], version: WeightVersion, engines: Collection[str] | None = None
    ) -> PushReport:
        """See :class:`relax_rollout.weight_sync.base.WeightTransport`. Engines pause only while they read."""
        wanted = [a for a in self._engines if engines is None or a.name in engines]
        report, failure, failed, place = PushReport(), None, {}, None
        try:
            if self._writes:
                self._folder.mkdir(parents=True, exist_ok=True)
                place = Path(tempfile.mkdtemp(prefix=f"weights-{version}-", dir=self._folder))
            report = write_folder(buckets, place)
            if place is not None:
                failed = asyncio.run(self._load_all(wanted, place, version))
        except Exception as error:
            failure = in_words(error)
            let_go(error)
        finally:
            if isinstance(buckets, Generator):
                buckets.close()  # after a failure it still holds its bucket
            if place is not None:
                shutil.rmtree(place, ignore_errors=True)
        names = [a.name for a in wanted]
        return conclude(self._ranks, version, engines=names, report=report, failed=failed, failure=failure)

    async def _load_all(self, engines: Sequence[EngineAddress], place: Path, version: WeightVersion) -> dict[str, str]:
        """Has the engines read the folder at the same time; why some did not."""
        failed: dict[str, str] = {}

        async def load(address: EngineAddress) -> None:
            try:
                engine = self._connect(address)
                try:
                    if not isinstance(engine, FolderEngine):
                        raise ValueError(f"{address.name} cannot read weights from a folder; take another transport")
                    async with updating(engine, version):
                        await engine.load_folder(place)
                finally:
                    await engine.close()
            except Exception as error:
                failed[address.name] = in_words(error) or ""

        await asyncio.gather(*(load(address) for address in engines))
        return failed

    def close(self) -> None:
        """Holds nothing between pushes."""


def write_folder(buckets: Iterable[Bucket], folder: Path | None) -> PushReport:
    """Writes a safetensors file for each bucket, and the index of all; without a folder it only takes the buckets.

    Raises:
        ValueError: there is no bucket.
        OSError: a file could not be written.
    """
    report, files = PushReport(), list[tuple[Path, tuple[str, ...]]]()
    for bucket in buckets:
        if folder is not None:
            path = folder / f"model-{len(files) + 1:05}.safetensors"
            with open(path, "wb") as file:
                write_bucket(bucket, file)
            files.append((path, bucket.names))
        report = PushReport(report.buckets + 1, report.tensors + len(bucket), report.bytes + bucket.nbytes)
    if report.buckets == 0:
        raise ValueError("no weights were given")
    if folder is not None:
        index: dict[str, str] = {}
        for path, names in files:
            whole = path.with_stem(f"{path.stem}-of-{len(files):05}")
            path.rename(whole)
            index |= dict.fromkeys(names, whole.name)
        (folder / _INDEX).write_text(json.dumps({"metadata": {"total_size": report.bytes}, "weight_map": index}))
    return report


def write_bucket(bucket: Bucket, file: BinaryIO) -> None:
    """Writes a bucket as a safetensors file, whose values lie one after the other without gaps, as the bucket's do.

    The format: 8 bytes with the length of the header, little-endian; the header, JSON with dtype, shape and place of
    each tensor; the values. A bucket on a GPU takes a copy in host memory.

    Raises:
        ValueError: the dtype has no name in this format.
    """
    if bucket.dtype not in _DTYPES:
        raise ValueError(f"weights in {bucket.dtype} cannot be written; known: {sorted(_DTYPES)}")
    size = bucket.flat.element_size()
    header = {
        name: {"dtype": _DTYPES[bucket.dtype], "shape": shape, "data_offsets": [start * size, (start + numel) * size]}
        for name, shape, start, numel in zip(bucket.names, bucket.shapes, bucket.offsets, bucket.numels, strict=True)
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little"))
    file.write(text)
    file.write(memoryview(bucket.flat.cpu().view(torch.uint8).numpy()))
