"""Images and the like into tensors, in threads or in processes, with the same bits from both.

A Hugging Face processor decodes and resizes images: tens of milliseconds of work a sample that hold up the generation
of others. Threads are enough while the work happens outside Python's lock; spawned processes, each with a processor of
its own, take the rest off it too. Results come back through anonymous shared memory (``memfd``): it has no name, so
nothing can be left behind in ``/dev/shm``, whoever dies when.
"""

import concurrent.futures
import dataclasses
import functools
import math
import mmap
import multiprocessing
import multiprocessing.connection
import multiprocessing.reduction
import os
import queue
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from relax_data.errors import DataError
from relax_data.multimodal.images import digest_of, png_features, read_image
from relax_data.types import Prompt

Features = dict[str, np.ndarray]
"""The output of a processor for one sample: ``input_ids``, ``pixel_values``, ..., as numpy arrays; with images also
those that :func:`relax_data.multimodal.images.png_features` makes, and ``picture_digest`` uint8 ``[16]``."""

_START_SECONDS = 120.0
_STOP_SECONDS = 5.0


class ProcessorCrashed(RuntimeError):
    """A process died on one sample twice, or took too long; the message names the sample."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Job:
    name: str
    text: str
    multimodal: dict[str, Any]


class ProcessorPool:
    """Runs a multimodal processor on samples, several at a time.

    Args:
        processor: folder of a Hugging Face processor, or a function without arguments that returns one; with
            processes it must pickle.
        size: number of spawned processes, each of which loads the processor once; 0 is threads and one processor.
        threads: number of threads for ``size`` 0.
        max_pending: samples that may be submitted and not finished; ``submit`` waits while there are more. Default:
            twice the number of workers.
        timeout: seconds that one sample may take in a process.

    Attributes:
        waited_s: seconds for which rows with pictures were held up until the processor was done with them; whoever
            reads it may set it back to 0.

    Raises:
        DataError: the processor cannot be loaded.
    """

    waited_s: float = 0.0

    def __init__(
        self,
        processor: str | Callable[[], Any],
        *,
        size: int = 0,
        threads: int = 4,
        max_pending: int | None = None,
        timeout: float = 120.0,
    ):
        if size < 0 or threads < 1 or (max_pending is not None and max_pending < 1):
            raise ValueError(
                f"size {size}, threads {threads}, max_pending {max_pending}: must be positive (size 0 too)"
            )
        load = functools.partial(load_processor, processor) if isinstance(processor, str) else processor
        self._room = threading.Semaphore(max_pending or 2 * (size or threads))
        self.max_pending = max_pending or 2 * (size or threads)
        self._workers: _Threads | _Processes = _Processes(load, size, timeout) if size else _Threads(load, threads)
        self._closed = False

    def submit(self, name: str, text: str, multimodal: dict[str, Any]) -> "concurrent.futures.Future[Features]":
        """Starts one sample; waits first while ``max_pending`` are unfinished.

        Args:
            name: of the sample, and of the key in its row, for errors.
            text: after the chat template.
            multimodal: items by modality, as in :class:`relax_data.types.Prompt`; images are paths, encoded bytes,
                or ``{"bytes": ..., "path": ...}`` as parquet files hold them.

        Returns:
            Its features; or it raises :class:`DataError` for an item that cannot be read, and
            :class:`ProcessorCrashed`.
        """
        if self._closed:
            raise RuntimeError("the processor pool is closed")
        self._room.acquire()
        try:
            future = self._workers.submit(_Job(name, text, multimodal))
        except BaseException:
            self._room.release()
            raise
        future.add_done_callback(lambda _: self._room.release())
        return future

    def process(self, prompts: Iterable[Prompt]) -> Iterator[Features]:
        """Features of the prompts, in their order, computed ahead by up to ``max_pending``."""
        pending: deque[concurrent.futures.Future[Features]] = deque()
        for prompt in prompts:
            if len(pending) == self.max_pending:
                yield pending.popleft().result()
            pending.append(self.submit(prompt.source, prompt.text, prompt.multimodal))
        while pending:
            yield pending.popleft().result()

    def close(self) -> None:
        """Finishes what runs and ends all workers."""
        if not self._closed:
            self._closed = True
            self._workers.close()

    def __enter__(self) -> "ProcessorPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def load_processor(path: str) -> Any:
    """The processor of a Hugging Face folder, from local files only.

    Raises:
        DataError: there is none.
    """
    from transformers import AutoProcessor

    try:
        return AutoProcessor.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} holds no processor: {error}") from error


def run_processor(processor: Any, name: str, text: str, multimodal: dict[str, Any]) -> Features:
    """Calls a processor on one sample. The one function that both kinds of workers run.

    Raises:
        DataError: an item cannot be read; names the sample and the item.
    """
    arguments: dict[str, Any] = {"return_tensors": "pt"}
    images = [read_image(item, f"{name}: image {i + 1}") for i, item in enumerate(multimodal.get("image") or ())]
    if images:
        arguments["images"] = [image for image, _ in images]
    for modality, argument in (("video", "videos"), ("audio", "audio")):
        if multimodal.get(modality):
            arguments[argument] = multimodal[modality]
    if hasattr(processor, "tokenizer"):
        # A processor of text and images; an image processor alone takes no text.
        arguments["text"] = [text]
        begin = getattr(processor.tokenizer, "bos_token", None)
        if begin and text.startswith(begin):
            # A chat template has written the special tokens: a second begin-of-sequence would stand before its own.
            arguments["add_special_tokens"] = False
    try:
        found = processor(**arguments)
        features = {key: np.ascontiguousarray(np.asarray(value)) for key, value in found.items()}
    except (Exception, SystemExit) as error:
        # Processors raise what their parts raise.
        sizes = ", ".join(f"{image.width} x {image.height}" for image, _ in images)
        what = f" on pictures of {sizes} pixels" if sizes else ""
        raise DataError(f"{name}: the processor failed{what}: {type(error).__name__}: {error}") from error
    if images:
        features |= png_features(arguments["images"])
        features["picture_digest"] = digest_of([digest for _, digest in images])
    for key, array in features.items():
        if array.dtype.kind in "OV":  # pointers and records: no tensor, and the one means nothing in another process
            raise DataError(f"{name}: the processor's {key!r} is an array of {array.dtype}, not of numbers or text")
    return features


class _Threads:
    def __init__(self, load: Callable[[], Any], threads: int):
        self._processor = load()
        self._executor = concurrent.futures.ThreadPoolExecutor(threads, "processor")

    def submit(self, job: _Job) -> "concurrent.futures.Future[Features]":
        return self._executor.submit(run_processor, self._processor, job.name, job.text, job.multimodal)

    def close(self) -> None:
        self._executor.shutdown()


class _Processes:
    """``size`` processes; a thread in this process stands for each, feeds it and notices its death."""

    def __init__(self, load: Callable[[], Any], size: int, timeout: float):
        self._timeout = timeout
        self._jobs: queue.SimpleQueue[tuple[_Job, concurrent.futures.Future[Features]] | None] = queue.SimpleQueue()
        self._workers = [_Worker(load) for _ in range(size)]
        try:
            for worker in self._workers:
                worker.wait_until_loaded()
        except BaseException:
            for worker in self._workers:
                worker.stop()
            raise
        self._closing, self._closed = threading.Lock(), False
        self._threads = [threading.Thread(target=self._serve, args=(w,), daemon=True) for w in self._workers]
        for thread in self._threads:
            thread.start()

    def submit(self, job: _Job) -> "concurrent.futures.Future[Features]":
        future: concurrent.futures.Future[Features] = concurrent.futures.Future()
        with self._closing:  # behind the end marks no worker would ever come to it
            if self._closed:
                raise RuntimeError("the processor pool is closed")
            self._jobs.put((job, future))
        return future

    def _serve(self, worker: "_Worker") -> None:
        while self._serve_one(worker):
            pass
        worker.stop()

    def _serve_one(self, worker: "_Worker") -> bool:
        """One job; False at the end. A function of its own, so that no variable holds a result while it waits."""
        item = self._jobs.get()
        if item is None:
            return False
        job, future = item
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(self._run(worker, job))
            except BaseException as error:
                future.set_exception(error)
        return True

    def _run(self, worker: "_Worker", job: _Job) -> Features:
        deaths = []
        for _ in range(2):
            try:
                worker.ensure_alive()
                return worker.run(job, self._timeout)
            except _Died as death:
                deaths.append(str(death))
        raise ProcessorCrashed(f"{job.name}: the processor's process died on it twice: {'; then '.join(deaths)}")

    def close(self) -> None:
        with self._closing:
            self._closed = True
            for _ in self._threads:
                self._jobs.put(None)
        for thread in self._threads:
            thread.join()


class _Died(Exception):
    pass


class _Worker:
    """One spawned process and the pipe to it."""

    def __init__(self, load: Callable[[], Any]):
        self._load = load
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe(duplex=True)
        self._process = context.Process(target=_work, args=(theirs, self._load), daemon=True)
        self._process.start()
        self._stopped = False
        theirs.close()

    def wait_until_loaded(self) -> None:
        try:
            error = self._answer(_START_SECONDS, "loading the processor")
        except _Died as death:
            error = DataError(f"a process died while loading the processor: {death}")
        if error is not None:
            raise error

    def ensure_alive(self) -> None:
        if self._stopped or not self._process.is_alive():
            self.stop()
            self._start()
            self.wait_until_loaded()

    def run(self, job: _Job, timeout: float) -> Features:
        try:
            self._pipe.send(job)
        except OSError as error:
            raise _Died(self._obituary()) from error
        answer = self._answer(timeout, job.name)
        if isinstance(answer, Exception):
            raise answer
        return _receive(self._pipe, answer)

    def _answer(self, timeout: float, what: str) -> Any:
        ready = multiprocessing.connection.wait([self._pipe, self._process.sentinel], timeout)
        if not ready:
            self._process.kill()
            self.stop()
            raise ProcessorCrashed(f"{what}: no answer from the processor's process within {timeout:.0f} s")
        if self._pipe not in ready and not self._pipe.poll():
            raise _Died(self._obituary())
        try:
            return self._pipe.recv()
        except (EOFError, OSError) as error:
            raise _Died(self._obituary()) from error

    def _obituary(self) -> str:
        self._process.join(_STOP_SECONDS)
        return f"exit code {self._process.exitcode}"

    def stop(self) -> None:
        if self._stopped:
            return
        self._stopped = True
        self._pipe.close()
        self._process.join(_STOP_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._process.close()


def _work(pipe: Any, load: Callable[[], Any]) -> None:
    """Main function of a worker process. It ends when the pipe does, so it cannot outlive its parent."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        processor = load()
        _one_thread()
    except Exception as error:
        pipe.send(DataError(f"the processor cannot be loaded: {type(error).__name__}: {error}"))
        return
    pipe.send(None)
    while True:
        try:
            job: _Job = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            features = run_processor(processor, job.name, job.text, job.multimodal)
        except Exception as error:
            pipe.send(error)
        else:
            _send(pipe, features)


def _one_thread() -> None:
    """One thread of torch a process: the pool is the parallelism."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


def _send(pipe: Any, features: Features) -> None:
    """Layout through the pipe, bytes through a memfd whose descriptor follows."""
    layout, size = [], 0
    for key, array in features.items():
        layout.append((key, array.dtype.str, array.shape, size))
        size += -(-array.nbytes // 64) * 64
    handle = os.memfd_create("features")
    try:
        os.ftruncate(handle, max(size, 1))
        with mmap.mmap(handle, max(size, 1)) as memory:
            for (_, _, _, offset), array in zip(layout, features.values(), strict=True):
                memory[offset : offset + array.nbytes] = array.tobytes()
        pipe.send(layout)
        multiprocessing.reduction.send_handle(pipe, handle, os.getppid())
    finally:
        os.close(handle)


def _receive(pipe: Any, layout: list[tuple[str, str, tuple[int, ...], int]]) -> Features:
    """Copies of the arrays that the worker left in its memory: a mapping that is kept holds an open file."""
    try:
        handle = multiprocessing.reduction.recv_handle(pipe)
    except (EOFError, OSError) as error:
        raise _Died("it died while it sent its result") from error
    try:
        memory = mmap.mmap(handle, os.fstat(handle).st_size)
    finally:
        os.close(handle)
    with memory:
        return {
            key: np.frombuffer(memory, dtype=dtype, count=math.prod(shape), offset=offset).reshape(shape).copy()
            for key, dtype, shape, offset in layout
        }
