"""The training profiler and the memory recorders, on CPU."""

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from relax_profiling.recorders.memory_memray import MemrayRecorder
from relax_profiling.recorders.memory_torch import TorchRecorder
from relax_profiling.recorders.session import TorchSession
from relax_profiling.recorders.trace_files import RankTag
from relax_profiling.recorders.training import TrainingObserver, build_observer
from relax_profiling.settings import MemoryProfileSettings, TrainProfileSettings
from relax_profiling.trace.load import Trace, load_trace


@pytest.fixture
def loop(tmp_path: Path) -> Any:
    """Runs a small real training loop under an observer; returns the traces by target."""
    torch = pytest.importorskip("torch")

    def run(
        steps: Iterable[int], *, fail_at: int | None = None, phases: bool = True, **settings: Any
    ) -> dict[str, Trace]:
        observer = build_observer(
            TrainProfileSettings(use_pytorch_profiler=True, **settings),
            MemoryProfileSettings(),
            trace_dir=tmp_path,
            rank=1,
            dp=1,
        )
        observer.before_model()
        model = torch.nn.Linear(16, 16)
        optimizer = torch.optim.SGD(model.parameters())
        try:
            for offset in steps:
                with observer.phase("train_overall", offset):
                    if phases:
                        with observer.phase("train_log_probs", offset), torch.no_grad():
                            torch.tanh(model(torch.ones(4, 16)))
                    with observer.phase("train_actor", offset):
                        model(torch.ones(4, 16)).sum().backward()
                        if offset == fail_at:
                            raise RuntimeError("the reward is gone")
                        optimizer.step()
        finally:
            observer.close()
            observer.close()
        files = sorted((tmp_path / "train_trace").glob("*")) if (tmp_path / "train_trace").exists() else []
        assert all("_rank1_dp1_tp0_pp0." in f.name for f in files)
        return {f.name.split("_rank")[0]: load_trace(f) for f in files}

    return run


def marks(trace: Trace, target: str) -> list[str]:
    return sorted(s.name for s in trace.spans if s.name.startswith(target))


def operators(trace: Trace) -> set[str]:
    return {trace.names[i] for columns in trace.threads.values() for i in columns.name}


def test_two_to_four_records_three_steps_for_each_target(loop: Any) -> None:
    traces = loop(
        range(7),
        profile_step_start=2,
        profile_step_end=4,
        profile_target=("train_overall", "train_actor", "train_log_probs"),
    )
    assert set(traces) == {"train_overall", "train_actor", "train_log_probs"}
    for target, trace in traces.items():
        assert marks(trace, target) == [f"{target}#{i}" for i in (2, 3, 4)]
        assert trace.problems == []
    assert "aten::tanh" in operators(traces["train_log_probs"])
    assert "aten::tanh" not in operators(traces["train_actor"])
    assert "aten::mm" in operators(traces["train_actor"])
    assert {"aten::tanh", "aten::mm"} <= operators(traces["train_overall"])


def test_a_run_that_ends_inside_the_window_writes_what_it_has(loop: Any) -> None:
    traces = loop(range(3), profile_step_start=2, profile_step_end=4)
    assert marks(traces["train_overall"], "train_overall") == ["train_overall#2"]


def test_a_run_that_fails_inside_the_window_writes_and_shows_its_own_error(loop: Any, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="the reward is gone"):
        loop(range(9), fail_at=3, profile_step_start=2, profile_step_end=4)
    (file,) = (tmp_path / "train_trace").iterdir()
    assert marks(load_trace(file), "train_overall") == ["train_overall#2", "train_overall#3"]


def test_a_run_that_never_reaches_the_window_writes_nothing(loop: Any, tmp_path: Path) -> None:
    assert loop(range(3), profile_step_start=3, profile_step_end=4) == {}
    assert not (tmp_path / "train_trace").exists()


def test_the_first_step_can_be_recorded_although_nothing_warms_up(loop: Any) -> None:
    traces = loop(range(2), profile_step_start=0, profile_step_end=0)
    assert marks(traces["train_overall"], "train_overall") == ["train_overall#0"]


def test_flops_stacks_and_memory_are_recorded_when_asked_for(loop: Any) -> None:
    traces = loop(
        range(2),
        profile_step_start=1,
        profile_step_end=1,
        profile_with_flops=True,
        profile_with_stack=True,
        profile_with_memory=True,
    )
    trace = traces["train_overall"]
    # Forward twice, and the weight's gradient: the input needs none.
    assert trace.flops["float"] == 3 * 2 * 4 * 16 * 16
    assert trace.meta["with_stack"] == trace.meta["profile_memory"] == 1


def test_a_loop_without_train_overall_ends_a_step_when_the_next_begins(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    observer = build_observer(
        TrainProfileSettings(
            use_pytorch_profiler=True, profile_step_start=1, profile_step_end=2, profile_target=("train_actor",)
        ),
        MemoryProfileSettings(),
        trace_dir=tmp_path,
    )
    for offset in range(4):
        with observer.phase("train_log_probs", offset):
            pass
        with observer.phase("train_actor", offset):
            pass
        written = list((tmp_path / "train_trace").glob("*")) if (tmp_path / "train_trace").exists() else []
        assert bool(written) == (offset == 3)
    observer.close()
    assert marks(load_trace(written[0]), "train_actor") == ["train_actor#1", "train_actor#2"]


def test_steps_beyond_the_window_are_not_recorded_when_its_last_one_never_came(loop: Any) -> None:
    traces = loop([1, 2, 9, 10], profile_step_start=1, profile_step_end=4)
    assert marks(traces["train_overall"], "train_overall") == ["train_overall#1", "train_overall#2"]


@pytest.mark.parametrize("stacks", [False, True])
@pytest.mark.parametrize("end", ["write", "last", "close"])
def test_a_deferred_trace_is_written_when_asked_for_and_holds_its_window_alone(
    tmp_path: Path, stacks: bool, end: str
) -> None:
    torch = pytest.importorskip("torch")
    settings = TrainProfileSettings(
        use_pytorch_profiler=True, profile_step_start=1, profile_step_end=2, profile_with_stack=stacks
    )
    observer = build_observer(settings, MemoryProfileSettings(), trace_dir=tmp_path).defer_traces()
    observer.before_model()
    observer.write_traces()  # nothing is there yet
    for offset in range(2 if end == "last" else 5):
        with observer.phase("train_overall", offset):
            (torch.ones(4) + 1 if offset in (1, 2) else torch.tanh(torch.ones(4))).sum()
        assert not (tmp_path / "train_trace").exists()
        if end == "write" and offset == 3:
            observer.write_traces()
            break
    if end == "last":  # the run ends within the window
        observer.write_traces()
        assert not (tmp_path / "train_trace").exists()
        observer.write_traces(last=True)
    if end == "close":
        observer.close()
    (file,) = (tmp_path / "train_trace").iterdir()
    observer.close()
    assert list((tmp_path / "train_trace").iterdir()) == [file]
    trace = load_trace(file)
    assert marks(trace, "train_overall") == [f"train_overall#{i}" for i in ((1,) if end == "last" else (1, 2))]
    assert "aten::add" in operators(trace)
    assert "aten::tanh" not in operators(trace)


SIGTERM_SCRIPT = textwrap.dedent(
    """
    import os, signal, sys
    import torch
    import torch._inductor  # the profiler imports it when it starts: here once for all
    from relax_profiling.recorders import session
    from relax_profiling.recorders.training import build_observer
    from relax_profiling.settings import MemoryProfileSettings, TrainProfileSettings
    settings = TrainProfileSettings(
        use_pytorch_profiler=True,
        profile_step_start=0,
        profile_step_end=0,
        profile_target=["train_overall", "train_actor"],
    )
    publish = session.publish

    def publish_signalled(*words):
        os.kill(os.getpid(), signal.SIGTERM)
        return publish(*words)

    session.publish = publish_signalled

    def run(folder, written):
        observer = build_observer(settings, MemoryProfileSettings(), trace_dir=folder)
        if written != "at once":
            observer.defer_traces()
        observer.before_model()
        with observer.phase("train_overall", 0), observer.phase("train_actor", 0):
            torch.ones(4).sum()
        if written == "when asked":
            observer.write_traces()
        elif written == "at the end":
            observer.close()

    for written in sys.argv[2:]:
        child = os.fork()
        if child == 0:
            try:
                run(os.path.join(sys.argv[1], written), written)
            finally:
                os._exit(3)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
)


def test_a_sigterm_while_a_trace_is_written_waits_for_it(tmp_path: Path) -> None:
    """Each case in a process of its own, forked from one that has imported torch."""
    pytest.importorskip("torch")
    cases = ["at once", "when asked", "at the end"]
    words = [sys.executable, "-c", SIGTERM_SCRIPT, str(tmp_path), *cases]
    done = subprocess.run(words, timeout=300, capture_output=True, text=True)
    assert done.stdout.split() == [str(-signal.SIGTERM)] * len(cases), done.stderr
    for written in cases:
        names = sorted(path.name.split("_rank")[0] for path in (tmp_path / written / "train_trace").iterdir())
        assert names == ["train_actor", "train_overall"], written


def small_run(observer: TrainingObserver, *, between: Any = lambda step: None) -> list[int]:
    """Six steps; what was done."""
    import torch

    observer.before_model()
    done = []
    for offset in range(6):
        with observer.phase("train_overall", offset):
            torch.ones(4).sum()
        done.append(offset)
        between(offset)
    observer.close()
    return done


class FailingRecorder:
    """Fails in all that happens during the training."""

    def start(self) -> None:
        pass

    def dump(self) -> Path | None:
        raise OSError(28, "No space left on device")

    def close(self) -> None:
        raise OSError(28, "No space left on device")


def test_training_goes_on_when_nothing_can_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The folder's place is taken by a file in the middle of the window, as it would be lost with its disk."""
    pytest.importorskip("torch")
    settings = TrainProfileSettings(use_pytorch_profiler=True, profile_step_start=1, profile_step_end=3)
    session = TorchSession(settings, tmp_path / "run" / "train_trace", RankTag())
    observer = TrainingObserver(session, FailingRecorder(), snapshot_after=2)
    done = small_run(observer, between=lambda step: (tmp_path / "run").write_text("") if step == 2 else None)
    assert done == [0, 1, 2, 3, 4, 5]
    said = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert [m.split(" is lost, and the training goes on: ")[0] for m in said] == [
        "the memory snapshot",
        "the training trace",
        "the memory recording",
    ]
    assert "NotADirectoryError" in said[1]


def test_training_goes_on_when_torch_cannot_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On a full disk torch leaves a cut file beside the one that it was asked for, and raises nothing."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(
        torch.profiler.profile, "export_chrome_trace", lambda self, path: Path(path + ".tmp").write_text("{")
    )
    settings = TrainProfileSettings(use_pytorch_profiler=True, profile_step_start=1, profile_step_end=3)
    observer = build_observer(settings, MemoryProfileSettings(), trace_dir=tmp_path)
    assert small_run(observer) == [0, 1, 2, 3, 4, 5]
    assert "is the disk full?" in caplog.text
    assert list((tmp_path / "train_trace").iterdir()) == []


def test_training_goes_on_when_the_profiler_cannot_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    torch = pytest.importorskip("torch")

    def fail(self: Any) -> None:
        raise RuntimeError("Profiler is already enabled on this thread")

    monkeypatch.setattr(torch.profiler.profile, "start", fail)
    settings = TrainProfileSettings(use_pytorch_profiler=True, profile_step_start=1, profile_step_end=3)
    observer = build_observer(settings, MemoryProfileSettings(), trace_dir=tmp_path)
    assert small_run(observer) == [0, 1, 2, 3, 4, 5]
    assert caplog.text.count("the training trace is lost") == 1
    assert "already enabled" in caplog.text


def test_a_fork_leaves_the_recording_to_its_parent(tmp_path: Path) -> None:
    """A child that ends inside the window by a SIGTERM, as workers of a data loader may, and one that closes all."""
    program = """
        import os, signal, sys
        from relax_profiling.settings import MemoryProfileSettings, TrainProfileSettings
        from relax_profiling.recorders.training import build_observer
        import torch
        settings = TrainProfileSettings(use_pytorch_profiler=True, profile_step_start=0, profile_step_end=2)
        observer = build_observer(settings, MemoryProfileSettings(), trace_dir=sys.argv[1])
        observer.before_model()
        for step in range(4):
            with observer.phase("train_overall", step):
                torch.ones(4).sum()
            if step == 1:
                for ending in (observer.close, lambda: os.kill(os.getpid(), signal.SIGTERM)):
                    child = os.fork()
                    if child == 0:
                        with observer.phase("train_overall", 2):
                            ending()
                        os._exit(0)
                    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)], capture_output=True, text=True, timeout=300
    )
    assert done.stdout.split() == ["0", "-15"]
    (trace,) = (tmp_path / "train_trace").iterdir()
    assert marks(load_trace(trace), "train_overall") == [f"train_overall#{i}" for i in range(3)]


def test_settings_with_problems_are_refused_together(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"(?s)ends at 2 before.*give at least 1"):
        build_observer(
            TrainProfileSettings(use_pytorch_profiler=True, profile_step_start=4, profile_step_end=2),
            MemoryProfileSettings(record_memory_history=True, memory_snapshot_num_steps=0),
            trace_dir=tmp_path,
        )


class CountingRecorder:
    """A third recorder: one class is all it takes."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def start(self) -> None:
        self.calls.append("start")

    def dump(self) -> None:
        self.calls.append("dump")

    def close(self) -> None:
        self.calls.append("close")


def test_a_snapshot_after_three_steps_comes_after_step_two_and_once() -> None:
    recorder = CountingRecorder()
    observer = TrainingObserver(None, recorder, snapshot_after=3)
    observer.before_model()
    for offset in range(5):
        with observer.phase("train_overall", offset):
            recorder.calls.append(f"step {offset}")
    observer.close()
    observer.close()
    assert recorder.calls == ["start", "step 0", "step 1", "step 2", "dump", "step 3", "step 4", "close"]


def test_torch_recording_without_a_gpu_is_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this host has a GPU")
    recorder = TorchRecorder(tmp_path, RankTag(), "snapshot.pickle")
    recorder.start()
    assert recorder.dump() is None
    recorder.close()
    assert len(caplog.records) == 1
    assert "--memory-recorder memray" in caplog.text


class FakeCuda:
    """torch's CUDA calls, of which a host without a GPU has none; what the recorder does with them is under test."""

    def __init__(self) -> None:
        self.observers: list[Any] = []
        self.recording: list[Any] = []

    def _record_memory_history(self, **arguments: Any) -> None:
        self.recording.append(arguments.get("enabled", "all"))

    def _dump_snapshot(self, name: str) -> None:
        Path(name).write_bytes(b"snapshot")


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    torch = pytest.importorskip("torch")
    fake = FakeCuda()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory", fake)
    monkeypatch.setattr(torch._C, "_cuda_attach_out_of_memory_observer", fake.observers.append, raising=False)
    return fake


def test_two_out_of_memory_errors_in_one_second_leave_two_snapshots(
    tmp_path: Path, fake_cuda: FakeCuda, frozen_clock: Any
) -> None:
    recorder = TorchRecorder(tmp_path, RankTag(2), "snapshot.pickle", clock=frozen_clock)
    recorder.start()
    (observer,) = fake_cuda.observers
    observer(0, 8 << 30, 1, 2 << 30)
    observer(0, 8 << 30, 1, 2 << 30)
    recorder.close()
    observer(0, 8 << 30, 1, 2 << 30)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "memory_snapshot_time1713780123_rank2_dp0_tp0_pp0_oom_snapshot.pickle",
        "memory_snapshot_time1713780124_rank2_dp0_tp0_pp0_oom_snapshot.pickle",
    ]
    assert fake_cuda.recording == ["all", None]


def test_a_snapshot_that_cannot_be_written_does_not_hide_the_error(
    tmp_path: Path, fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = TorchRecorder(tmp_path, RankTag(), "snapshot.pickle")
    recorder.start()

    def full(name: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(fake_cuda, "_dump_snapshot", full)
    fake_cuda.observers[0](0, 8 << 30, 1, 2 << 30)  # returns, so that torch raises its own error
    assert "No space left" in caplog.text
    assert list(tmp_path.iterdir()) == []


MEMRAY_SCRIPT = textwrap.dedent(
    """
    import os, signal, sys, time
    from relax_profiling.settings import MemoryProfileSettings, TrainProfileSettings
    from relax_profiling.recorders.training import build_observer
    observer = build_observer(
        TrainProfileSettings(),
        MemoryProfileSettings(record_memory_history=True, memory_recorder="memray"),
        trace_dir=sys.argv[1],
        rank=5,
    )
    observer.before_model()
    kept = [bytearray(4 << 20) for _ in range(8)]
    how = sys.argv[2]
    if how == "close":
        observer.close()
    elif how == "exit":
        sys.exit(3)
    elif how == "raise":
        raise KeyError("lost")
    elif how == "SIGTERM":
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(30)
    """
)


@pytest.mark.parametrize(("how", "status"), [("close", 0), ("exit", 3), ("raise", 1), ("SIGTERM", -signal.SIGTERM)])
def test_memray_files_are_whole_however_the_process_ends(tmp_path: Path, how: str, status: int) -> None:
    memray = pytest.importorskip("memray")
    environment = {**os.environ, "PYTHONFAULTHANDLER": "0"}
    done = subprocess.run(
        [sys.executable, "-c", MEMRAY_SCRIPT, str(tmp_path), how], timeout=300, env=environment, capture_output=True
    )
    assert done.returncode == status, done.stderr.decode()
    (path,) = (tmp_path / "memory_snapshot").iterdir()
    assert path.name.endswith("_rank5_dp0_tp0_pp0_snapshot.bin")
    with memray.FileReader(path) as reader:
        assert reader.metadata.end_time is not None, "closed, not only flushed"
        assert reader.metadata.peak_memory >= 32 << 20


def test_memray_never_writes_a_name_twice_and_records_a_process_once(
    tmp_path: Path, frozen_clock: Any, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("memray")
    (tmp_path / "memory_snapshot_time1713780123_rank0_dp0_tp0_pp0_snapshot.bin").write_text("older")
    first = MemrayRecorder(tmp_path, RankTag(), "snapshot.pickle", clock=frozen_clock)
    second = MemrayRecorder(tmp_path, RankTag(), "snapshot.pickle", clock=frozen_clock)
    first.start()
    second.start()
    path = first.dump()
    assert path is not None
    assert path.name == "memory_snapshot_time1713780124_rank0_dp0_tp0_pp0_snapshot.bin"
    assert second.dump() is None
    assert "records this process already" in caplog.text
    assert (tmp_path / "memory_snapshot_time1713780123_rank0_dp0_tp0_pp0_snapshot.bin").read_text() == "older"
    assert len(list(tmp_path.iterdir())) == 2
