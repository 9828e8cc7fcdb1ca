"""The Ray actor that drives generation: prompts, engines' clients, rewards, evaluation, engine profiling."""

import asyncio
import contextlib
import dataclasses
import logging
import shutil
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from relax_data.types import ROW_COLUMNS, BatchRows, Prompt, StepManifest, TrainBatch

from relax_cli.checks.lengths import context_lengths
from relax_cli.run.debug_data import save_groups
from relax_cli.workers.plane_rows import ROWS_PLANE
from relax_cli.workers.process import enter_folder, spare_what_stays, start_log

if TYPE_CHECKING:
    from relax_data.multimodal import ProcessorPool
    from relax_data.plane.transferqueue import TransferQueuePlane
    from relax_profiling.recorders.sglang import RolloutProfiler
    from relax_rollout.engines.base import Engine, EngineAddress, MemoryTag
    from relax_rollout.engines.pool import EngineReport
    from relax_rollout.engines.usage import EngineTime
    from relax_rollout.loop.context import RolloutProgress
    from relax_rollout.loop.producer import Producer
    from relax_rollout.loop.publisher import RowPublisher
    from relax_rollout.loop.rollout_loop import RolloutResult

    from relax_cli.config.run_config import RunConfig

PROCESSOR_METRIC = "data/processor_s"
SILENT_S = 1.0
"""An engine that does not say within this time which weights it has is told to the user as silent."""


@dataclasses.dataclass(frozen=True)
class RolloutOutput:
    """Summary of a rollout for the driver; its rows stay where they were generated.

    Attributes:
        groups: whole and scored groups; 0 when the prompts are used up.
        manifest: of their samples; None without groups, and in a run that trains nothing.
        metrics: see :mod:`relax_rollout.loop.metrics`.
        saving_s: seconds of the call that went into ``--save-debug-rollout-data``.
        histograms: how often each value occurred among the samples, by name.
        usage: what each engine did since the rollout before, by its name.
    """

    groups: int
    manifest: StepManifest | None
    metrics: dict[str, float]
    saving_s: float = 0.0
    histograms: dict[str, dict[int, int]] = dataclasses.field(default_factory=dict)
    usage: "dict[str, EngineTime]" = dataclasses.field(default_factory=dict)


class RolloutActor:
    """One per run. Async, so that hundreds of requests share its event loop."""

    def __init__(self, config: "RunConfig") -> None:
        """Opens prompts, tokenizer, reward and loop; a fault in them ends the start before an engine has loaded.

        Args:
            config: all settings of the run.
        """
        enter_folder(config.folder)
        start_log(config.run_dir, "rollout")
        from relax_data.prompts.open import open_prompts
        from relax_rollout.engines.pool import EnginePool
        from relax_rollout.generation.seam import end_token_ids
        from relax_rollout.loop.rollout_loop import RolloutLoop
        from relax_rollout.rewards import build_reward
        from transformers import AutoTokenizer

        self._config = config
        lengths = context_lengths(config)
        self._eval_settings = dataclasses.replace(config.rollout, rollout_max_context_len=lengths.sample)
        self._status = "idle"
        self._tokenizer = AutoTokenizer.from_pretrained(config.train.model.hf_checkpoint)
        self._processor = self._open_processor()
        self._media_tokens = _media_tokens(config.train.model.hf_checkpoint)
        self._source = open_prompts(
            config.data,
            self._tokenizer,
            num_epoch=config.run.num_epoch,
            processor=self._processor,
            media_tokens=self._media_tokens,
        )
        self._eval_prompts = self._open_eval_prompts()
        if (seconds := self._processor_seconds().get(PROCESSOR_METRIC)) is not None:
            logging.getLogger(__name__).info("the pictures of the prompts took the processor %.1f s", seconds)
        self._reward = build_reward(config.reward)
        self._engines = EnginePool()
        # Its functions of the user (filter, generation, collection) are imported here too.
        self._loop = RolloutLoop(
            dataclasses.replace(config.rollout, rollout_max_context_len=lengths.trained),
            engines=self._engines,
            source=self._source,
            reward=self._reward,
            tokenizer=self._tokenizer,
            concurrency=config.sglang.sglang_server_concurrency,
            max_staleness=config.cluster.max_staleness,
            trains=not config.debug.debug_rollout_only,
            progress=self._tell_progress,
            end_token_ids=end_token_ids(self._tokenizer, config.train.model.hf_checkpoint),
        )
        self._profiler: RolloutProfiler | None = None
        self._rows: TrainBatch | None = None
        self._producer: Producer | None = None
        self._plane: TransferQueuePlane | None = None
        self._publisher: RowPublisher | None = None
        self._evaluation: asyncio.Task[dict[str, float]] | None = None
        self._window = contextlib.AsyncExitStack()  # of the profiler, between two pushes

    async def connect(self, engines: "Sequence[EngineAddress]") -> None:
        """Takes the engines into use, in this order."""
        from relax_rollout.engines.pool import EnginePool
        from relax_rollout.engines.sglang.client import SGLangEngine

        self._loop.engines = self._engines = EnginePool([SGLangEngine.at(address) for address in engines])
        self._profiler = self._build_profiler(engines)
        if self._config.cluster.fully_async:
            from relax_rollout.loop.producer import Producer
            from relax_rollout.loop.publisher import RowPublisher

            assert self._plane is not None, "open_plane() comes first"
            self._publisher = RowPublisher(self._plane)
            self._producer = Producer(
                self._loop,
                self._engines,
                concurrency=self._config.sglang.sglang_server_concurrency,
                end=self._config.run.num_rollout,
                publisher=self._publisher,
            )
        spare_what_stays()

    def _build_profiler(self, engines: "Sequence[EngineAddress]") -> "RolloutProfiler | None":
        settings = self._config.sglang_profile
        if not settings.sglang_profile:
            return None
        from relax_profiling.recorders.sglang import RolloutProfiler

        urls, folder = [address.url for address in engines], self._config.trace_dir / "sglang_trace"
        return RolloutProfiler(settings, urls, folder, api_key=engines[0].key)  # one key for the run

    def _say(self, message: str) -> None:
        self._status = message
        logging.getLogger(__name__).info(message)

    def _tell_progress(self, now: "RolloutProgress") -> None:
        self._say(
            f"rollout {now.rollout_id}: {now.groups_done} of {now.groups_wanted} groups after {now.elapsed_s:.0f} s, "
            f"{now.tokens} tokens, {now.prompts_dropped} prompts dropped, waiting for {now.waiting_for}"
        )

    async def status(self) -> str:
        """Says what it is waiting for now, for a driver whose own wait gets long."""
        return self._status

    async def ready(self) -> bool:
        """True once prompts, tokenizer and reward are loaded; raises what went wrong with them."""
        return True

    @contextlib.asynccontextmanager
    async def _profiled(self, rollout_id: int) -> AsyncIterator[None]:
        if self._profiler is None:
            yield
            return
        async with self._profiler.rollout(rollout_id):
            yield

    async def generate(self, rollout_id: int, version: int, save_to: Path | None = None) -> RolloutOutput:
        """One rollout. Its rows stay here, for :meth:`fetch_rows`, until the next one is asked for.

        Args:
            save_to: file for ``--save-debug-rollout-data``.
        """
        self._rows = None
        async with self._profiled(rollout_id):
            result = await self._loop.generate(rollout_id, version)
        result.usage = self._engines.usage.take()
        return self._keep(rollout_id, result, save_to)

    def _keep(self, rollout_id: int, result: "RolloutResult", save_to: Path | None) -> RolloutOutput:
        start, groups = time.perf_counter(), result.groups
        if groups and save_to is not None:
            save_groups(groups, save_to)
        saving_s = time.perf_counter() - start
        result.metrics |= self._processor_seconds()
        manifest = None
        if groups and not self._config.debug.debug_rollout_only:
            batch = TrainBatch.from_groups(groups, rollout_id)
            manifest = StepManifest.of(batch)
            manifest = dataclasses.replace(manifest, row_ids=result.row_ids, picture_ids=result.picture_ids)
            self._rows = None if result.row_ids else batch
        return RolloutOutput(len(groups), manifest, result.metrics, saving_s, result.histograms, result.usage)

    # ------------------------------------------------------------------ generation in the background (fully async)

    async def open_plane(self) -> None:
        """Starts TransferQueue, which carries the rows from here to the ranks of the trainer.

        Raises:
            PlaneError: Ray has too few free CPUs for it.
        """
        from relax_data.plane.transferqueue import TransferQueuePlane

        units = self._config.data.num_data_storage_units
        self._plane = await asyncio.to_thread(TransferQueuePlane, ROWS_PLANE, units=units)

    async def rows_failed(self) -> None:
        """Waits until the way of the rows fails, and raises that; it never returns."""
        assert self._publisher is not None, "only with --fully-async, when the engines are known"
        await self._publisher.failure()

    @property
    def _background(self) -> "Producer":
        assert self._producer is not None, "only with --fully-async, when the engines are known"
        return self._producer

    async def next_step(self, step: int) -> RolloutOutput:
        """The groups of a training step, when they are there and their rows are in the plane."""
        return self._keep(step, await self._background.next_step(step), None)

    async def settle(self, step: int) -> None:
        """Books the groups of a step as trained, and clears their rows."""
        self._background.settle(step)

    async def begin_push(self) -> dict[str, float]:
        """Brings all samples to rest for a push of weights, once no evaluation runs; the seconds of its parts."""
        if self._evaluation is not None:
            await asyncio.wait([self._evaluation])
        seconds = await self._background.begin_push()
        await self._window.aclose()
        return seconds

    async def end_push(self, version: int) -> None:
        """Lets the engines generate with the weights of this version, which all in use have."""
        await self._window.enter_async_context(self._profiled(version))
        self._background.end_push(version)

    async def start_evaluation(self, version: int) -> None:
        """Begins an evaluation beside the generation; no push begins before it has ended."""
        assert self._evaluation is None, "one evaluation at a time"
        self._evaluation = asyncio.ensure_future(self.evaluate(version))

    async def drop_evaluation(self) -> None:
        """Ends the evaluation that was started, without a result."""
        if self._evaluation is not None:
            self._evaluation.cancel()
            await asyncio.gather(self._evaluation, return_exceptions=True)
            self._evaluation = None

    async def finish_evaluation(self) -> dict[str, float]:
        """Waits for the evaluation that was started; its metrics."""
        assert self._evaluation is not None, "start_evaluation() comes first"
        evaluation, self._evaluation = self._evaluation, None
        return await evaluation

    # ------------------------------------------------------------------ rows, evaluation, engines, state

    async def fetch_rows(
        self, rollout_id: int, indices: Sequence[int], columns: Sequence[str] = ROW_COLUMNS
    ) -> dict[str, list[np.ndarray]]:
        """Rows of the rollout that was generated last, for the rank of the trainer that asks.

        Args:
            rollout_id: of that rollout.
            indices: places in its manifest.
            columns: of :data:`relax_data.types.ROW_COLUMNS`.

        Raises:
            RuntimeError: it holds another rollout.
        """
        held = None if self._rows is None else self._rows.rollout_id
        if self._rows is None or held != rollout_id:
            raise RuntimeError(f"rows of rollout {rollout_id} were asked for, but the rollout worker holds {held}")
        return BatchRows(self._rows).fetch(indices, columns)

    async def evaluate(self, version: int) -> dict[str, float]:
        """Evaluates all of ``--eval-prompt-data`` with the weights the engines serve, of this version."""
        from relax_rollout.evaluation import evaluate

        return await evaluate(
            self._engines,
            self._eval_prompts,
            self._reward,
            self._config.eval,
            rollout=self._eval_settings,
            tokenizer=self._tokenizer,
            version=version,
            concurrency=self._config.sglang.sglang_server_concurrency,
            progress=self._say,
        )

    def _open_processor(self) -> "ProcessorPool | None":
        """The processor of pictures, for rows that have some."""
        if not self._config.data.multimodal_keys:
            return None
        from relax_data.multimodal import ProcessorPool

        folder = str(Path(self._config.train.model.hf_checkpoint).absolute())
        return ProcessorPool(folder, size=self._config.data.mm_processor_pool_size)

    def _processor_seconds(self) -> dict[str, float]:
        """Seconds for which rows waited for the processor of pictures since the last call; empty without one."""
        if self._processor is None:
            return {}
        seconds, self._processor.waited_s = self._processor.waited_s, 0.0
        return {PROCESSOR_METRIC: seconds}

    def _open_eval_prompts(self) -> dict[str, list[Prompt]]:
        from relax_data.prompts.open import open_prompts

        # All prompts, in file order, whatever the training data does.
        settings = dataclasses.replace(self._config.data, rollout_shuffle=False, use_streaming_dataset=False)
        names_and_paths = self._config.eval.eval_prompt_data or ()
        prompts = {}
        for name, path in zip(names_and_paths[::2], names_and_paths[1::2], strict=True):
            source = open_prompts(
                settings,
                self._tokenizer,
                num_epoch=1,
                paths=path,
                processor=self._processor,
                media_tokens=self._media_tokens,
            )
            prompts[name] = source.next(len(source))
        return prompts

    async def weight_versions(self) -> list[int]:
        """The version of each engine that is in use, asked of the engines themselves."""
        return list((await self._engines.on_each(lambda engine: engine.weight_version())).values())

    async def release_memory(self) -> None:
        """Gives the GPUs to the trainer."""
        await self._engines.on_each(lambda engine: engine.release_memory(("kv_cache", "weights")))

    async def resume_memory(self, tags: "Sequence[MemoryTag]") -> None:
        """Takes GPU memory back; after ``weights`` a push must follow before anything is generated."""
        await self._engines.on_each(lambda engine: engine.resume_memory(tags))

    async def engine_reports(self) -> "list[EngineReport]":
        """The state of each engine as the requests so far have shown it; asks no engine."""
        return self._engines.reports()

    async def check_engines(self) -> "list[EngineReport]":
        """The state of each engine, after all in use were asked for a sign of life."""
        from relax_rollout.engines.sglang.weight_status import WeightsIncomplete

        async def answers(engine: "Engine") -> None:
            with contextlib.suppress(WeightsIncomplete):  # it says so, so it lives
                await engine.weight_version()

        await self._engines.on_each(answers)
        return self._engines.reports()

    async def silent_engines(self) -> list[str]:
        """Names of the engines in use that do not answer a question within a second or so."""
        return await self._engines.silent(SILENT_S)

    async def replace_engine(self, address: "EngineAddress") -> None:
        """Takes note of a lost engine's new server, which serves only after :meth:`include_engine`."""
        from relax_rollout.engines.sglang.client import SGLangEngine

        old = self._engines.replace(SGLangEngine.at(address))
        if self._profiler is not None:
            place = [report.name for report in self._engines.reports()].index(address.name)
            self._profiler.engine_urls[place] = address.url
        await old.close()

    async def engine_not_restarted(self, name: str, why: str) -> None:
        """Takes note that a lost engine could not be started again."""
        from relax_rollout.engines.base import EngineDied

        self._engines.restart_failed(name, EngineDied(why))

    async def exclude_engine(self, name: str, why: str) -> None:
        """Takes an engine out whose weights are not those of the others."""
        from relax_rollout.engines.base import EngineDied

        for engine in self._engines.in_use:
            if engine.name == name:
                self._engines.exclude(engine, EngineDied(why))

    async def include_engine(self, name: str) -> None:
        """Lets a restarted engine serve, which has the current weights."""
        self._engines.include(name)

    async def save_state(self, directory: str, rollout_id: int) -> dict[str, Any]:
        """Prompt cursor and ledger with the open groups: what a resumed run needs to go on with the next prompt.

        Args:
            directory: folder of checkpoints.
            rollout_id: of the checkpoint, whose ranks take over what is written beside it.

        Raises:
            CheckpointError: the disk is full, or the like; nothing is left of it.
        """
        from relax_train.checkpoint.folders import CheckpointError, give_up, rollout_folder, side_folder

        checkpoints = Path(directory).absolute()
        folder = side_folder(checkpoints, rollout_id)
        try:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            return self._loop.save_state(folder)
        except OSError as error:
            raise CheckpointError(give_up(rollout_folder(checkpoints, rollout_id), error, [folder])) from error

    async def load_state(self, state: dict[str, Any], folder: Path) -> None:
        """Goes on where :meth:`save_state` was called; a damaged state or one of another format is an error."""
        self._loop.load_state(state, folder)

    async def close(self) -> None:
        """Ends what runs, and closes the reward and the connections to the engines."""
        if self._producer is not None:
            await self._producer.stop()
            await self._window.aclose()
        if self._plane is not None:
            await asyncio.to_thread(self._plane.shutdown)
        if self._processor is not None:
            await asyncio.to_thread(self._processor.close)
        await self._reward.close()
        await self._engines.close()


def _media_tokens(folder: str) -> tuple[int, ...]:
    """The tokens that stand for pictures and videos, of a model that reads pictures."""
    from relax_train.models.architectures import model_shape
    from relax_train.settings.model import read_hf_config

    try:
        vision = model_shape(read_hf_config(folder)).vision
    except ValueError:  # no model that can be trained: the checks before the start say so where it matters
        return ()
    return () if vision is None else (vision.image_token, vision.video_token)
