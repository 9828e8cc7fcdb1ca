"""The rollout actor as the driver sees it: methods that wait, say what they wait for, and end at a deadline."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from relax_cli.cluster.actors import Actor, Ref
from relax_cli.cluster.waits import ALOUD_EVERY_S, CALL_DEADLINE_S, SETUP_DEADLINE_S, Heartbeat, StopFlag, wait_for
from relax_cli.workers.references import RolloutRows
from relax_cli.workers.rollout import RolloutActor, RolloutOutput

if TYPE_CHECKING:
    from relax_rollout.engines.base import EngineAddress, MemoryTag
    from relax_rollout.engines.pool import EngineReport

R = TypeVar("R")

VERSIONS_DEADLINE_S = 120.0
"""The engines answer this from memory."""


class RolloutWorker:
    """Generates, scores and evaluates; one per run.

    Every method blocks but :meth:`begin_start`, :meth:`poll_engines` and :meth:`close`.

    Attributes:
        meanwhile: called several times a second while a rollout or an evaluation is waited for.
    """

    meanwhile: Callable[[], None] | None = None

    def __init__(
        self, actor: Actor[RolloutActor], *, stop: StopFlag, note: Callable[[str], None] | None = None
    ) -> None:
        """Takes over the actor.

        Args:
            stop: ends a wait when its grace time is over.
            note: takes lines for the user while an answer of the engines is waited for that should come soon.
        """
        self._actor, self._stop, self._note = actor, stop, note
        self._asked: Ref[list[EngineReport]] | None = None
        self._rows_failed: Ref[None] | None = None

    def _wait(self, ref: Ref[R], what: str, deadline_s: float = CALL_DEADLINE_S, *, long: bool = False) -> R:
        meanwhile = self.meanwhile if long else None
        try:
            return wait_for(ref, what, stop=self._stop, deadline_s=deadline_s, status=self.status, meanwhile=meanwhile)
        except Exception as error:
            self._note_death(error)
            raise

    def _wait_aloud(
        self,
        ref: Ref[R],
        what: str,
        deadline_s: float = CALL_DEADLINE_S,
        *,
        status: Callable[[], str] | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> R:
        """Waits for what engines do in seconds, and says every ten of them which one does not answer."""
        aloud = None if self._note is None else Heartbeat(self._note, every_s=ALOUD_EVERY_S)
        try:
            return wait_for(
                ref,
                what,
                stop=self._stop,
                deadline_s=deadline_s,
                status=status or self.silence,
                heartbeat=aloud,
                meanwhile=meanwhile,
            )
        except Exception as error:
            self._note_death(error)
            raise

    def _note_death(self, error: Exception) -> None:
        if self._actor.is_named_in(error):
            error.add_note("That process was the rollout worker; see its log rollout.log.")

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

    def begin_plane(self) -> Ref[None]:
        """Asks for TransferQueue, through which the rows of ``--fully-async`` go; does not wait."""
        return self._actor.call(RolloutActor.open_plane)

    def finish_plane(self, started: Ref[None], heartbeat: Heartbeat | None = None) -> None:
        """Waits for what :meth:`begin_plane` gave.

        Raises:
            PlaneError: Ray has too few free CPUs for it.
        """
        what = "TransferQueue to start"
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
        return self._wait(call, f"rollout {rollout_id} to be generated and scored", long=True)

    def next_step(self, step: int) -> RolloutOutput:
        """Waits for the groups that a training step takes, with ``--fully-async``; their rows are in the plane then.

        Args:
            step: absolute id, which is the version of the weights that train.

        Raises:
            EngineDied, RewardError, GenerationError, TimeoutError, ValueError: see
                :meth:`relax_rollout.loop.producer.Producer.next_step`.
        """
        call = self._actor.call(RolloutActor.next_step, step)
        return self._wait(call, f"the samples of step {step} to be generated and scored", long=True)

    def settle(self, step: int) -> None:
        """Books the groups of a step as trained, and clears their rows."""
        self._wait(self._actor.call(RolloutActor.settle, step), "the rollout worker to book the step")

    def begin_push(self) -> dict[str, float]:
        """Brings all samples to rest, so that weights can be pushed and the state saved; nothing generates then.

        Returns:
            seconds of its parts, by name; see :meth:`relax_rollout.loop.producer.Producer.begin_push`.
        """
        call, what = self._actor.call(RolloutActor.begin_push), "the running requests to end"
        return self._wait_aloud(call, what, status=self.status, meanwhile=self.meanwhile)

    def end_push(self, version: int) -> None:
        """Lets the engines generate with the weights of this version, which all in use have."""
        self._wait(self._actor.call(RolloutActor.end_push, version), "the rollout worker to go on")

    def start_evaluation(self, version: int) -> None:
        """Begins :meth:`evaluate` beside the generation; no push begins before it has ended."""
        self._wait(self._actor.call(RolloutActor.start_evaluation, version), "the evaluation to begin")

    def drop_evaluation(self) -> None:
        """Ends what :meth:`start_evaluation` began, without a result."""
        self._wait(self._actor.call(RolloutActor.drop_evaluation), "the evaluation to end")

    def finish_evaluation(self) -> dict[str, float]:
        """Waits for the evaluation that :meth:`start_evaluation` began; its metrics."""
        return self._wait(self._actor.call(RolloutActor.finish_evaluation), "the evaluation", long=True)

    def check_rows(self) -> None:
        """Looks, without waiting, whether the way of the rows of ``--fully-async`` has failed.

        Raises:
            PlaneFailed: it has; the message says which part of it.
            RayActorError: the rollout worker has died.
        """
        import ray

        if self._rows_failed is None:
            self._rows_failed = self._actor.call(RolloutActor.rows_failed)
        if ray.wait([self._rows_failed], timeout=0)[0]:
            try:
                ray.get(self._rows_failed)
            except Exception as error:
                self._note_death(error)
                raise

    def rows(self, rollout_id: int) -> RolloutRows:
        """The rows of the rollout that was generated last, for the trainer's ranks."""
        return RolloutRows(self._actor, rollout_id)

    def evaluate(self, version: int) -> dict[str, float]:
        """Evaluates all of ``--eval-prompt-data`` with the weights the engines serve, of this version."""
        return self._wait(self._actor.call(RolloutActor.evaluate, version), "the evaluation", long=True)

    # ------------------------------------------------------------------ engines

    def weight_versions(self) -> list[int]:
        """The version of each engine that is in use, asked of the engines themselves."""
        call = self._actor.call(RolloutActor.weight_versions)
        return self._wait_aloud(call, "the engines to name their weights", VERSIONS_DEADLINE_S)

    def release_memory(self) -> None:
        """Gives the GPUs to the trainer."""
        self._wait_aloud(self._actor.call(RolloutActor.release_memory), "the engines to release GPU memory")

    def resume_memory(self, tag: "MemoryTag") -> None:
        """Takes GPU memory back; after ``weights`` a push must follow before anything is generated."""
        what = {"weights": "memory for weights", "kv_cache": "their KV cache"}[tag]
        self._wait_aloud(self._actor.call(RolloutActor.resume_memory, (tag,)), f"the engines to take back {what}")

    def poll_engines(self) -> "list[EngineReport] | None":
        """The state of each engine a moment ago; None when the actor has not answered yet, or not at all."""
        import ray

        if self._asked is None:
            self._asked = self._actor.call(RolloutActor.engine_reports)
        if not ray.wait([self._asked], timeout=0)[0]:
            return None
        asked, self._asked = self._asked, None
        try:
            reports: list[EngineReport] = ray.get(asked)
            return reports
        except ray.exceptions.RayError:  # the wait itself will say what is wrong
            return None

    def engine_reports(self) -> "list[EngineReport]":
        """The state of each engine as the requests so far have shown it; asks no engine."""
        return self._wait(self._actor.call(RolloutActor.engine_reports), "the state of the engines")

    def check_engines(self) -> "list[EngineReport]":
        """The state of each engine, after all in use were asked for a sign of life; a silent one takes minutes."""
        return self._wait_aloud(self._actor.call(RolloutActor.check_engines), "a sign of life of the engines")

    def replace_engine(self, address: "EngineAddress") -> None:
        """Tells where a lost engine's new server is; it serves only after :meth:`include_engine`."""
        self._wait(self._actor.call(RolloutActor.replace_engine, address), "the rollout worker to know the engine")

    def engine_not_restarted(self, name: str, why: str) -> None:
        """Tells that a lost engine could not be started again, which counts as one of its restarts."""
        call = self._actor.call(RolloutActor.engine_not_restarted, name, why)
        self._wait(call, "the rollout worker to know the engine")

    def exclude_engine(self, name: str, why: str) -> None:
        """Takes an engine out whose weights are not those of the others, so that it is restarted."""
        self._wait(self._actor.call(RolloutActor.exclude_engine, name, why), "the rollout worker to know the engine")

    def include_engine(self, name: str) -> None:
        """Lets a restarted engine serve, which has the current weights."""
        self._wait(self._actor.call(RolloutActor.include_engine, name), "the rollout worker to know the engine")

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

    def silence(self) -> str:
        """Says which engines do not answer, for a driver that waits for them; empty when all do. Never raises."""
        import ray

        try:
            silent = ray.get(self._actor.call(RolloutActor.silent_engines), timeout=2)
        except ray.exceptions.RayError:  # the wait itself will say what is wrong
            return ""
        return f"{', '.join(silent)} {'do' if len(silent) > 1 else 'does'} not answer" if silent else ""

    def close(self) -> list[Ref[None]]:
        """Asks the actor to close its connections; does not wait."""
        return [self._actor.call(RolloutActor.close)]
