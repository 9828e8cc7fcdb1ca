"""From a row to a prompt: keys, chat template, tokens, length limit."""

import collections
import dataclasses
import hashlib
import json
import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future
from decimal import Decimal
from typing import Any, TypeVar

import numpy as np

from relax_data.errors import DataError
from relax_data.multimodal.processor import Features, ProcessorCrashed, ProcessorPool
from relax_data.options import flag
from relax_data.prompts.messages import check_rendered, kind, parsed_json, read_messages, read_tools
from relax_data.prompts.picture_digests import OTHER_PICTURES
from relax_data.prompts.token_bound import characters_a_token, fewest_tokens
from relax_data.readers.base import Row
from relax_data.settings import DataSettings
from relax_data.types import Messages, Prompt

logger = logging.getLogger(__name__)

T = TypeVar("T")
_EXAMPLES, _KEPT = 3, 64
"""Dropped rows that are shown for a reason, and those that are remembered."""
_LONG_TEXT = 100_000
"""Characters from which on it is worth asking whether a text must be tokenised at all."""


@dataclasses.dataclass(slots=True)
class SourcedRow:
    """A decoded row, or why there is none, and where it stands (``file:line``, 1-based)."""

    source: str
    row: Row | DataError


_UNUSABLE = "unusable row (--skip-bad-rows)"


class Drops:
    """Rows that became no prompt, counted by reason, with the first few of each."""

    def __init__(self) -> None:
        self.counts: collections.Counter[str] = collections.Counter()
        self._examples: dict[str, list[str]] = {}

    def add(self, reason: str, example: str) -> None:
        """Counts one row. ``reason`` is the same for all rows of a kind, ``example`` names this one."""
        self.counts[reason] += 1
        examples = self._examples.setdefault(reason, [])
        if len(examples) < _KEPT:
            examples.append(example)

    def restore(self, counts: dict[str, int]) -> None:
        """Goes on from the ``counts`` of a checkpoint; examples are only those seen since."""
        self.counts = collections.Counter(counts)

    def __len__(self) -> int:
        return self.counts.total()

    @property
    def unusable(self) -> int:
        """Rows that ``--skip-bad-rows`` left out."""
        return self.counts[_UNUSABLE]

    def unusable_rows(self) -> list[str]:
        """What is wrong with them, the first few dozen; each begins with ``file:line``."""
        return self._examples.get(_UNUSABLE, [])

    def lines(self) -> list[str]:
        """One readable line a reason; empty when nothing was dropped."""
        found = []
        for why, n in self.counts.items():
            examples = "; ".join(self._examples.get(why, [])[:_EXAMPLES])
            found.append(f"{n} rows dropped: {why}" + (f" ({examples})" if examples else ""))
        return found


class PromptBuilder:
    """Makes prompts of rows as the settings say.

    With a chat template its text is tokenised as it is; a plain text gets what special tokens the tokenizer adds, but
    no second begin-of-sequence before one that it begins with (a chat text that was rendered before).

    Args:
        settings: the data options.
        tokenizer: a transformers tokenizer, or anything with its ``__call__`` and ``apply_chat_template``.
        processor: of rows with ``--multimodal-keys``: makes tokens and tensors of text and pictures together.
        media_tokens: that stand for pictures and videos, of a model that reads pictures: a row without a picture may
            have none of them.
    """

    def __init__(
        self,
        settings: DataSettings,
        tokenizer: Any,
        processor: ProcessorPool | None = None,
        media_tokens: Collection[int] = (),
    ):
        self._settings = settings
        self._media_tokens = frozenset(media_tokens)
        self._tokenizer = tokenizer
        self._processor = processor
        self.drops = Drops()
        self._bound: tuple[int, bool] | None = None
        self._asked_bound = False
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
        drafts = [self._short_enough(self._usable(self._draft, r.row, r.source)) for r in rows]
        pictured = self._with_pictures(drafts)
        texts = [d.text for i, d in enumerate(drafts) if d is not None and i not in pictured]
        try:
            tokens = iter(self._tokenise(texts))
        except Exception:
            # One of them stopped it: each alone, so that its row is named.
            return [
                pictured[i] if i in pictured else None if d is None else self._usable(self._finish_alone, d, d.source)
                for i, d in enumerate(drafts)
            ]
        return [
            pictured[i] if i in pictured else None if d is None else self._finish_usable(d, next(tokens))
            for i, d in enumerate(drafts)
        ]

    def _with_pictures(self, drafts: Sequence[Prompt | None]) -> dict[int, Prompt | None]:
        """The prompts of those drafts that have pictures, by their place; None for those that are dropped."""
        if self._processor is None:
            return {}
        pictured = {i: d for i, d in enumerate(drafts) if d is not None and d.multimodal}
        if not pictured:
            return {}
        begin = time.perf_counter()
        futures = {i: self._processed(self._processor, d) for i, d in pictured.items()}

        def finish(i: int, source: str) -> Prompt | None:
            try:
                draft = take_features(pictured[i], futures[i].result(), self._media_tokens)
            except ProcessorCrashed as error:
                raise DataError(str(error)) from error
            return self._finish(draft, draft.input_ids)

        try:
            return {i: self._usable(finish, i, draft.source) for i, draft in pictured.items()}
        except DataError:
            for future in futures.values():
                future.cancel()
            raise
        finally:
            self._processor.waited_s += time.perf_counter() - begin

    def _processed(self, processor: ProcessorPool, prompt: Prompt) -> Future[Features]:
        key = (self._settings.multimodal_keys or {}).get("image")
        return processor.submit(f"{prompt.source}: key {key!r}", prompt.text, prompt.multimodal)

    def restore(self, prompt: Prompt) -> None:
        """Makes the tensors of a prompt's pictures anew: a checkpoint has their paths or their bytes alone.

        Args:
            prompt: with the digest of its pictures, where the checkpoint has one.

        Raises:
            DataError: a picture cannot be read any more, or is another than it was.
        """
        if self._processor is None or not prompt.multimodal:
            return
        ids = prompt.input_ids
        digest = prompt.features.get("picture_digest")
        take_features(prompt, self._processed(self._processor, prompt).result(), self._media_tokens)
        if prompt.input_ids != ids:
            raise DataError(
                f"{prompt.source}: its pictures give {len(prompt.input_ids)} tokens and gave {len(ids)} at the "
                "checkpoint: put pictures and processor back as they were"
            )
        if digest is not None and not np.array_equal(prompt.features["picture_digest"], digest):
            raise DataError(f"{prompt.source}: a picture {OTHER_PICTURES}")

    def _short_enough(self, draft: Prompt | None) -> Prompt | None:
        """The prompt, or None for one that the length limit drops whatever its tokens are: tokenising it is dear."""
        limit = self._settings.rollout_max_prompt_len
        if draft is None or limit is None or len(draft.text) < max(_LONG_TEXT, limit):
            return draft
        if not self._asked_bound:
            self._bound, self._asked_bound = characters_a_token(self._tokenizer), True
        if self._bound is None:
            return draft
        least = fewest_tokens(draft.text, self._bound) - 1  # a second begin-of-sequence is taken away
        if least <= limit:
            return draft
        self._drop_long(limit, f"{draft.source} has more than {least} tokens")
        return None

    def _drop_long(self, limit: int, example: str) -> None:
        self.drops.add(f"longer than --rollout-max-prompt-len {limit}", example)

    def untokenised(self, sourced: SourcedRow) -> Prompt:
        """The prompt of a row without its tokens; counts nothing.

        Raises:
            DataError: the row is unusable.
        """
        return self._draft(sourced.row, sourced.source)

    def rendering(self) -> dict[str, Any]:
        """What a prompt depends on beside its row, for a checkpoint; see :func:`check_rendering`."""
        return rendering(self._settings, getattr(self._tokenizer, "chat_template", None))

    def check_rendering(self, state: dict[str, Any]) -> None:
        """Raises :class:`DataError` when a source's ``state`` is of prompts that were made otherwise."""
        check_rendering(state.get("rendering"), self._settings, getattr(self._tokenizer, "chat_template", None))

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
        return [self._one_begin(text, own) for text, own in zip(texts, ids, strict=True)]

    def _one_begin(self, text: str, ids: Sequence[int]) -> Sequence[int]:
        """The tokens without the begin-of-sequence that the tokenizer put before one that the text begins with."""
        begin, token = getattr(self._tokenizer, "bos_token", None), getattr(self._tokenizer, "bos_token_id", None)
        if not begin or token is None or not text.startswith(begin):
            return ids
        written = 0
        while text.startswith(begin, written * len(begin)):
            written += 1
        return ids[1:] if list(ids[: written + 1]) == [token] * (written + 1) else ids

    def _usable(self, step: Callable[[T, str], Prompt | None], value: T, source: str) -> Prompt | None:
        """Result of ``step``, or None for an unusable row when those are skipped."""
        try:
            return step(value, source)
        except DataError as error:
            if not self._settings.skip_bad_rows:
                raise DataError(
                    f"{error}. Pass --skip-bad-rows to go on without it, or mend the row and start anew: a checkpoint "
                    "goes on only with the files as they were"
                ) from None
            self.drops.add(_UNUSABLE, str(error))
            return None

    def _tokenise_alone(self, draft: Prompt) -> Sequence[int]:
        try:
            return self._tokenise([draft.text])[0]
        except Exception as error:
            raise DataError(f"{draft.source}: the tokenizer failed: {type(error).__name__}: {error}") from error

    def _finish_alone(self, draft: Prompt, source: str) -> Prompt | None:
        return self._finish(draft, self._tokenise_alone(draft))

    def _finish_usable(self, draft: Prompt, ids: Sequence[int]) -> Prompt | None:
        return self._usable(lambda value, _: self._finish(value, ids), draft, draft.source)

    def _finish(self, draft: Prompt, ids: Sequence[int]) -> Prompt | None:
        if not draft.multimodal and (marks := self._media_tokens.intersection(ids)):
            raise DataError(
                f"{draft.source}: the prompt has token {min(marks)}, which stands for a picture or a video, and the "
                "row has none: take its mark out of the text"
            )
        limit = self._settings.rollout_max_prompt_len
        if limit is not None and len(ids) > limit:
            self._drop_long(limit, f"{draft.source} has {len(ids)} tokens")
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
            where = f"{source}: key {s.input_key!r}"
            template = str(getattr(self._tokenizer, "chat_template", ""))
            messages = read_messages(value, s.system_prompt, multimodal, template, where, s.multimodal_keys or {})
            text = self._render(messages, row, source)
            check_rendered(messages, text, where)
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
            kwargs["tools"] = read_tools(row[s.tool_key], f"{source}: key {s.tool_key!r}")
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
                for i, item in enumerate(items):
                    if not isinstance(item, str | bytes | dict):
                        raise DataError(
                            f"{source}: key {key!r}: {modality} {i + 1} is {kind(item)}; it must be a path, bytes, or "
                            'an object with one of them as "path" or "bytes"'
                        )
                if items:
                    found[modality] = items
        return found


def take_features(prompt: Prompt, features: Features, media_tokens: Collection[int] = ()) -> Prompt:
    """Gives a prompt the tokens and the tensors that a processor made of it.

    Args:
        prompt: gets them.
        features: of the processor.
        media_tokens: that stand for pictures and videos, beside the one that stands for its pictures.

    Raises:
        DataError: the processor made no tokens, or no pictures of Qwen's kind.
    """
    missing = [name for name in (*_OF_PICTURES, "input_ids", "mm_token_type_ids") if name not in features]
    if missing:
        raise DataError(
            f"{prompt.source}: the processor of --hf-checkpoint gave no {' and no '.join(missing)}: it is none of a "
            "model whose pictures can be trained on"
        )
    ids, types = features["input_ids"][0], features["mm_token_type_ids"][0]
    if (other := ids[(types != 0) & (types != 1)]).size:
        raise DataError(
            f"{prompt.source}: the prompt has token {other[0]}, which stands for a video or a sound, and there is "
            "none: take its mark out of the text"
        )
    pictured = types == 1
    first = pictured & ~np.concatenate([[False], pictured[:-1]])
    if first.sum() != len(features["image_grid_thw"]):
        raise DataError(
            f"{prompt.source}: the prompt has {first.sum()} marks of pictures and {len(features['image_grid_thw'])} "
            "pictures: does the chat template write one for each?"
        )
    prompt.input_ids = ids.tolist()
    prompt.features = {name: features[name] for name in _OF_PICTURES}
    prompt.features["engine_ids"] = ids[first | ~pictured]
    prompt.features["media_tokens"] = np.union1d(ids[first][:1], np.array(sorted(media_tokens), dtype=np.int64))
    return prompt


_OF_PICTURES = ("pixel_values", "image_grid_thw", "picture_png", "picture_sizes", "picture_digest")
_OF_TEMPLATE = ("tool_key", "system_prompt", "apply_chat_template_kwargs")


def rendering(settings: DataSettings, chat_template: str | dict[str, str] | None) -> dict[str, Any]:
    """What a prompt depends on beside its row: options by name, and a hash of the chat template when it is used."""
    names = ("input_key", "label_key", "apply_chat_template", *(_OF_TEMPLATE if settings.apply_chat_template else ()))
    found = {name: getattr(settings, name) for name in names}
    if settings.apply_chat_template:
        text = json.dumps(chat_template, sort_keys=True)
        found["chat_template"] = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    return found


def check_rendering(
    saved: dict[str, Any] | None, settings: DataSettings, chat_template: str | dict[str, str] | None
) -> None:
    """Holds that prompts are made as they were when a checkpoint was written.

    Args:
        saved: of :func:`rendering`; None, in checkpoints of before it was kept, says nothing.

    Raises:
        DataError: they are made otherwise.
    """
    now = rendering(settings, chat_template)
    for name, value in now.items():
        if saved is None or name not in saved or saved[name] == value:
            continue
        if name == "chat_template":
            what = "the chat template of --hf-checkpoint is another than at the checkpoint: put it back"
        else:
            what = f"{flag(name)} is {value!r} and was {saved[name]!r} at the checkpoint: set it as it was"
        raise DataError(
            f"{what}, since an exact resume needs the same prompts, or start a new run from the saved weights "
            "(--hf-checkpoint instead of --load)"
        )


def _required(row: Row, key: str, named_by: str, source: str) -> Any:
    value = row.get(key)
    # A column of numbers has NaN where a value is missing.
    if value is None or (isinstance(value, float) and math.isnan(value)):
        missing = f"is missing (the row has {', '.join(map(repr, row)) or 'no key'})"
        state = missing if key not in row else "is null" if value is None else "is not a number (NaN)"
        raise DataError(f"{source}: key {key!r} {state}; {named_by} names it")
    return value


def _label(row: Row, key: str, source: str) -> Any:
    value = _required(row, key, "--label-key", source)
    if not _all_finite(value):
        raise DataError(f"{source}: key {key!r} is or holds NaN or an infinite number; --label-key names it")
    if isinstance(value, float) and value.is_integer() and abs(value) >= 2**63:
        raise DataError(
            f"{source}: key {key!r} is a number beyond 64 bits ({value:.3g}), whose digits are not all kept: write it "
            "as a string; --label-key names it"
        )
    return value


def _all_finite(value: Any) -> bool:
    """Whether no number in it, at any depth, is NaN or infinite (JSON has neither, but 1e999 and NaN are read so)."""
    if isinstance(value, dict):
        return all(map(_all_finite, value.values()))
    if isinstance(value, list):
        return all(map(_all_finite, value))
    return not isinstance(value, float | Decimal) or math.isfinite(value)


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
    value = parsed_json(value)
    if not isinstance(value, dict):
        raise DataError(f"{source}: key {key!r} must be a JSON object, not {type(value).__name__}; see --metadata-key")
    return value
