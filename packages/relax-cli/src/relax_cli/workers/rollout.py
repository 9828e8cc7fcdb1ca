"""The Ray actor that drives generation: prompts, engines' clients, rewards, evaluation, engine profiling."""

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

from relax_cli.checks.lengths import context_lengths
from relax_cli.workers.process import enter_folder, start_log

if TYPE_CHECKING:
    from relax_rollout.engines.base import EngineAddress, MemoryTag
    from relax_rollout.engines.sglang.client import SGLangEngine
    from relax_rollout.loop.context import RolloutProgress


class RolloutActor:
    """One per run. Async, so that hundreds of requests share its event loop."""

    def __init__(self, config: Any) -> None:
        """Opens prompts, tokenizer, reward and loop; a fault in them ends the start before an engine has loaded.

        Args:
            config: the run's ``RunConfig``.
        """
        enter_folder(config.folder)
        start_log(config.run_dir, "rollout")
        from relax_data.prompts.open import open_prompts
        from relax_rollout.loop.rollout_loop import RolloutLoop
        from relax_rollout.rewards import build_reward
        from transformers import AutoTokenizer

        self._config = config
        lengths = context_lengths(config)
        self._eval_settings = dataclasses.replace(config.rollout, rollout_max_context_len=lengths.sample)
        self._status = "idle"
        self._tokenizer = AutoTokenizer.from_pretrained(config.train.model.hf_checkpoint)
        self._source = open_prompts(config.data, self._tokenizer, num_epoch=config.run.num_epoch)
        self._eval_prompts = self._open_eval_prompts()
        self._reward = build_reward(config.reward)
        self._engines: list[SGLangEngine] = []
        # Its functions of the user (filter, generation, collection) are imported here too.
        self._loop = RolloutLoop(
            dataclasses.replace(config.rollout, rollout_max_context_len=lengths.trained),
            engines=(),
            source=self._source,
            reward=self._reward,
            tokenizer=self._tokenizer,
            concurrency=config.sglang.sglang_server_concurrency,
            max_staleness=config.cluster.max_staleness,
            trains=not config.debug.debug_rollout_only,
            progress=self._tell_progress,
        )
        self._profiler: Any = None

    async def connect(self, engines: "Sequence[EngineAddress]") -> None:
        """Takes the engines into use, in this order."""
        from relax_rollout.engines.sglang.client import SGLangEngine

        self._engines = [SGLangEngine.at(address) for address in engines]
        self._loop.engines = list(self._engines)
        self._profiler = self._build_profiler([address.url for address in engines])

    def _build_profiler(self, urls: list[str]) -> Any:
        settings = self._config.sglang_profile
        if not settings.sglang_profile:
            return None
        from relax_profiling.recorders.sglang import RolloutProfiler

        return RolloutProfiler(settings, urls, self._config.trace_dir / "sglang_trace")

    def _say(self, message: str) -> None:
        self._status = message
        logging.getLogger(__name__).info(message)

    def _tell_progress(self, now: "RolloutProgress") -> None:
        self._say(
            f"rollout {now.rollout_id}: {now.groups_done} of {now.groups_wanted} groups after {now.elapsed_s:.0f} s, "
            f"{now.tokens} tokens, {now.prompts_dropped} prompts dropped, waiting for {now.waiting_for}"
        )

    async def status(self) -> str:
        """What it is waiting for now, for a driver whose own wait gets long."""
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

    async def generate(self, rollout_id: int, version: int) -> dict[str, Any]:
        """One rollout.

        Returns:
            ``{"groups": list[SampleGroup], "metrics": dict[str, float]}``; ``groups`` is empty at the end of the data.
        """
        async with self._profiled(rollout_id):
            result = await self._loop.generate(rollout_id, version)
        return {"groups": result.groups, "metrics": result.metrics}

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

    def _open_eval_prompts(self) -> dict[str, Any]:
        from relax_data.prompts.open import open_prompts

        # All prompts, in file order, whatever the training data does.
        settings = dataclasses.replace(self._config.data, rollout_shuffle=False, use_streaming_dataset=False)
        names_and_paths = self._config.eval.eval_prompt_data or ()
        prompts = {}
        for name, path in zip(names_and_paths[::2], names_and_paths[1::2], strict=True):
            source = open_prompts(settings, self._tokenizer, num_epoch=1, paths=path)
            prompts[name] = source.next(len(source))
        return prompts

    async def weight_versions(self) -> list[int]:
        """The version each engine serves, asked of the engines themselves."""
        return await asyncio.gather(*(engine.weight_version() for engine in self._engines))

    async def release_memory(self) -> None:
        """Gives the GPUs to the trainer."""
        await asyncio.gather(*(engine.release_memory(("kv_cache", "weights")) for engine in self._engines))

    async def resume_memory(self, tags: "Sequence[MemoryTag]") -> None:
        """Takes GPU memory back; after ``weights`` a push must follow before anything is generated."""
        await asyncio.gather(*(engine.resume_memory(tags) for engine in self._engines))

    async def state_dict(self) -> dict[str, Any]:
        """Prompt cursor and ledger with the open groups: what a resumed run needs to go on with the next prompt."""
        return self._loop.state_dict()

    async def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where :meth:`state_dict` was called; a damaged state or one of another format is an error."""
        self._loop.load_state_dict(state)

    async def close(self) -> None:
        await self._reward.close()
        for engine in self._engines:
            await engine.close()
