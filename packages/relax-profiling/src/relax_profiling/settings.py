"""The profiling options: one field is one flag. Needs no torch."""

import dataclasses
from collections.abc import Iterable
from typing import Any, ClassVar, Literal

from relax_profiling.recorders.memory import RECORDERS
from relax_profiling.recorders.windows import LaunchOffset, RolloutId, StepWindow, window_problem

Activity = Literal["CPU", "GPU", "MEM", "RPD"]
Target = Literal["train_overall", "train_actor", "train_log_probs"]

LONGEST_SUFFIX = 150
"""Bytes of the end of a file name: the whole name may have 255, and time and ranks stand before it."""


def _option(default: Any, help: str, metavar: str | None = None, *, choices: Iterable[str] = ()) -> Any:
    return dataclasses.field(default=default, metadata={"help": help, "metavar": metavar, "choices": tuple(choices)})


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _without_master(settings: Any, master: str, given: frozenset[str]) -> list[str]:
    """An option of a profiler that is off has no effect: say so for each that the user set."""
    names = [f.name for f in dataclasses.fields(settings) if f.name != master and f.name in given]
    return [f"{_flag(n)} has no effect without {_flag(master)}: add {_flag(master)} or drop it" for n in names]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SGLangProfileSettings:
    """Recording of the rollout engines: what, and in which rollouts (absolute ids)."""

    TITLE: ClassVar[str] = "SGLang profiling"

    sglang_profile: bool = _option(False, "Profile the SGLang engines; alone: every rollout.")
    sglang_profile_step_start: int | None = _option(
        None, "First rollout to profile (absolute id, from 0, inclusive); alone: to the end of the run.", "ID"
    )
    sglang_profile_step_end: int | None = _option(
        None, "Last rollout to profile (absolute id, inclusive); alone: from 0.", "ID"
    )
    sglang_profile_steps: tuple[int, ...] | None = _option(
        None, "Rollouts to profile (absolute ids); wins over the start and end.", "ID"
    )
    sglang_profile_num_steps: int = _option(
        3, "Engine forward steps recorded in each profiled rollout; -1 records the whole rollout.", "N"
    )
    sglang_profile_activities: tuple[Activity, ...] = _option(("CPU", "GPU"), "What the engines record.")
    sglang_profile_by_stage: bool = _option(False, "Write prefill and decode to traces of their own.")
    sglang_profile_with_stack: bool = _option(False, "Record Python call stacks (slower).")
    sglang_profile_record_shapes: bool = _option(False, "Record the shapes of operator inputs.")
    sglang_profile_output_dir: str | None = _option(
        None, "Folder for the traces; default traces/NAME/sglang_trace. rollout_ID/ is appended.", "DIR"
    )

    def problems(self, given: frozenset[str] = frozenset()) -> list[str]:
        """Everything wrong with these options; ``given`` names the fields that the user set."""
        found = [] if self.sglang_profile else _without_master(self, "sglang_profile", given)
        wrong = window_problem(self.sglang_profile_step_start, self.sglang_profile_step_end)
        if wrong:
            found.append(f"--sglang-profile-step-start / --sglang-profile-step-end: {wrong}")
        wrong = window_problem(None, None, self.sglang_profile_steps)
        if wrong:
            found.append(f"--sglang-profile-steps: {wrong}")
        if self.sglang_profile_num_steps == 0 or self.sglang_profile_num_steps < -1:
            found.append(
                f"--sglang-profile-num-steps {self.sglang_profile_num_steps}: give at least 1 forward step, "
                "or -1 for the whole rollout"
            )
        if not self.sglang_profile_activities:
            found.append("--sglang-profile-activities is empty; give for instance CPU GPU")
        return found

    def window(self) -> StepWindow[RolloutId]:
        """The profiled rollouts."""
        steps = self.sglang_profile_steps
        if steps is not None:
            return StepWindow(RolloutId, steps=frozenset(steps))
        return StepWindow(RolloutId, first=self.sglang_profile_step_start or 0, last=self.sglang_profile_step_end)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainProfileSettings:
    """Recording of training steps with torch.profiler: what, and in which (offsets of this launch)."""

    TITLE: ClassVar[str] = "Training profiling"

    use_pytorch_profiler: bool = _option(False, "Profile training steps with torch.profiler.")
    profile_step_start: int = _option(
        10, "First training step to record, counted from 0 in this launch, also after a resume (inclusive).", "N"
    )
    profile_step_end: int = _option(12, "Last training step to record (inclusive): 2 to 4 records 3 steps.", "N")
    profile_target: tuple[Target, ...] = _option(
        ("train_overall",), "Parts of a step to record; each writes files of its own."
    )
    profile_with_stack: bool = _option(False, "Record Python call stacks (slower).")
    profile_with_memory: bool = _option(False, "Record allocations and frees (slower).")
    profile_with_flops: bool = _option(False, "Record input shapes, from which the report computes FLOPs and MFU.")

    def problems(self, given: frozenset[str] = frozenset()) -> list[str]:
        """Everything wrong with these options; ``given`` names the fields that the user set."""
        found = [] if self.use_pytorch_profiler else _without_master(self, "use_pytorch_profiler", given)
        wrong = window_problem(self.profile_step_start, self.profile_step_end)
        if wrong:
            found.append(f"--profile-step-start / --profile-step-end: {wrong}")
        if not self.profile_target:
            found.append("--profile-target is empty; give for instance train_overall")
        elif len(set(self.profile_target)) < len(self.profile_target):
            found.append(f"--profile-target names one target twice: {' '.join(self.profile_target)}")
        return found

    def window(self) -> StepWindow[LaunchOffset]:
        """The recorded training steps."""
        return StepWindow(LaunchOffset, first=self.profile_step_start, last=self.profile_step_end)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryProfileSettings:
    """Recording of allocations: by which recorder, and when it is written."""

    TITLE: ClassVar[str] = "Memory profiling"

    record_memory_history: bool = _option(
        False, "Record allocations from before the model is built; written on every out-of-memory error."
    )
    memory_snapshot_num_steps: int | None = _option(
        None, "Write a snapshot after this many training steps of this launch (3: after step 2).", "N"
    )
    memory_snapshot_path: str = _option("snapshot.pickle", "End of the file names.", "NAME")
    memory_snapshot_dir: str | None = _option(
        None, "Folder for the snapshots; default traces/NAME/memory_snapshot.", "DIR"
    )
    memory_recorder: str = _option(
        "torch", "torch records GPU memory, memray the memory of the host (one .bin file a process).", choices=RECORDERS
    )

    def problems(self, given: frozenset[str] = frozenset()) -> list[str]:
        """Everything wrong with these options; ``given`` names the fields that the user set."""
        found = [] if self.record_memory_history else _without_master(self, "record_memory_history", given)
        n = self.memory_snapshot_num_steps
        if n is not None and n < 1:
            found.append(f"--memory-snapshot-num-steps {n}: give at least 1 (a snapshot after the first step)")
        name = self.memory_snapshot_path
        if not name or "/" in name or "\0" in name:
            found.append(
                f"--memory-snapshot-path {name!r} is the end of a file name, without a folder; "
                "use --memory-snapshot-dir for the folder"
            )
        elif len(name.encode(errors="replace")) > LONGEST_SUFFIX:
            found.append(
                f"--memory-snapshot-path has {len(name.encode(errors='replace'))} bytes: it is the end of a file name, "
                f"of at most {LONGEST_SUFFIX} bytes"
            )
        recorder = RECORDERS.get(self.memory_recorder)
        if recorder is None:
            found.append(f"--memory-recorder {self.memory_recorder!r}: choose one of {', '.join(RECORDERS)}")
        elif self.record_memory_history and (missing := recorder.missing()) is not None:
            found.append(f"--memory-recorder {self.memory_recorder} {missing}")
        return found


SETTINGS: tuple[type, ...] = (SGLangProfileSettings, TrainProfileSettings, MemoryProfileSettings)
