"""The rollout actor as the driver sees it: methods that wait, say what they wait for, and end at a deadline."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from relax_cli.cluster.actors import Actor, Ref
from relax_cli.cluster.waits import CALL_DEADLINE_S, SETUP_DEADLINE_S, Heartbeat, StopFlag, wait_for
from relax_cli.workers.references import RolloutRows
from relax_cli.workers.rollout import RolloutActor, RolloutOutput

if TYPE_CHECKING:
    from relax_rollout.engines.base import EngineAddress, MemoryTag

R = TypeVar("R")

VERSIONS_DEADLINE_S = 120.0
"""The engines answer this from memory."""


class RolloutWorker:
    """Generates, scores and evaluates; one per run. Every method but :meth:`begin_start` and :meth:`close` blocks."""

    def __init__(self, actor: Actor[RolloutActor], *, stop: StopFlag) -> None:
        """Takes over the actor.

        Args:
            stop: ends a wait when its grace time is over.
        """
        self._actor, self._stop = actor, stop

    def _wait(self, ref: Ref[R], what: str, deadline_s: float = CALL_DEADLINE_S) -> R:
        return wait_for(ref, what, stop=self._stop, deadline_s=deadline_s, status=self.status)

    # ------------------------------------------------------------------ start

    def begin_start(self) -> Ref[bool]:
        """Asks for prompts, tokenizer and reward; the answer comes when they are loaded, or raises what is wrong."""
        return self._actor.call(RolloutActor.ready)

    def finish_start(self, started: Ref[bool], heartbeat: Heartbeat | None = None) -> None:
        """Waits for what :meth:`begin_start` gave.

        Raises:
            ValueError: prompts, reward or a function of the user cannot be used.
        """
        what = "the prompts to load"
        wait_for(started, what, stop=self._stop, deadline_s=SETUP_DEADLINE_S, heartbeat=heartbeat)

    def connect(self, engines: "Sequence[EngineAddress]") -> None:
        """Takes the engines into use, in engine order."""
        self._wait(self._actor.call(RolloutActor.connect, list(engines)), "the rollout worker to know the engines")

    # ------------------------------------------------------------------ a step

    def generate(self, rollout_id: int, version: int, *, save_to: Path | None = None) -> RolloutOutput:
        """Generates and scores one rollout; :meth:`rows` names its rows.

        Args:
            rollout_id: absolute id.
            version: what the engines serve.
            save_to: file that the worker writes the groups to (``--save-debug-rollout-data``).

        Raises:
            EngineDied, RewardError, GenerationError, TimeoutError: see
                :meth:`relax_rollout.loop.rollout_loop.RolloutLoop.generate`.
            ValueError: too many prompts in a row were dropped, or a sample cannot be trained on.
        """
        call = self._actor.call(RolloutActor.generate, rollout_id, version, save_to)
        return self._wait(call, f"rollout {rollout_id} to be generated and scored")

    def rows(self, rollout_id: int) -> RolloutRows:
        """The rows of the rollout that was generated last, for the trainer's ranks."""
        return RolloutRows(self._actor, rollout_id)

    def evaluate(self, version: int) -> dict[str, float]:
        """Evaluates all of ``--eval-prompt-data`` with the weights the engines serve, of this version."""
        return self._wait(self._actor.call(RolloutActor.evaluate, version), "the evaluation")

    # ------------------------------------------------------------------ engines

    def weight_versions(self) -> list[int]:
        """The version each engine serves, asked of the engines themselves."""
        call = self._actor.call(RolloutActor.weight_versions)
        return self._wait(call, "the engines to name their weights", VERSIONS_DEADLINE_S)

    def release_memory(self) -> None:
        """Gives the GPUs to the trainer."""
        self._wait(self._actor.call(RolloutActor.release_memory), "the engines to release GPU memory")

    def resume_memory(self, tag: "MemoryTag") -> None:
        """Takes GPU memory back; after ``weights`` a push must follow before anything is generated."""
        what = {"weights": "memory for weights", "kv_cache": "their KV cache"}[tag]
        self._wait(self._actor.call(RolloutActor.resume_memory, (tag,)), f"the engines to take back {what}")

    # ------------------------------------------------------------------ state

    def save_state(self, directory: str, rollout_id: int) -> dict[str, Any]:
        """What a resumed run needs to go on with exactly the next prompt and the next token.

        Args:
            directory: folder of checkpoints.
            rollout_id: of the checkpoint; the samples go into its
                :func:`relax_train.checkpoint.folders.side_folder`.

        Returns:
            the rest as JSON values.

        Raises:
            CheckpointError: the samples could not be written; no checkpoint has changed.
        """
        call = self._actor.call(RolloutActor.save_state, directory, rollout_id)
        return self._wait(call, "the rollout worker to write its state")

    def load_state(self, state: dict[str, Any], folder: Path) -> None:
        """Goes on where :meth:`save_state` was called.

        Args:
            state: what it returned.
            folder: of the checkpoint.

        Raises:
            ValueError: the state or its file is damaged, or of other prompts.
        """
        self._wait(self._actor.call(RolloutActor.load_state, state, folder), "the rollout worker to restore its state")

    def status(self) -> str:
        """Says what the actor is waiting for, for a driver whose own wait gets long. Never raises."""
        import ray

        try:
            return str(ray.get(self._actor.call(RolloutActor.status), timeout=5))
        except ray.exceptions.RayError:  # the wait itself will say what is wrong
            return "no answer from the rollout worker"

    def close(self) -> list[Ref[None]]:
        """Asks the actor to close its connections; does not wait."""
        return [self._actor.call(RolloutActor.close)]
