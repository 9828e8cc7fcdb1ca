"""The trainer's ranks as the driver sees them: one object whose methods every rank carries out together."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from relax_cli.cluster.actors import Actor, Ref
from relax_cli.cluster.waits import ALOUD_EVERY_S, CALL_DEADLINE_S, SETUP_DEADLINE_S, Heartbeat, StopFlag, wait_for
from relax_cli.workers.trainer import TrainActor, TrainerFacts

if TYPE_CHECKING:
    from relax_data.types import StepManifest
    from relax_rollout.engines.base import EngineAddress
    from relax_rollout.weight_sync.base import PushReport
    from relax_train.checkpoint.manifest import Loaded

    from relax_cli.workers.references import RowReference

R = TypeVar("R")


class TrainerGroup:
    """All ranks. A method waits for all of them; the first failure of any rank is raised at once.

    Attributes:
        meanwhile: called several times a second while a training step is waited for.
    """

    meanwhile: Callable[[], object] | None = None
    _profiles: bool = False

    def __init__(
        self,
        actors: Sequence[Actor[TrainActor]],
        *,
        one_node: bool,
        stop: StopFlag,
        profiles: bool = False,
        note: Callable[[str], None] | None = None,
        silence: Callable[[], str] | None = None,
    ) -> None:
        """Takes over the actors, in rank order.

        Args:
            one_node: all ranks are on one node, so that they meet on the loopback.
            stop: ends a wait when its grace time is over.
            profiles: they record traces.
            note: takes lines for the user while a push of weights is waited for.
            silence: says which engines do not answer, for those lines.
        """
        self._profiles = profiles
        self._actors, self._one_node, self._stop = list(actors), one_node, stop
        self._note, self._silence = note, silence

    def _wait(
        self,
        refs: list[Ref[R]],
        what: str,
        *,
        meanwhile: Callable[[], object] | None = None,
        status: Callable[[], str] | None = None,
        heartbeat: Heartbeat | None = None,
    ) -> list[R]:
        try:
            return wait_for(
                refs,
                what,
                stop=self._stop,
                deadline_s=CALL_DEADLINE_S,
                meanwhile=meanwhile,
                status=status,
                heartbeat=heartbeat,
            )
        except Exception as error:
            for rank, actor in enumerate(self._actors):
                if actor.is_named_in(error):
                    error.add_note(f"That process was trainer rank {rank}; see its log trainer_rank{rank}.log.")
            raise

    # ------------------------------------------------------------------ start

    def begin_import(self) -> list[Ref[None]]:
        """Lets every rank import what :meth:`begin_setup` needs, without touching a device; does not wait."""
        return [actor.call(TrainActor.prepare) for actor in self._actors]

    def begin_setup(self, heartbeat: Heartbeat | None = None) -> list[Ref[TrainerFacts]]:
        """Finds the ranks a meeting point and lets them build their models; waits for the meeting point alone."""
        place = self._actors[0].call(TrainActor.place, self._one_node)
        master = wait_for(place, "rank 0's address", stop=self._stop, deadline_s=SETUP_DEADLINE_S, heartbeat=heartbeat)
        return [actor.call(TrainActor.setup, master) for actor in self._actors]

    def finish_setup(self, setup: list[Ref[TrainerFacts]], heartbeat: Heartbeat | None = None) -> TrainerFacts:
        """Waits for what :meth:`begin_setup` started.

        Raises:
            ValueError: model, files or parallel sizes do not fit together.
        """
        what = "the trainer to build its model"
        return wait_for(setup, what, stop=self._stop, deadline_s=SETUP_DEADLINE_S, heartbeat=heartbeat)[0]

    def connect(self, engines: "Sequence[EngineAddress]") -> None:
        """Tells the ranks where all engines are, in engine order; again when one was restarted."""
        self._wait([a.call(TrainActor.connect, list(engines)) for a in self._actors], "the trainer to know the engines")

    # ------------------------------------------------------------------ a step

    def train(self, manifest: "StepManifest", rows: "RowReference", rollout_id: int) -> dict[str, float]:
        """All optimizer steps on one rollout.

        Args:
            manifest: what every rank may know of the samples.
            rows: where each rank gets the rows of its own samples from.
            rollout_id: of the rollout; the weights before this step have this version.

        Returns:
            metrics of rank 0: the same on every rank but for the times (``time/...``, seconds).

        Raises:
            ValueError: the samples do not fit the settings; nothing was trained.
            FloatingPointError: the gradient of several optimizer steps in a row was not finite.
        """
        import ray

        shared: Any = ray.put(manifest)  # once, not once a rank; the actors get the manifest itself
        refs = [actor.call(TrainActor.train, shared, rows, rollout_id) for actor in self._actors]
        return self._wait(refs, f"training step {rollout_id}", meanwhile=self.meanwhile)[0]

    def push_weights(self, version: int, engines: Sequence[str] | None = None) -> "PushReport":
        """Sends the current weights to the engines of these names, or to all, as ``version``.

        Returns:
            that of rank 0: which engines do not have them, the same on every rank, and the seconds of its parts.

        Raises:
            WeightPushFailed: these engines refuse to generate until a whole push.
        """
        refs = [actor.call(TrainActor.push_weights, version, engines) for actor in self._actors]
        aloud = None if self._note is None else Heartbeat(self._note, every_s=ALOUD_EVERY_S)
        what = f"weights {version} to reach the engines"
        return self._wait(refs, what, status=self._silence, heartbeat=aloud)[0]

    def sleep(self) -> None:
        """Gives the GPUs to the engines."""
        self._wait([a.call(TrainActor.sleep) for a in self._actors], "the trainer to release GPU memory")

    def wake(self) -> None:
        """Takes the GPUs back; the engines must have released their memory."""
        self._wait([a.call(TrainActor.wake) for a in self._actors], "the trainer to take GPU memory back")

    def measure_room(self) -> None:
        """While the engines have all they use: what fits beside them stays on the GPUs from the next step on."""
        self._wait([a.call(TrainActor.measure_room) for a in self._actors], "the trainer to measure its room")

    def free_resident(self) -> None:
        """Gives away also what has stayed on the GPUs, before an engine starts there."""
        self._wait([a.call(TrainActor.free_resident) for a in self._actors], "the trainer to free the rest of the GPUs")

    def begin_traces(self) -> None:
        """Lets the ranks write the traces of profiled steps while the engines generate; does not wait.

        What a rank is asked next waits for it.
        """
        if self._profiles:
            for actor in self._actors:
                actor.call(TrainActor.write_traces, False)

    def finish_traces(self) -> None:
        """Waits until the ranks have written all that they recorded; no step may follow."""
        if self._profiles:
            self._wait([a.call(TrainActor.write_traces, True) for a in self._actors], "the training traces")

    # ------------------------------------------------------------------ checkpoints

    def save(self, directory: str, rollout_id: int, extra: dict[str, Any], files: Path | None = None) -> None:
        """Writes the checkpoint of a rollout under ``directory``; it appears whole or not at all.

        Args:
            extra: JSON values of the driver, which :meth:`load` gives back.
            files: folder with files that become part of the checkpoint
                (:func:`relax_train.checkpoint.folders.side_folder`); it is gone afterwards.

        Raises:
            CheckpointError: it could not be written; the previous one is as it was.
        """
        refs = [actor.call(TrainActor.save, directory, rollout_id, extra, files) for actor in self._actors]
        self._wait(refs, f"checkpoint {rollout_id}")

    def load(self, directory: str) -> "Loaded | None":
        """Loads the latest checkpoint under ``directory``.

        Returns:
            its rollout id, what was saved as ``extra``, and its folder; None when there is no checkpoint yet.

        Raises:
            CheckpointError: it is unreadable.
            ValueError: it belongs to another model or parallel layout.
        """
        return self._wait([a.call(TrainActor.load, directory) for a in self._actors], "the checkpoint to load")[0]

    def save_hf(self, directory: str) -> None:
        """Writes a Hugging Face folder that transformers loads.

        Raises:
            CheckpointError: it could not be written; what was there before is as it was.
        """
        refs = [actor.call(TrainActor.save_hf, directory) for actor in self._actors]
        self._wait(refs, f"the Hugging Face export {directory}")

    def close(self) -> list[Ref[None]]:
        """Asks every rank to put its things in order; does not wait."""
        return [actor.call(TrainActor.close) for actor in self._actors]
