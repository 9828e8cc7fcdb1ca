"""When and where the trainer saves, and what it resumes from."""

import dataclasses
import os
import re
from typing import ClassVar

from relax_data.options import LARGEST_COUNT, Settings, option

ROLLOUT_ID = "{rollout_id}"
LATEST = "latest"
"""File in a folder of checkpoints that names the newest."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointSettings(Settings):
    """Checkpoints of the run, and exports to Hugging Face folders."""

    TITLE: ClassVar[str] = "Checkpoints"

    load: str | None = option(
        None,
        "Folder of checkpoints to resume from (its `latest`). May be the folder of --save before anything was saved.",
        metavar="FOLDER",
    )
    save: str | None = option(None, "Folder that checkpoints are written to.", metavar="FOLDER")
    save_interval: int | None = option(
        None, "Save every N rollouts, and after the last; default: only after the last.", ge=1, le=LARGEST_COUNT
    )
    save_hf: str | None = option(
        None,
        "Also write a Hugging Face folder whenever the run saves; the path must hold {rollout_id}.",
        metavar="PATH",
    )
    max_actor_ckpt_to_keep: int | None = option(
        None, "Keep only the newest N checkpoints of --save; default: all.", ge=1, le=LARGEST_COUNT
    )
    start_rollout_id: int | None = option(
        None, "Absolute id of the first rollout; default: from the loaded checkpoint, else 0.", ge=0, le=LARGEST_COUNT
    )

    def _problems(self, given: frozenset[str]) -> list[str]:
        found = []
        if self.load is not None and not os.path.isdir(self.load) and not self._same_folder():
            found.append(
                f"--load {self.load}: no such folder; give a folder of checkpoints, or the folder of --save to resume "
                "from it once it exists"
            )
        elif self.load is not None and not self._same_folder() and not os.path.isfile(os.path.join(self.load, LATEST)):
            found.append(f"--load {self.load}: {self._why_none(os.path.abspath(self.load))}")
        if self.save is not None and os.path.exists(self.save) and not os.path.isdir(self.save):
            found.append(f"--save {self.save}: exists and is not a folder; choose another path")
        if self.save is not None and self.load is None and os.path.exists(os.path.join(self.save, "latest")):
            found.append(
                f"--save {self.save}: holds the checkpoints of another run, which this one would replace; add --load "
                f"{self.save} to go on with it, or choose another folder"
            )
        if self.save_interval is not None and self.save is None and self.save_hf is None:
            found.append("--save-interval has no effect without --save or --save-hf; add one of them or remove it")
        if self.save_hf is not None and ROLLOUT_ID not in self.save_hf:
            found.append(f"--save-hf {self.save_hf}: must hold {ROLLOUT_ID}, for example {self.save_hf}/{ROLLOUT_ID}")
        if self.save_hf is not None and self._exports_over_checkpoints(self.save_hf):
            found.append(
                f"--save-hf {self.save_hf}: would replace the checkpoints of --save, which have these names; choose "
                f"another one, for example {self.save}/hf_{ROLLOUT_ID}"
            )
        if self.max_actor_ckpt_to_keep is not None and self.save is None:
            found.append("--max-actor-ckpt-to-keep has no effect without --save; add --save or remove it")
        return found

    @staticmethod
    def _why_none(load: str) -> str:
        if re.fullmatch(r"rollout_\d+", os.path.basename(load)) is not None:
            return (
                f"it is one checkpoint; give its parent {os.path.dirname(load)}, whose file {LATEST!r} names the "
                "checkpoint to go on with"
            )
        return (
            f"no checkpoint there (no file {LATEST!r}); give the folder that an earlier run had as --save. Start "
            "weights in a Hugging Face folder are --hf-checkpoint"
        )

    def _exports_over_checkpoints(self, save_hf: str) -> bool:
        folder, name = os.path.split(os.path.abspath(save_hf))
        named_like_one = re.fullmatch(r"rollout_\d+", name.replace(ROLLOUT_ID, "0")) is not None
        return self.save is not None and folder == os.path.abspath(self.save) and named_like_one

    def _same_folder(self) -> bool:
        return (
            self.save is not None and self.load is not None and os.path.abspath(self.save) == os.path.abspath(self.load)
        )
