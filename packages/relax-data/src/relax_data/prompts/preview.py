"""Looks at the first rows of prompt data and at a folder's tokenizer, before and without anything heavy is loaded."""

import gzip
import json
import os
import zlib
from pathlib import Path
from typing import IO, Any

from relax_data.errors import DataError
from relax_data.prompts.source import FileSet, check_kind, check_same_order
from relax_data.prompts.template import SourcedRow, check_rendering
from relax_data.readers.cache import fingerprint
from relax_data.readers.files import FileSlice
from relax_data.readers.jsonl import decoded
from relax_data.readers.open import open_rows
from relax_data.settings import DataSettings

_MOST_BYTES = 4 << 20
_FARTHEST_START = 10_000
"""Lines that are passed over to come to a slice; further on, its rows are not looked at."""
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def first_rows(file: FileSlice, count: int) -> list[SourcedRow]:
    """Up to ``count`` rows from the first one on, without going through the file; blank lines are left out.

    Fewer come when they are long, and none of a dataset of the hub, which would have to be downloaded, or of a slice
    that begins far behind the first row or counts from the end.

    Raises:
        DataError: the file cannot be read.
    """
    start = file.start or 0
    if file.is_hub or not 0 <= start < _FARTHEST_START or (file.stop is not None and file.stop < 0):
        return []
    stop = start + count if file.stop is None else min(start + count, file.stop)
    if file.path.endswith(".parquet"):
        rows = open_rows(file.path)
        try:
            first, last = FileSlice(file.path, start, stop).bounds(rows.count)
            found = rows.read(first, last).rows(range(last - first))
        finally:
            rows.close()
    else:
        found = decoded(file.path, start, _lines(file.path, start, stop))
    return [SourcedRow(f"{file.path}:{start + i + 1}", row) for i, row in enumerate(found) if row is not None]


def _lines(path: str, start: int, stop: int) -> list[bytes]:
    """The lines ``start`` to ``stop`` that lie within the first megabytes."""
    lines: list[bytes] = []
    left = _MOST_BYTES
    try:
        with _opened(path) as file:
            for number in range(stop):
                line = file.readline(left + 1)
                left -= len(line)
                if not line or left < 0:
                    break
                if number >= start:
                    lines.append(line.removesuffix(b"\n"))
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    return lines


def _opened(path: str) -> IO[bytes]:
    if path.endswith(".gz"):
        return gzip.open(path, "rb")  # type: ignore[return-value]  # it has all that is used of a file
    if path.endswith(".zst"):
        import io

        import pyarrow as pa

        return io.BufferedReader(pa.CompressedInputStream(pa.OSFile(path), "zstd"))
    return open(path, "rb")


class FolderTokenizer:
    """What the files of a model folder say of its tokenizer, without transformers' classes, which load torch.

    It renders chat messages as transformers does, and counts tokens. It is for looking ahead: where it finds a fault,
    ``AutoTokenizer`` has the last word.

    Attributes:
        chat_template: the text of the template; None when there is none in the usual places.
    """

    def __init__(self, folder: str):
        self._folder = Path(folder)
        fields = _json_object(self._folder / "tokenizer_config.json")
        legacy = _json_object(self._folder / "special_tokens_map.json")
        self._special = {}
        for name in _SPECIAL:
            token = fields.get(name, legacy.get(name))
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str):
                self._special[name] = token
        self.bos_token = self._special.get("bos_token")
        self.chat_template: str | None = None
        template = self._folder / "chat_template.jinja"
        if template.is_file():
            self.chat_template = template.read_text(encoding="utf-8")
        elif isinstance(fields.get("chat_template"), str):
            self.chat_template = fields["chat_template"]

    def apply_chat_template(self, messages: Any, *, tokenize: bool, tools: Any = None, **arguments: Any) -> str:
        """The text of the messages, by transformers' own function. The arguments are those of its tokenizers."""
        from transformers.utils.chat_template_utils import render_jinja_template

        assert not tokenize, "only the text is asked for"
        made: Any = render_jinja_template(
            [messages], tools=tools, chat_template=self.chat_template, **{**self._special, **arguments}
        )
        text = made[0][0] if isinstance(made, tuple) else made
        return str(text)

    def counts(self, texts: list[str], *, add_special_tokens: bool) -> list[int] | None:
        """Tokens of each text; None when there is no readable ``tokenizer.json``, or too much text to look at."""
        from tokenizers import Tokenizer

        if sum(map(len, texts)) > _MOST_BYTES // 4:
            return None
        try:
            tokenizer = Tokenizer.from_file(str(self._folder / "tokenizer.json"))
        except Exception:  # the library raises nothing more special
            return None
        return [len(e.ids) for e in tokenizer.encode_batch(texts, add_special_tokens=add_special_tokens)]


def _json_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8")) if os.path.isfile(path) else {}
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def check_resumes(
    state: dict[str, Any], files: list[FileSlice], settings: DataSettings, chat_template: str | dict[str, str] | None
) -> None:
    """Holds that a saved place in the prompts is one in the data and the prompts of these settings.

    It reads a few kilobytes of each file, so that it can be asked before anything starts; the source itself looks again
    at all of it.

    Args:
        state: of ``PromptSource.state_dict``.

    Raises:
        DataError: data, order or rendering are others.
    """
    check_kind(state, "stream" if settings.use_streaming_dataset else "memory")
    if not any(file.is_hub for file in files):
        FileSet([{**fingerprint(f.path), "slice": [f.start, f.stop]} for f in files]).check(state["files"])
    check_same_order(state, settings)
    check_rendering(state.get("rendering"), settings, chat_template)
