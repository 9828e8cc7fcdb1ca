"""hf:// addresses. The real library is asked where it is installed; no network is needed."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from relax_data.errors import DataError
from relax_data.prompts.streaming import StreamingDataset
from relax_data.readers.open import open_rows


def test_without_the_library_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"needs the library datasets: pip install 'relax-data\[hf\]'"):
        open_rows("hf://owner/name")


def test_unknown_options_are_refused() -> None:
    with pytest.raises(DataError, match="unknown option 'splt=train'"):
        open_rows("hf://owner/name?splt=train")


@pytest.mark.slow
def test_a_dataset_of_the_real_library_streams_with_exact_resume(
    write_jsonl: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "hf-cache")
    write_jsonl([{"input": f"q{i}", "id": i, "tags": {"a": [i]}} for i in range(500)], "data/train.jsonl")
    write_jsonl([{"input": "t", "id": 0, "tags": {"a": [0]}}], "data/test.jsonl")
    address = f"hf://{tmp_path / 'data'}"
    dataset = StreamingDataset(f"{address}@[100:400]", buffer_size=50)
    rows = iter(dataset)
    got = [next(rows).row for _ in range(120)]
    state = json.loads(json.dumps(dataset.state_dict()))
    rest = [s.row["id"] for s in rows]
    assert sorted([r["id"] for r in got] + rest) == list(range(100, 400))
    assert all(r["tags"] == {"a": [r["id"]]} for r in got)
    again = StreamingDataset(f"{address}@[100:400]", buffer_size=50)
    again.load_state_dict(state)
    assert [s.row["id"] for s in again] == rest
    assert open_rows(f"{address}?split=test").count == 1
    with pytest.raises(DataError, match="cannot be loaded"):
        open_rows(f"hf://{tmp_path / 'nothing'}")
