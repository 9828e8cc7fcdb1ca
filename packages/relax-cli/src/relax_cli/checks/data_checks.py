"""Looks at the first rows of the prompt data: what a run would meet after its engines have loaded is told at once."""

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from typing import Any

from relax_data.errors import DataError
from relax_data.prompts.preview import FolderTokenizer, check_resumes, first_rows
from relax_data.prompts.template import PromptBuilder, SourcedRow
from relax_data.readers.files import FileSlice, resolve_files
from relax_data.settings import DataSettings
from relax_data.types import Prompt
from relax_rollout.rewards.registry import LABEL_PROBLEMS

from relax_cli.checks.lengths import context_lengths
from relax_cli.config.run_config import RunConfig

ROWS = 16
"""Rows of a file that are looked at."""
_FILES = 4
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json")
"""Files of which a tokenizer has one."""


@dataclasses.dataclass(frozen=True)
class FirstPrompts:
    """What the first rows of one option's data are.

    Attributes:
        option: ``--prompt-data``, or ``--eval-prompt-data NAME``.
        prompts: those of usable rows, without tokens.
        problem: of the first unusable row, when it would end the run.
        tokens: number of tokens of each prompt; None when the folder's tokenizer cannot be asked.
    """

    option: str
    prompts: list[Prompt]
    problem: str | None
    tokens: list[int] | None


def data_problems(config: RunConfig) -> list[str]:
    """Rows without the keys, that the chat template does not render, or whose labels the reward cannot take."""
    found = []
    rm_type = config.reward.rm_type
    label_problem = None if rm_type is None else LABEL_PROBLEMS.get(rm_type)
    for first in _first_prompts(config, count=False):
        if first.problem is not None:
            found.append(f"{first.option}: {first.problem}")
        elif label_problem is not None and config.data.label_key is not None:
            wrong = ((p, label_problem(p.label)) for p in first.prompts)
            found += [
                f"{first.option}: {p.source}: --rm-type {rm_type} {why}: key {config.data.label_key!r} is "
                f"{_shown(p.label)}; correct the row, name another --label-key, or compare with a function of your own "
                "(--custom-rm-path)"
                for p, why in wrong
                if why is not None
            ][:1]
    return list(dict.fromkeys(found))


def data_needs(config: RunConfig) -> list[str]:
    """What a start needs beside the data themselves."""
    rm_type = config.reward.rm_type
    if rm_type in LABEL_PROBLEMS and config.data.label_key is None and not config.debug.debug_train_only:
        return [f"the key of the label in a row (--label-key): --rm-type {rm_type} compares with it"]
    return []


def data_warnings(config: RunConfig) -> list[str]:
    """First prompts that are all too long for the limits: the data may be whole, and still nothing is trained."""
    found = []
    limit, trained = config.data.rollout_max_prompt_len, context_lengths(config).trained
    for first in _first_prompts(config, count=True):
        least = min(first.tokens or [0])
        if limit is not None and least > limit:
            found.append(
                f"{first.option}: the first {len(first.prompts)} prompts have {least} tokens and more, and "
                f"--rollout-max-prompt-len {limit} drops them"
            )
        elif trained is not None and least >= trained:
            found.append(
                f"{first.option}: the first {len(first.prompts)} prompts have {least} tokens and more, which leaves no "
                f"room for a response in the {trained} tokens of the longest sample"
            )
    return found


def data_rows(config: RunConfig) -> list[tuple[str, str]]:
    """The rows of the plan that say what was seen of the data."""
    rows = []
    for first in _first_prompts(config, count=True):
        if first.prompts:
            name = "first prompts" if first.option == "--prompt-data" else f"first of {first.option.split()[-1]}"
            tokens = f", {min(first.tokens)} to {max(first.tokens)} tokens" if first.tokens else ""
            rows.append((name, f"{len(first.prompts)} looked at{tokens}"))
    return rows


def resume_problem(state: Any, config: RunConfig) -> str | None:
    """Why a run could not go on in the prompts where a checkpoint was: other data, other order, another template.

    Args:
        state: of the rollout worker, from the checkpoint's manifest.
    """
    source = state.get("source") if isinstance(state, dict) else None
    if not isinstance(source, dict) or config.debug.debug_train_only:
        return None
    folder = config.train.model.hf_checkpoint
    try:
        files = resolve_files(config.data.prompt_data)
        tokenizer = FolderTokenizer(folder)
    except (ValueError, OSError):  # that is said elsewhere
        return None
    try:
        check_resumes(source, files, config.data, tokenizer.chat_template)
        return None
    except DataError as error:
        if "chat template" not in str(error):
            return str(error)
    real = _real_tokenizer(folder)
    try:
        if real is not None:
            check_resumes(source, files, config.data, real.chat_template)
    except DataError as error:
        return str(error)
    return None


def _first_prompts(config: RunConfig, *, count: bool) -> Iterator[FirstPrompts]:
    if config.debug.debug_train_only or not config.train.model.hf_checkpoint:
        return
    named = [("--prompt-data", config.data.prompt_data)]
    data = config.eval.eval_prompt_data
    named += [(f"--eval-prompt-data {name}", (path,)) for name, path in zip(data[::2], data[1::2], strict=False)]
    for option, specs in named:
        files: list[FileSlice] = []
        with contextlib.suppress(ValueError, OSError):  # that is said elsewhere
            files = resolve_files(specs) if specs else []
        first = _looked_at(option, files[:_FILES], config)
        if count and first.prompts:
            texts = [p.text for p in first.prompts]
            special = not config.data.apply_chat_template
            tokens = FolderTokenizer(config.train.model.hf_checkpoint).counts(texts, add_special_tokens=special)
            first = dataclasses.replace(first, tokens=tokens)
        yield first


def _looked_at(option: str, files: list[FileSlice], config: RunConfig) -> FirstPrompts:
    folder = config.train.model.hf_checkpoint
    try:
        rows = [row for file in files for row in first_rows(file, ROWS)]
        prompts, problem = _read(rows, config.data, FolderTokenizer(folder))
        if problem is not None and config.data.apply_chat_template and "template" in problem:
            # The folder's files may say it elsewhere: what would load them has the last word.
            tokenizer = _real_tokenizer(folder) if has_tokenizer(folder) else None
            prompts, problem = ([], None) if tokenizer is None else _read(rows, config.data, tokenizer)
    except (DataError, OSError, UnicodeDecodeError) as error:
        return FirstPrompts(option, [], str(error), None)
    if config.data.skip_bad_rows and prompts:
        problem = None
    return FirstPrompts(option, prompts, problem, None)


def _read(rows: list[SourcedRow], settings: DataSettings, tokenizer: Any) -> tuple[list[Prompt], str | None]:
    """The prompts of the usable rows, and what is wrong with the first unusable one."""
    prompts: list[Prompt] = []
    problem = None
    try:
        builder = PromptBuilder(settings, tokenizer)
    except DataError as error:
        return [], str(error)
    for row in rows:
        try:
            prompts.append(builder.untokenised(row))
        except DataError as error:
            problem = problem or str(error)
    return prompts, problem


def has_tokenizer(folder: str) -> bool:
    """Whether a Hugging Face folder holds the vocabulary of a tokenizer."""
    return any(os.path.isfile(os.path.join(folder, name)) for name in VOCABULARIES)


def _real_tokenizer(folder: str) -> Any:
    """The tokenizer as a run loads it: asked before a row or a template is refused. None when it cannot be loaded."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder)
    except Exception:  # it raises what the code of a tokenizer raises
        return None


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:80] + "..."
