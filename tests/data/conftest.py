"""Small files and a tokenizer without a model, for the tests of relax-data."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest


class CharTokenizer:
    """One token a character, with the two calls of a transformers tokenizer that relax-data makes."""

    chat_template = "it names the roles 'user' and 'forbidden'"

    def __call__(self, texts: list[str], *, add_special_tokens: bool, return_attention_mask: bool) -> dict[str, Any]:
        if any("stumbles" in t for t in texts):
            raise RuntimeError("over this text")
        start = [1] if add_special_tokens else []
        return {"input_ids": [start + [ord(c) for c in t] for t in texts]}

    def apply_chat_template(self, messages: list[dict[str, Any]], **kwargs: Any) -> str:
        assert kwargs.pop("tokenize") is False
        if any(m["role"] == "forbidden" for m in messages):
            raise RuntimeError("role not allowed")
        text = "".join(f"<{m['role']}>{self._content(m['content'])}" for m in messages)
        for name, value in sorted(kwargs.items()):
            if name != "add_generation_prompt":
                text = f"[{name}={value}]" + text
        return text + ("<assistant>" if kwargs["add_generation_prompt"] else "")

    @staticmethod
    def _content(content: Any) -> str:
        if isinstance(content, str):
            return content
        return "".join(p["text"] if p["type"] == "text" else f"<{p['type']}>" for p in content)


@pytest.fixture
def tokenizer() -> CharTokenizer:
    return CharTokenizer()


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RELAX_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Callable[..., str]:
    """Writes rows (objects, or lines as they are) to a jsonl file and returns its path."""

    def write(rows: Iterable[Any], name: str = "prompts.jsonl") -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
        return str(path)

    return write


@pytest.fixture
def write_parquet(tmp_path: Path) -> Callable[..., str]:
    """Writes rows to a parquet file with a given size of row groups and returns its path."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    def write(rows: list[dict[str, Any]], name: str = "prompts.parquet", row_group_size: int = 100) -> str:
        path = tmp_path / name
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=row_group_size)
        return str(path)

    return write
