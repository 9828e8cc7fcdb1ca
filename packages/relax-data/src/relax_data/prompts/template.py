"""From a row to a prompt: keys, chat template, tokens, length limit."""

import collections
import dataclasses
import json
import logging
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from relax_data.errors import DataError
from relax_data.readers.base import Row
from relax_data.settings import DataSettings
from relax_data.types import Messages, Prompt

logger = logging.getLogger(__name__)

T = TypeVar("T")
_MARK = re.compile(r"<(image|video|audio)>")
_EXAMPLES = 3


@dataclasses.dataclass(slots=True)
class SourcedRow:
    """A decoded row, or why there is none, and where it stands (``file:line``, 1-based)."""

    source: str
    row: Row | DataError


class Drops:
    """Rows that became no prompt, counted by reason, with the first few of each."""

    def __init__(self) -> None:
        self.counts: collections.Counter[str] = collections.Counter()
        self._examples: dict[str, list[str]] = {}

    def add(self, reason: str, example: str) -> None:
        """Counts one row. ``reason`` is the same for all rows of a kind, ``example`` names this one."""
        self.counts[reason] += 1
        examples = self._examples.setdefault(reason, [])
        if len(examples) < _EXAMPLES:
            examples.append(example)

    def restore(self, counts: dict[str, int]) -> None:
        """Goes on from the ``counts`` of a checkpoint; examples are only those seen since."""
        self.counts = collections.Counter(counts)

    def __len__(self) -> int:
        return self.counts.total()

    def lines(self) -> list[str]:
        """One readable line a reason; empty when nothing was dropped."""
        found = []
        for why, n in self.counts.items():
            examples = "; ".join(self._examples.get(why, []))
            found.append(f"{n} rows dropped: {why}" + (f" ({examples})" if examples else ""))
        return found


class PromptBuilder:
    """Makes prompts of rows as the settings say.

    With a chat template its text is tokenised as it is; a plain text gets what special tokens the tokenizer adds.

    Args:
        settings: the data options.
        tokenizer: a transformers tokenizer, or anything with its ``__call__`` and ``apply_chat_template``.
    """

    def __init__(self, settings: DataSettings, tokenizer: Any):
        self._settings = settings
        self._tokenizer = tokenizer
        self.drops = Drops()
        if settings.apply_chat_template and not getattr(tokenizer, "chat_template", True):
            raise DataError(
                "--apply-chat-template: the tokenizer has no chat template; leave the flag out for plain text prompts, "
                "or add chat_template.jinja to the --hf-checkpoint folder"
            )

    def build(self, rows: Iterable[SourcedRow]) -> list[Prompt | None]:
        """A prompt for each row, or None for each dropped one, which is counted in ``drops``.

        ``prompt_id`` and ``epoch`` are -1: the source that hands the prompt out sets them.

        Raises:
            DataError: a row is unusable and ``skip_bad_rows`` is off; names file, line and key.
        """
        drafts = [self._usable(self._draft, r.row, r.source) for r in rows]
        texts = [d.text for d in drafts if d is not None]
        try:
            tokens = iter(self._tokenise(texts))
        except Exception:
            # One of them stopped it: each alone, so that its row is named.
            return [None if d is None else self._usable(self._finish_alone, d, d.source) for d in drafts]
        return [None if d is None else self._finish(d, next(tokens)) for d in drafts]

    def check(self, sourced: SourcedRow) -> None:
        """Raises :class:`DataError` when the row is unusable; counts nothing."""
        self._tokenise_alone(self._draft(sourced.row, sourced.source))

    def _tokenise(self, texts: list[str]) -> Sequence[Sequence[int]]:
        if not texts:
            return []
        ids: Sequence[Sequence[int]] = self._tokenizer(
            texts, add_special_tokens=not self._settings.apply_chat_template, return_attention_mask=False
        )["input_ids"]
        assert len(ids) == len(texts), "the tokenizer returned another number of texts than it was given"
        return ids

    def _usable(self, step: Callable[[T, str], Prompt | None], value: T, source: str) -> Prompt | None:
        """Result of ``step``, or None for an unusable row when those are skipped."""
        try:
            return step(value, source)
        except DataError as error:
            if not self._settings.skip_bad_rows:
                raise DataError(f"{error}. Mend the row, or pass --skip-bad-rows to go on without it") from None
            self.drops.add("unusable row (--skip-bad-rows)", str(error))
            return None

    def _tokenise_alone(self, draft: Prompt) -> Sequence[int]:
        try:
            return self._tokenise([draft.text])[0]
        except Exception as error:
            raise DataError(f"{draft.source}: the tokenizer failed: {type(error).__name__}: {error}") from error

    def _finish_alone(self, draft: Prompt, source: str) -> Prompt | None:
        return self._finish(draft, self._tokenise_alone(draft))

    def _finish(self, draft: Prompt, ids: Sequence[int]) -> Prompt | None:
        limit = self._settings.rollout_max_prompt_len
        if limit is not None and len(ids) > limit:
            self.drops.add(f"longer than --rollout-max-prompt-len {limit}", f"{draft.source} has {len(ids)} tokens")
            return None
        if not ids:
            self.drops.add("no token in the prompt", draft.source)
            return None
        draft.input_ids = list(ids)
        return draft

    def _draft(self, row: Row | DataError, source: str) -> Prompt:
        if isinstance(row, DataError):
            raise row
        s = self._settings
        value = _required(row, s.input_key, "--input-key", source)
        multimodal = self._multimodal(row, source)
        messages = None
        if s.apply_chat_template:
            messages = _messages(value, s.system_prompt, multimodal, f"{source}: key {s.input_key!r}")
            text = self._render(messages, row, source)
        elif isinstance(value, str):
            text = value
        else:
            hint = "; add --apply-chat-template for chat messages" if isinstance(value, list) else ""
            raise DataError(f"{source}: key {s.input_key!r} must be a string, not {type(value).__name__}{hint}")
        if _no_text(text):
            raise DataError(f"{source}: the prompt holds half of a surrogate pair, which is no text; see --input-key")
        return Prompt(
            prompt_id=-1,
            epoch=-1,
            source=source,
            text=text,
            input_ids=[],
            label=None if s.label_key is None else _label(row, s.label_key, source),
            messages=messages,
            metadata=_metadata(row, s.metadata_key, source),
            multimodal=multimodal,
        )

    def _render(self, messages: Messages, row: Row, source: str) -> str:
        s = self._settings
        kwargs = dict(s.apply_chat_template_kwargs or {})
        if s.tool_key is not None and row.get(s.tool_key) is not None:
            kwargs["tools"] = _tools(row[s.tool_key], f"{source}: key {s.tool_key!r}")
        try:
            text = self._tokenizer.apply_chat_template(
                messages, **{"add_generation_prompt": True, **kwargs, "tokenize": False}
            )
        except Exception as error:
            # Templates are programs of the checkpoint and raise what they like.
            raise DataError(f"{source}: the chat template failed: {type(error).__name__}: {error}") from error
        if not isinstance(text, str):
            raise DataError(f"{source}: the chat template gave a {type(text).__name__}, not a text")
        return text

    def _multimodal(self, row: Row, source: str) -> dict[str, Any]:
        found = {}
        for modality, key in (self._settings.multimodal_keys or {}).items():
            if row.get(key) is not None:
                items = row[key] if isinstance(row[key], list) else [row[key]]
                if not all(isinstance(i, str | bytes | dict) for i in items):
                    raise DataError(f"{source}: key {key!r} must hold paths, bytes or objects, one or a list")
                found[modality] = items
        return found


def _required(row: Row, key: str, flag: str, source: str) -> Any:
    value = row.get(key)
    # A column of numbers has NaN where a value is missing.
    if value is None or (isinstance(value, float) and math.isnan(value)):
        missing = f"is missing (the row has {', '.join(map(repr, row)) or 'no key'})"
        state = missing if key not in row else "is null" if value is None else "is not a number (NaN)"
        raise DataError(f"{source}: key {key!r} {state}; {flag} names it")
    return value


def _label(row: Row, key: str, source: str) -> Any:
    value = _required(row, key, "--label-key", source)
    if isinstance(value, float) and value.is_integer() and abs(value) >= 2**63:
        raise DataError(
            f"{source}: key {key!r} is a number beyond 64 bits ({value:.3g}), whose digits are not all kept: write it "
            "as a string; --label-key names it"
        )
    return value


def _no_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def _metadata(row: Row, key: str, source: str) -> dict[str, Any]:
    value = row.get(key)
    if value is None:
        return {}
    value = _parsed(value)
    if not isinstance(value, dict):
        raise DataError(f"{source}: key {key!r} must be a JSON object, not {type(value).__name__}; see --metadata-key")
    return value


def _tools(value: Any, where: str) -> list[Any]:
    value = _parsed(value)
    if not isinstance(value, list):
        raise DataError(f"{where} must be a list of tool descriptions, not {type(value).__name__}; see --tool-key")
    return value


def _parsed(value: Any) -> Any:
    """Parquet has no type for free-form objects, so they are often strings of JSON there."""
    if isinstance(value, str):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def _messages(value: Any, system: str | None, multimodal: dict[str, Any], where: str) -> Messages:
    """Chat messages of a row: a string is one user message; a system prompt goes before messages without one."""
    if isinstance(value, str):
        messages: Messages = [{"role": "user", "content": value}]
    elif isinstance(value, list) and value and all(isinstance(m, dict) and "role" in m for m in value):
        # Arrow gives every message of a column all the keys that any of them has.
        messages = [{k: v for k, v in m.items() if v is not None or k == "content"} for m in value]
    else:
        raise DataError(f"{where} must be a string or a list of messages with 'role' and 'content'")
    if system is not None and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    return _place_items(messages, multimodal, where) if multimodal else messages


def _place_items(messages: Messages, multimodal: dict[str, Any], where: str) -> Messages:
    """Puts images and the like where their marks stand; without any mark, before the first user text."""
    queues = {modality: list(items) for modality, items in multimodal.items()}
    marked = any(_MARK.search(m["content"]) for m in messages if isinstance(m.get("content"), str))
    placed: Messages = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, str) and marked:
            message = {**message, "content": _split_marks(content, queues, where)}
        elif isinstance(content, str) and message["role"] == "user" and any(queues.values()):
            items = [{"type": m, m: i} for m, queue in queues.items() for i in queue]
            message = {**message, "content": [*items, {"type": "text", "text": content}]}
            queues = {}
        elif isinstance(content, list):
            # The row has placed its items itself.
            for part in content:
                if isinstance(part, dict) and queues.get(part.get("type", "")):
                    queues[part["type"]].pop(0)
        placed.append(message)
    left = {m: len(q) for m, q in queues.items() if q}
    if left:
        raise DataError(f"{where}: more items than marks in the text: {left} left over; write <image> for each image")
    return placed


def _split_marks(text: str, queues: dict[str, list[Any]], where: str) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = []
    position = 0
    for mark in _MARK.finditer(text):
        modality = mark[1]
        if not queues.get(modality):
            raise DataError(f"{where}: more <{modality}> marks than items of --multimodal-keys")
        if mark.start() > position:
            parts.append({"type": "text", "text": text[position : mark.start()]})
        parts.append({"type": modality, modality: queues[modality].pop(0)})
        position = mark.end()
    if position < len(text):
        parts.append({"type": "text", "text": text[position:]})
    return parts
