"""The Ray actor that owns one SGLang server process."""

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from relax_cli.checks.lengths import context_lengths, decode_graphs
from relax_cli.workers.process import enter_folder

if TYPE_CHECKING:
    from relax_rollout.engines.base import EngineAddress

    from relax_cli.config.run_config import RunConfig


class EngineActor:
    """Starts one SGLang server on this node and takes it along when it goes.

    The actor talks to the server's process only (start, alive, stop). Generation and weight updates reach the server
    over HTTP from the rollout worker and the trainer's ranks.
    """

    def __init__(  # noqa: PLR0913  # what an engine is started with, by name
        self,
        config: "RunConfig",
        *,
        name: str,
        seed: int,
        gpu_ids: list[str],
        device: Literal["cpu", "cuda"],
        host: str,
        dtype: str,
        key: str,
        node_id: str | None = None,
    ) -> None:
        """Prepares, without starting, the server.

        Args:
            config: all settings of the run.
            name: ``engine0``, ``engine1``, ...
            seed: of its sampler; another one for each engine.
            gpu_ids: GPUs of this node that it may use, as CUDA_VISIBLE_DEVICES calls them; empty on CPU.
            device: ``cuda`` or ``cpu``.
            host: address the server listens on.
            dtype: ``bfloat16`` or ``float32``.
            key: that its server asks for.
            node_id: Ray's id of the node that address and GPUs are of.
        """
        from relax_rollout.engines.sglang.server import SGLangServer

        enter_folder(config.folder)
        if config.data.multimodal_keys and not config.train.model.freeze_vision_model:
            # SGLang keeps what its vision tower made of a picture, also over a push of other weights.
            os.environ["SGLANG_VLM_CACHE_SIZE_MB"] = "0"
        graphs = decode_graphs(config) if device == "cuda" else None
        self._progress = ""
        self._node_id = node_id
        self._server = SGLangServer(
            config.sglang,
            model_path=config.train.model.hf_checkpoint,
            name=name,
            log_path=Path(config.run_dir) / "logs" / f"{name}.log",
            device=device,
            tp_size=max(1, len(gpu_ids)),
            gpu_ids=gpu_ids,
            host=host,
            dtype=dtype,
            seed=seed,
            enable_memory_saver=device == "cuda" and config.cluster.colocate and not config.debug.debug_rollout_only,
            context_length=context_lengths(config).engine,
            extra={"cuda-graph-max-bs-decode": graphs} if graphs is not None else None,
            keeps_cache=not config.rollout.recompute_kv_cache_after_weight_updates,
            key=key,
        )
        self.name = name

    def start(self) -> "EngineAddress":
        """Starts the server, waits until it is healthy, and says where it is.

        Raises:
            EngineDied: it did not start; or Ray has made this actor anew on another node, where its GPUs are others'.
        """
        self._check_node()

        def progress(message: str) -> None:
            waited, _, line = message.partition(": ")
            # SGLang's own lines begin with a time; warnings and long dumps between them say nothing to a user.
            self._progress = (
                f"{waited}: {line[:100]}" if line.startswith("[2") and "server_args=" not in line else waited
            )
            logging.getLogger(__name__).info("%s: %s", self.name, message)

        self._server.start(progress=progress)
        return self._server.address

    def _check_node(self) -> None:
        import ray
        from relax_rollout.engines.base import EngineDied

        if self._node_id is not None and ray.get_runtime_context().get_node_id() != self._node_id:
            raise EngineDied(f"{self.name} cannot be started: its node is gone, with the GPUs that it had")

    def restart(self) -> "EngineAddress":
        """Ends what is left of the server, hung or dead, and starts another one with the start weights.

        It is of the same settings and appends to the same log; its port may be another one.
        """
        self._progress = ""
        self._server.stop()
        return self.start()

    def progress(self) -> str:
        """The seconds :meth:`start` has waited and the last line of the server's log; empty before that."""
        return self._progress

    def stop(self) -> None:
        """Ends the server and all its processes. May be called twice."""
        self._server.stop()
