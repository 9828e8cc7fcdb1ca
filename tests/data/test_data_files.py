"""Which files --prompt-data means."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from relax_data.errors import DataError
from relax_data.readers.files import SUFFIXES, FileSlice, resolve_files
from relax_data.readers.open import READERS, open_rows


def test_folders_globs_lists_and_slices(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "sub/c.parquet", "sub/notes.txt", ".hidden/d.jsonl", "sub/_tmp.jsonl"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("{}\n")
    a, b, c = (str(tmp_path / n) for n in ("a.jsonl", "b.jsonl", "sub/c.parquet"))
    assert [f.path for f in resolve_files(str(tmp_path))] == [a, b, c]
    assert [f.path for f in resolve_files(str(tmp_path / "*.jsonl"))] == [a, b]
    assert [f.path for f in resolve_files(str(tmp_path / "sub" / "**" / "*"))] == [str(tmp_path / "sub/_tmp.jsonl"), c]
    assert resolve_files([b, f"{a}@[2:-1]", f"{a}@[:3]"]) == [
        FileSlice(b),
        FileSlice(a, 2, -1),
        FileSlice(a, None, 3),
    ]
    assert resolve_files("hf://owner/name@[5:]") == [FileSlice("hf://owner/name", 5)]
    assert resolve_files("hf://name?split=test") == [FileSlice("hf://name?split=test")]
    assert resolve_files([f"{a}@[0:1]", f"{b}@[-3:-2]", f"{a}@[5:-1]"])[1] == FileSlice(b, -3, -2)


@pytest.mark.parametrize(
    ("start", "stop", "expected"),
    [(None, None, (0, 10)), (2, 5, (2, 5)), (-3, None, (7, 10)), (8, 99, (8, 10)), (5, 2, (5, 5)), (None, -4, (0, 6))],
)
def test_slices_mean_what_python_means(start: int | None, stop: int | None, expected: tuple[int, int]) -> None:
    bounds = FileSlice("x", start, stop).bounds(10)
    assert bounds == expected
    assert list(range(*bounds)) == list(range(10))[start:stop]


def test_bad_names_say_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("{}\n")
    (tmp_path / "other.jsonl").write_text("{}\n")
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "table.csv").write_text("x\n")
    (tmp_path / "void").mkdir()
    os.mkfifo(tmp_path / "pipe.jsonl")
    for spec, message in [
        (tmp_path / "trian.jsonl", "does not exist; did you mean .*train.jsonl"),
        (tmp_path / "nowhere" / "x.jsonl", "nor does its folder"),
        (tmp_path / "empty.jsonl", "empty.jsonl is empty"),
        (tmp_path / "table.csv", "unknown kind of file; known are .jsonl"),
        (tmp_path / "void", "holds no data file"),
        (tmp_path / "*.parquet", "no data file matches"),
        (f"{tmp_path}/train.jsonl@[1]", "a slice is written"),
        (f"{tmp_path}/train.jsonl@[0:-]", "a slice is written"),
        (f"{tmp_path}/train.jsonl@[5:2]", "@.5:2.: the slice holds no row, STOP must lie behind START"),
        (f"{tmp_path}/train.jsonl@[3:3]", "holds no row"),
        (f"{tmp_path}/train.jsonl@[-2:-2]", "holds no row"),
        (f"{tmp_path}/train.jsonl@[:0]", "holds no row"),
        (f"{tmp_path}/train.jsonl@[-1:0]", "holds no row"),
        ("hf://", "hf://: write hf://OWNER/NAME"),
        ("hf://?split=train", "write hf://OWNER/NAME"),
        ("hf://x?nope=1", "unknown option 'nope=1'; known are config="),
        ("hf://x?split=", "unknown option 'split='"),
        ("hf://x?split=a&split=b", "split= is given twice"),
        (f"{tmp_path}/train.jsonl@[{'9' * 5000}:]", "9\\.\\.\\.: a slice is written"),
        (tmp_path / "pipe.jsonl", "pipe.jsonl is no regular file .a pipe, socket or device"),
        ("/dev/null@[0:1]", "/dev/null is no regular file"),
        ("~no_such_user/x.jsonl", "~no_such_user/x.jsonl cannot be read: .*home directory"),
        ("x" * 5000, "cannot be read: File name too long"),
        ("", "an empty path"),
        (f"{tmp_path}/t*@[1:2]", None),
        (f"{tmp_path}/[to]*.jsonl@[0:1]", "slices 2 files at once"),
    ]:
        if message is None:
            assert len(resolve_files(str(spec))) == 1
        else:
            with pytest.raises(DataError, match=message):
                resolve_files(str(spec))
    with pytest.raises(DataError, match="named 2 times"):
        resolve_files([str(tmp_path / "train.jsonl")] * 2)
    with pytest.raises(DataError, match="no prompt data is named"):
        resolve_files([])


def test_the_table_of_readers_says_which_files_are_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tuple(READERS) == SUFFIXES
    opened = []
    for suffix in READERS:
        monkeypatch.setitem(READERS, suffix, lambda path, suffix=suffix: opened.append(suffix))
    for suffix in SUFFIXES:
        open_rows(f"rows{suffix}")
    assert opened == list(SUFFIXES)


def test_a_file_that_no_reader_knows_is_refused_with_the_known_ends() -> None:
    with pytest.raises(DataError, match=r"rows\.csv: unknown kind of file; known are \.jsonl, "):
        open_rows("rows.csv")


@pytest.mark.parametrize(
    ("said", "instead", "message"),
    [
        (b"\x16\x3c\x19", b"\x16\x50\x19", "its footer says 40 rows, its 3 row groups 30;"),
        (b"\x16\x3c\x19", b"\x16\x14\x19", "its footer says 10 rows, its 3 row groups 30;"),
        (b"\x16\x14\x26", b"\x16\x13\x26", "its footer says 30 rows, its 3 row groups -30, one of them -10;"),
    ],
)
def test_a_parquet_footer_that_contradicts_its_row_groups_is_named(
    write_parquet: Callable[..., str], said: bytes, instead: bytes, message: str
) -> None:
    path = Path(write_parquet([{"input": "a"}] * 30, row_group_size=10))
    content = path.read_bytes()
    footer = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    assert said in content[footer:]
    # Numbers of the footer are in zigzag code: 0x3c is 30, 0x50 is 40, 0x14 is 10, 0x13 is -10.
    path.write_bytes(content[:footer] + content[footer:].replace(said, instead))
    with pytest.raises(DataError, match=f"prompts.parquet is damaged: {message} write it again"):
        open_rows(str(path))
