"""Streaming: every row once an epoch, exact resume in a new process and on other numbers of readers, bounded memory."""

import gzip
import itertools
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from relax_data.errors import DataError
from relax_data.prompts.open import open_prompts
from relax_data.prompts.source import PromptSource
from relax_data.prompts.streaming import StreamingDataset
from relax_data.readers import cache
from relax_data.settings import DataSettings


def rows(n: int, first: int = 0) -> list[dict[str, Any]]:
    return [{"input": f"q{i}", "id": i} for i in range(first, first + n)]


@pytest.fixture
def files(write_jsonl: Callable[..., str], write_parquet: Callable[..., str]) -> list[str]:
    """Three files with different units: 500 lines, 730 rows in groups of 100, 300 rows in one group."""
    return [
        write_jsonl(rows(500), "a.jsonl"),
        write_parquet(rows(730, 500), "b.parquet", row_group_size=100),
        write_parquet(rows(300, 1230), "c.parquet", row_group_size=10_000),
    ]


TOTAL = 1530


def ids(dataset: StreamingDataset, n: int | None = None) -> list[int]:
    """Ids of the next ``n`` rows over epochs, or of the rest of the epoch."""
    if n is None:
        return [s.row["id"] for s in dataset]
    endless = itertools.chain.from_iterable(iter(lambda: iter(dataset), None))
    return [s.row["id"] for s in itertools.islice(endless, n)]


def test_without_shuffle_it_is_the_order_of_the_files(files: list[str]) -> None:
    dataset = StreamingDataset(files, buffer_size=64, shuffle=False)
    assert ids(dataset) == list(range(TOTAL))
    assert dataset.epoch == 1
    first = next(iter(dataset))
    assert (first.prompt, first.epoch, first.source) == ("q0", 1, f"{files[0]}:1")


@pytest.mark.parametrize("buffer_size", [1, 7, 64, 500, 10_000])
def test_every_row_once_an_epoch_in_an_order_of_its_own(files: list[str], buffer_size: int) -> None:
    dataset = StreamingDataset(files, buffer_size=buffer_size, seed=3)
    first, second = ids(dataset), ids(dataset)
    assert sorted(first) == sorted(second) == list(range(TOTAL))
    assert first != second
    assert ids(StreamingDataset(files, buffer_size=buffer_size, seed=3)) == first
    assert ids(StreamingDataset(files, buffer_size=buffer_size, seed=4)) != first


def test_the_shuffle_mixes_over_all_files(files: list[str]) -> None:
    order = ids(StreamingDataset(files, buffer_size=400))
    files_of_windows = [{0 if i < 500 else 1 if i < 1230 else 2 for i in order[k : k + 400]} for k in (0, 400, 800)]
    assert all(len(f) > 1 for f in files_of_windows), files_of_windows
    neighbours = sum(abs(a - b) == 1 for a, b in itertools.pairwise(order))
    assert neighbours < 40


def test_source_names_the_line_of_each_row(files: list[str]) -> None:
    for sample in StreamingDataset(files, buffer_size=100):
        first = {"a.jsonl": 0, "b.parquet": 500, "c.parquet": 1230}
        path, _, line = sample.source.rpartition(":")
        assert first[path.rpartition("/")[2]] + int(line) - 1 == sample.row["id"]


@hypothesis_settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    cut=st.integers(0, 2 * TOTAL),
    buffer_size=st.sampled_from([1, 13, 100, 2000]),
    shuffle=st.booleans(),
    before=st.integers(1, 4),
    after=st.integers(1, 4),
)
def test_resume_on_any_number_of_readers_is_exact(
    files: list[str], cut: int, buffer_size: int, shuffle: bool, before: int, after: int
) -> None:
    options: dict[str, Any] = {"buffer_size": buffer_size, "shuffle": shuffle}
    straight = ids(StreamingDataset(files, **options), cut * before + 40)
    readers = [StreamingDataset(files, **options, rank=r, world_size=before) for r in range(before)]
    cut //= before
    straight = straight[: cut * before + 40]
    got = [ids(r, cut) for r in readers]
    assert [i for turn in zip(*got, strict=True) for i in turn] == straight[: cut * before]
    state = json.loads(json.dumps(readers[0].state_dict()))
    again = [StreamingDataset(files, **options, rank=r, world_size=after) for r in range(after)]
    for reader in again:
        reader.load_state_dict(state)
    turns = 40 // after
    got = [ids(r, turns) for r in again]
    following = [i for turn in zip(*got, strict=True) for i in turn]
    assert following == straight[cut * before :][: turns * after]


@hypothesis_settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rounds=st.lists(st.lists(st.integers(0, 300), min_size=1, max_size=4), min_size=1, max_size=4))
def test_readers_that_stopped_at_different_rows_leave_nothing_out(files: list[str], rounds: list[list[int]]) -> None:
    states: list[dict[str, Any]] = []
    taken: list[int] = []
    for counts in rounds:
        readers = [StreamingDataset(files, buffer_size=50, rank=r, world_size=len(counts)) for r in range(len(counts))]
        for reader, n in zip(readers, counts, strict=True):
            if states:
                reader.load_state_dict(states)
            taken += ids(reader, n)
        states = [json.loads(json.dumps(r.state_dict())) for r in readers]
    last = StreamingDataset(files, buffer_size=50)
    last.load_state_dict(states)
    # Whatever each reader took, the last one goes on to the end of some epoch: every row equally often.
    while len(taken) % TOTAL or min(Counter(taken).values(), default=0) != max(Counter(taken).values(), default=0):
        taken += ids(last, 1)
        assert len(taken) < 8 * TOTAL
    assert len(Counter(taken)) in (0, TOTAL)


def test_a_state_is_small_and_holds_in_a_new_process(files: list[str]) -> None:
    dataset = StreamingDataset(files, buffer_size=10_000)
    ids(dataset, 777)
    state = json.dumps(dataset.state_dict())
    assert len(state) < 10_000
    code = (
        "import sys, json, itertools\n"
        "from relax_data.prompts.streaming import StreamingDataset\n"
        "d = StreamingDataset(sys.argv[2:], buffer_size=10_000)\n"
        "d.load_state_dict(json.loads(sys.argv[1]))\n"
        "print([s.row['id'] for s in d])\n"
    )
    out = subprocess.run(
        [sys.executable, "-c", code, state, *files], check=True, capture_output=True, text=True, timeout=300
    )
    assert json.loads(out.stdout) == ids(dataset)


def test_resume_does_not_read_the_file_from_its_start(
    write_jsonl: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_jsonl(rows(20_000))
    dataset = StreamingDataset(path, buffer_size=500)
    expected = ids(dataset, 15_000)
    state = dataset.state_dict()
    expected = ids(dataset, 100)
    read = []

    def counted(fd: int, size: int, at: int) -> bytes:
        read.append(size)
        return os.pread(fd, size, at)

    monkeypatch.setattr(cache, "_scan", lambda _: pytest.fail("the file was scanned again"))
    monkeypatch.setattr("relax_data.readers.jsonl._pread", counted)
    resumed = StreamingDataset(path, buffer_size=500)
    resumed.load_state_dict(state)
    assert ids(resumed, 100) == expected
    # One window of 500 rows in units of 64, of 20,000.
    assert sum(read) < 3000 * 30


def test_a_changed_file_is_an_error_that_says_so(write_jsonl: Callable[..., str]) -> None:
    path = write_jsonl(rows(100))
    state = StreamingDataset(path).state_dict()
    for changed, message in [
        (rows(101), "prompts.jsonl has .* bytes, at the checkpoint it had"),
        ([*rows(99), {"input": "q9X", "id": 99}], "begins or ends differently"),
        ([{"input": "X0", "id": 0}, *rows(99, 1)], "begins or ends differently"),
    ]:
        write_jsonl(changed)
        with pytest.raises(DataError, match=message):
            StreamingDataset(path).load_state_dict(state)
    write_jsonl(rows(100))
    changes: list[tuple[dict[str, Any], str]] = [
        ({"seed": 1}, "--rollout-seed is 1 and was 42"),
        ({"shuffle": False}, "--rollout-shuffle is False and was True"),
        ({"buffer_size": 5}, "--streaming-buffer-size is 5 and was 10000"),
    ]
    for options, message in changes:
        with pytest.raises(DataError, match=message):
            StreamingDataset(path, **options).load_state_dict(state)
    # In file order neither seed nor buffer matter.
    state = StreamingDataset(path, shuffle=False).state_dict()
    StreamingDataset(path, shuffle=False, seed=1, buffer_size=5).load_state_dict(state)


def test_states_of_readers_that_do_not_belong_together_are_refused(write_jsonl: Callable[..., str]) -> None:
    path = write_jsonl(rows(10))
    one, two = (StreamingDataset(path, rank=0, world_size=w).state_dict() for w in (2, 3))
    with pytest.raises(DataError, match="not the 2 of one run"):
        StreamingDataset(path).load_state_dict([one, two])
    with pytest.raises(ValueError, match="rank 2 of 2 readers"):
        StreamingDataset(path, rank=2, world_size=2)
    with pytest.raises(ValueError, match="buffer_size is 0"):
        StreamingDataset(path, buffer_size=0)


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_compressed_files_are_unpacked_once(write_jsonl: Callable[..., str], tmp_path: Path, suffix: str) -> None:
    plain = write_jsonl(rows(1000))
    packed = str(tmp_path / f"packed.jsonl{suffix}")
    data = Path(plain).read_bytes()
    if suffix == ".gz":
        # Two members behind each other, as `cat a.gz b.gz` makes them.
        Path(packed).write_bytes(gzip.compress(data[:100]) + gzip.compress(data[100:]))
    else:
        import pyarrow as pa

        Path(packed).write_bytes(b"".join(pa.compress(d, "zstd", asbytes=True) for d in (data[:100], data[100:])))
    dataset = StreamingDataset(packed, buffer_size=50)
    assert sorted(ids(dataset)) == list(range(1000))
    copies = list((cache.cache_dir() / "unpacked").iterdir())
    assert len(copies) == 1
    before = copies[0].stat().st_mtime_ns
    assert next(iter(StreamingDataset(packed, shuffle=False))).source == f"{packed}:1"
    assert copies[0].stat().st_mtime_ns == before
    Path(packed).write_bytes(Path(packed).read_bytes()[:-20])
    with pytest.raises(DataError, match=r"packed.jsonl.* cannot be unpacked"):
        StreamingDataset(packed)
    assert len(list((cache.cache_dir() / "unpacked").iterdir())) == 1


def test_bad_rows_name_their_line_or_are_counted(write_jsonl: Callable[..., str]) -> None:
    path = write_jsonl([{"input": "a"}, "", "{", {"inptu": 1}, {"input": "b"}])
    with pytest.raises(DataError, match=r"prompts.jsonl:3: not valid JSON"):
        list(StreamingDataset(path, shuffle=False))
    dataset = StreamingDataset(path, shuffle=False, skip_bad_rows=True, input_key="input")
    assert [s.prompt for s in dataset] == ["a", "b"]
    assert len(dataset.drops) == 2
    assert "prompts.jsonl:4: key 'input' is missing" in "".join(dataset.drops.lines())


@pytest.mark.parametrize("readers", [1, 2])
def test_an_epoch_without_a_row_is_an_error_for_who_reads_all_of_it(
    write_jsonl: Callable[..., str], readers: int
) -> None:
    dataset = StreamingDataset(write_jsonl(["", "null"]), skip_bad_rows=True, world_size=readers, shuffle=False)
    if readers == 1:
        with pytest.raises(DataError, match=r"no prompt in .*1 rows dropped: unusable row .*:2: .*not null"):
            list(dataset)
    else:
        assert list(dataset) == []


def test_lines_longer_than_an_index_entry_and_files_without_a_last_newline(tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    sizes = [10, 3_000_000, 5, 1_500_000, 20, 17_000_000, 1]
    path.write_text("\n".join(json.dumps({"input": "x" * n, "id": i}) for i, n in enumerate(sizes)))
    dataset = StreamingDataset(str(path), buffer_size=2)
    assert sorted((s.row["id"], len(s.prompt)) for s in dataset) == list(enumerate(sizes))
    assert dataset.rows_per_epoch == len(sizes)


@given(lengths=st.lists(st.integers(0, 400), min_size=1, max_size=400), newline=st.booleans())
@hypothesis_settings(max_examples=50, deadline=None)
def test_the_index_finds_every_line(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], newline: bool
) -> None:
    path = tmp_path_factory.mktemp("index") / "x.jsonl"
    lines = [b"x" * n for n in lengths]
    data = b"\n".join(lines) + (b"\n" if newline else b"")
    if not newline and not lines[-1]:
        lines.pop()
    path.write_bytes(data)
    index = cache._scan(str(path))
    assert index.rows[-1] == len(lines)
    assert index.offsets[-1] == len(data) if len(lines) else True
    for row, offset in zip(index.rows[:-1].tolist(), index.offsets[:-1].tolist(), strict=True):
        assert offset == sum(len(x) + 1 for x in lines[:row])


def test_an_unwritable_cache_costs_time_only(
    write_jsonl: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("RELAX_CACHE_DIR", str(tmp_path / "file" / "cache"))
    path = write_jsonl(rows(200))
    assert sorted(ids(StreamingDataset(path))) == list(range(200))


@pytest.mark.parametrize("left", [b"not an array", b"", b"PK\x03\x04", b"\x93NUMPY"])
def test_a_damaged_index_in_the_cache_is_made_again(write_jsonl: Callable[..., str], left: bytes) -> None:
    path = write_jsonl(rows(200))
    StreamingDataset(path)
    (index,) = (cache.cache_dir() / "index").iterdir()
    index.write_bytes(left)
    assert sorted(ids(StreamingDataset(path))) == list(range(200))


class TestPromptSource:
    """--use-streaming-dataset behind the same protocol as prompts in memory."""

    def source(
        self, paths: Sequence[str], tokenizer: Any, *, num_epoch: int | None = None, **options: Any
    ) -> PromptSource:
        settings = DataSettings(
            prompt_data=tuple(paths),
            label_key="id",
            use_streaming_dataset=True,
            **{"streaming_buffer_size": 50, **options},
        )
        return open_prompts(settings, tokenizer, num_epoch=num_epoch)

    def test_epochs_and_order_without_shuffle(self, files: list[str], tokenizer: Any) -> None:
        source = self.source(files, tokenizer, num_epoch=2)
        first = source.next(1000)
        assert [p.label for p in first] == list(range(1000))
        rest = source.next(10_000)
        assert len(rest) == 2 * TOTAL - 1000
        assert [p.prompt_id for p in rest] == list(range(1000, 2 * TOTAL))
        assert [p.epoch for p in rest] == [0] * (TOTAL - 1000) + [1] * TOTAL
        assert source.next(1) == []

    @pytest.mark.parametrize("cut", [0, 1, 49, 50, 1529, 1530, 2000])
    def test_resume(self, files: list[str], tokenizer: Any, cut: int) -> None:
        straight = self.source(files, tokenizer, rollout_shuffle=True).next(2 * TOTAL)
        source = self.source(files, tokenizer, rollout_shuffle=True)
        before = source.next(cut)
        state = json.loads(json.dumps(source.state_dict()))
        resumed = self.source(files, tokenizer, rollout_shuffle=True)
        resumed.load_state_dict(state)
        assert before + resumed.next(2 * TOTAL - cut) == straight

    def test_filter_and_bad_rows(self, write_jsonl: Callable[..., str], tokenizer: Any) -> None:
        data = [{"input": "x" * (1 + i % 10), "id": i} for i in range(200)]
        path = write_jsonl([*data[:100], "broken", *data[100:]])
        source = self.source([path], tokenizer, rollout_max_prompt_len=6, skip_bad_rows=True, num_epoch=1)
        got = source.next(1000)
        assert [p.label for p in got] == [i for i in range(200) if i % 10 < 5]
        dropped = Counter({"longer than --rollout-max-prompt-len 6": 100, "unusable row (--skip-bad-rows)": 1})
        assert source.drops.counts == dropped
        # What was dropped before a checkpoint stays counted after it.
        resumed = self.source([path], tokenizer, rollout_max_prompt_len=6, skip_bad_rows=True, num_epoch=2)
        resumed.load_state_dict(json.loads(json.dumps(source.state_dict())))
        assert len(resumed.next(1000)) == 100
        assert resumed.drops.counts == dropped + dropped
        assert any(line.startswith("200 rows dropped: longer than") for line in resumed.drops.lines())

    def test_blank_lines_at_the_end_of_an_epoch_do_not_end_the_run(
        self, write_jsonl: Callable[..., str], tokenizer: Any
    ) -> None:
        source = self.source([write_jsonl([*rows(2), "", ""])], tokenizer, num_epoch=2)
        assert [[p.label for p in source.next(n)] for n in (2, 1, 1, 1)] == [[0, 1], [0], [1], []]

    def test_an_epoch_without_any_prompt_is_an_error_not_a_loop(
        self, write_jsonl: Callable[..., str], tokenizer: Any
    ) -> None:
        path = write_jsonl(rows(10))
        with pytest.raises(DataError, match=r"no prompt in .*10 rows dropped: longer than --rollout-max-prompt-len 1"):
            self.source([path], tokenizer, rollout_max_prompt_len=1).next(1)

    def test_a_bad_row_stops_with_its_name(self, write_jsonl: Callable[..., str], tokenizer: Any) -> None:
        path = write_jsonl([*rows(2), "nonsense"])
        source = self.source([path], tokenizer)
        before = source.state_dict()
        with pytest.raises(DataError, match=r"prompts.jsonl:3: not valid JSON.*--skip-bad-rows"):
            source.next(5)
        assert source.state_dict() == before
        assert [p.prompt_id for p in source.next(2)] == [0, 1]
        with pytest.raises(DataError, match=r"prompts.jsonl:1: key 'prompt' is missing .*--input-key"):
            self.source([path], tokenizer, input_key="prompt")
        with pytest.raises(TypeError, match="only after an epoch"):
            len(self.source([path], tokenizer))


def test_a_full_disk_costs_the_index_only(write_jsonl: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache.np, "save", fail)
    assert sorted(ids(StreamingDataset(write_jsonl(rows(200))))) == list(range(200))
    assert list((cache.cache_dir() / "index").iterdir()) == []


def test_one_of_several_readers_does_not_loop_for_ever_over_unusable_rows(write_jsonl: Callable[..., str]) -> None:
    path = write_jsonl([{"other": i} for i in range(10)])
    reader = StreamingDataset(path, rank=1, world_size=3, skip_bad_rows=True)
    assert [list(reader), list(reader)] == [[], []]
    with pytest.raises(DataError, match="no prompt in"):  # after as many rows as there are
        list(reader)
