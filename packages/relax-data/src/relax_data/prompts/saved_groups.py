"""Groups in a checkpoint: the numbers of their samples as arrays in one binary file, everything else as JSON values.

The file is numpy's ``.npz`` without pickles, so that reading it runs no code. All samples of all groups lie one behind
the other, ``T`` tokens of ``S`` samples in ``G`` groups:

    offsets        int64   [S + 1]   tokens of sample ``i``: ``offsets[i]`` to ``offsets[i + 1]``
    tokens         int32   [T]
    log_probs      float32 [T]       float64 when a value is not exactly a float32
    versions       int32   [T]
    loss_mask      uint8   [T]
    index          int64   [S]
    status         uint8   [S]       place in :data:`_STATUSES`
    aborted_count  int64   [S]
    reward         float64 [S]
    has_reward     uint8   [S]       0: the reward is None
    group_sizes    int64   [G]       samples of each group
    start_version  int64   [G]       -1: None
"""

import io
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from relax_data.errors import describe
from relax_data.serialization import from_plain, to_plain
from relax_data.types import Prompt, Sample, SampleGroup, SampleStatus

SAMPLES_FILE = "samples.npz"
"""Name of the file in a checkpoint."""

Arrays = dict[str, np.ndarray]

_STATUSES = (SampleStatus.PENDING, SampleStatus.COMPLETED, SampleStatus.TRUNCATED)
_NO_VERSION = -1
_COLUMNS = {"tokens": ("int32",), "log_probs": ("float32", "float64"), "versions": ("int32",), "loss_mask": ("uint8",)}
_PER_SAMPLE = {
    "index": "int64",
    "status": "uint8",
    "aborted_count": "int64",
    "reward": "float64",
    "has_reward": "uint8",
}
_PER_GROUP = {"group_sizes": "int64", "start_version": "int64"}
_TYPES = {
    "offsets": ("int64",),
    **_COLUMNS,
    **{name: (dtype,) for name, dtype in (_PER_SAMPLE | _PER_GROUP).items()},
}
"""Types that each array may have."""

_OF_USERS = ("label", "messages", "metadata", "multimodal")
"""Fields of a prompt that hold whatever the data held."""
_DIGEST = "picture_digest"
"""The one feature that is saved: the others are made anew, and it tells whether they are the same."""


# ---------------------------------------------------------------------- write


def groups_to_state(groups: Sequence[SampleGroup], *, keep_partial: bool = False) -> tuple[list[dict[str, Any]], bytes]:
    """Everything of ``groups``, as if their generation were interrupted now.

    Args:
        groups: in any state; a rollout may be running.
        keep_partial: an unfinished sample keeps the tokens of its finished requests; otherwise it is written empty, as
            it will start again.

    Returns:
        A JSON value for each group, and the content of :data:`SAMPLES_FILE`.

    Raises:
        ValueError: a value cannot be stored; the message names the row of the data or the sample.
    """
    samples = [s for g in groups for s in g.samples]
    written = [s if _keeps(s, keep_partial) else Sample(s.prompt, s.index) for s in samples]
    lengths = [len(s.tokens) for s in written]
    arrays: Arrays = {
        "offsets": np.cumsum([0, *lengths], dtype=np.int64),
        **{name: _column(written, name, types[-1]) for name, types in _COLUMNS.items()},
        "index": np.array([s.index for s in samples], dtype=np.int64),
        "status": np.array([_STATUSES.index(_at_rest(s)) for s in samples], dtype=np.uint8),
        "aborted_count": np.array([s.aborted_count for s in samples], dtype=np.int64),
        "reward": np.array([0.0 if s.reward is None else s.reward for s in written], dtype=np.float64),
        "has_reward": np.array([s.reward is not None for s in written], dtype=np.uint8),
        "group_sizes": np.array([len(g.samples) for g in groups], dtype=np.int64),
        "start_version": np.array(
            [_start(g, part, keep_partial) for g, part in zip(groups, _grouped(written, groups), strict=True)],
            dtype=np.int64,
        ),
    }
    arrays["log_probs"] = _narrow(arrays["log_probs"])
    states = [
        {"prompt": _prompt_to_state(group.prompt), "samples": [_words_of(s) for s in part]}
        for group, part in zip(groups, _grouped(written, groups), strict=True)
    ]
    content = io.BytesIO()
    np.savez(content, allow_pickle=False, **arrays)
    return states, content.getvalue()


def _keeps(sample: Sample, keep_partial: bool) -> bool:
    if sample.status.finished:
        return True
    # A function of the user may be at work on the columns right now.
    return keep_partial and len({len(getattr(sample, name)) for name in _COLUMNS}) == 1


def _at_rest(sample: Sample) -> SampleStatus:
    return sample.status if sample.status.finished else SampleStatus.PENDING


def _grouped(samples: Sequence[Sample], groups: Iterable[SampleGroup]) -> list[Sequence[Sample]]:
    rest = iter(samples)
    return [list(itertools.islice(rest, len(g.samples))) for g in groups]


def _column(samples: Sequence[Sample], name: str, dtype: str) -> np.ndarray:
    """One column of all samples, ``[T]``."""
    total = sum(len(s.tokens) for s in samples)
    values = itertools.chain.from_iterable(getattr(s, name) for s in samples)
    try:
        return np.fromiter(values, dtype=dtype, count=total)
    except (OverflowError, ValueError, TypeError) as error:
        odd = next((s.name for s in samples if not _fits(getattr(s, name), dtype, len(s.tokens))), "a sample")
        raise ValueError(f"{odd}: its {name} cannot be stored as {dtype}: {error}") from error


def _fits(values: Sequence[Any], dtype: str, n: int) -> bool:
    try:
        return len(np.fromiter(values, dtype=dtype)) == n
    except (OverflowError, ValueError, TypeError):
        return False


def _narrow(values: np.ndarray) -> np.ndarray:
    """``values`` as float32 when that keeps each of them exactly; engines compute in float32, functions may not."""
    with np.errstate(over="ignore"):
        narrow = values.astype(np.float32)
    return narrow if np.array_equal(narrow, values) else values


def _start(group: SampleGroup, written: Iterable[Sample], keep_partial: bool) -> int:
    """The group's ``start_version`` as it is saved: what is started again has no age."""
    oldest = min((v for s in written if (v := s.oldest_version) is not None), default=None)
    if oldest is None:
        return _NO_VERSION
    return group.start_version if keep_partial and group.start_version is not None else oldest


def _words_of(sample: Sample) -> dict[str, Any]:
    """What of a sample is no number; nothing of one that is written empty."""
    if not sample.tokens and not sample.status.finished:
        return {}
    return {
        "response": sample.response,
        "reward_info": to_plain(sample.reward_info, f"{sample.name}: reward_info"),
    }


def _prompt_to_state(prompt: Prompt) -> dict[str, Any]:
    values = {f: to_plain(getattr(prompt, f), f"{prompt.source}: {f}", objects=True) for f in _OF_USERS}
    if _DIGEST in prompt.features:
        values[_DIGEST] = prompt.features[_DIGEST].tobytes().hex()
    return {
        "prompt_id": prompt.prompt_id,
        "epoch": prompt.epoch,
        "source": prompt.source,
        "text": prompt.text,
        "input_ids": [int(t) for t in prompt.input_ids],
    } | values


# ---------------------------------------------------------------------- read


def groups_from_state(states: Sequence[dict[str, Any]], content: bytes) -> list[SampleGroup]:
    """The groups that :func:`groups_to_state` wrote.

    Raises:
        ValueError: the arrays are damaged or of other groups; or as :func:`relax_data.serialization.from_plain`.
        LookupError, TypeError: a JSON value is not what was written.
    """
    arrays = read_arrays(content)
    sizes = [len(state["samples"]) for state in states]
    if sizes != arrays["group_sizes"].tolist():
        raise ValueError(
            f"{SAMPLES_FILE} is of other groups: it has {len(arrays['group_sizes'])} with "
            f"{len(arrays['index'])} samples, and {len(sizes)} with {sum(sizes)} are open"
        )
    starts: list[int] = arrays["start_version"].tolist()
    groups, first = [], 0
    for state, size, start in zip(states, sizes, starts, strict=True):
        prompt = _prompt_from_state(state["prompt"])
        samples = [_sample_from(arrays, first + i, prompt, words) for i, words in enumerate(state["samples"])]
        groups.append(SampleGroup(prompt, samples, None if start == _NO_VERSION else start))
        first += size
    return groups


def read_arrays(content: bytes) -> Arrays:
    """The arrays of :data:`SAMPLES_FILE` by name, checked; runs no code of it.

    Raises:
        ValueError: the file is cut off or changed, an array is missing, or one has values that it cannot have.
    """
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as file:
            arrays: Arrays = {name: file[name] for name in _TYPES}
    except Exception as error:  # the readers of zip files and of headers raise what they like
        raise ValueError(f"{SAMPLES_FILE} cannot be read: {describe(error)}") from error
    problem = _problem(arrays)
    if problem is not None:
        raise ValueError(f"{SAMPLES_FILE} is damaged: {problem}")
    return arrays


def _problem(arrays: Arrays) -> str | None:
    for name, types in _TYPES.items():
        array = arrays[name]
        if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype.name not in types:
            found = f"{array.dtype}{list(array.shape)}" if isinstance(array, np.ndarray) else type(array).__name__
            return f"its {name} are {found}, not a row of {' or '.join(types)}"
    offsets, sizes = arrays["offsets"], arrays["group_sizes"]
    tokens, samples = len(arrays["tokens"]), len(arrays["index"])
    counts = {name: tokens for name in _COLUMNS} | {name: samples for name in _PER_SAMPLE}
    counts |= {name: len(sizes) for name in _PER_GROUP} | {"offsets": samples + 1}
    for name, n in counts.items():
        if len(arrays[name]) != n:
            return f"it has {len(arrays[name])} {name} instead of {n}"
    if offsets[0] != 0 or offsets[-1] != tokens or (np.diff(offsets) < 0).any():
        return f"its offsets do not cut {tokens} tokens into {samples} samples"
    if (sizes < 0).any() or sizes.sum() != samples:
        return f"its groups do not have {samples} samples together"
    rules: dict[str, Callable[[np.ndarray], np.ndarray]] = {
        "tokens": lambda values: values >= 0,
        "loss_mask": lambda values: values <= 1,
        "has_reward": lambda values: values <= 1,
        "status": lambda values: values < len(_STATUSES),
        "aborted_count": lambda values: values >= 0,
        "start_version": lambda values: values >= _NO_VERSION,
    }
    odd = [name for name, holds in rules.items() if not holds(arrays[name]).all()]
    return f"its {' and '.join(odd)} have values that they cannot have" if odd else None


def _sample_from(arrays: Arrays, i: int, prompt: Prompt, words: dict[str, Any]) -> Sample:
    sample = Sample(prompt, int(arrays["index"][i]), aborted_count=int(arrays["aborted_count"][i]))
    columns = slice(arrays["offsets"][i], arrays["offsets"][i + 1])
    tokens, log_probs, versions, mask = (arrays[name][columns].tolist() for name in _COLUMNS)
    sample.append(tokens, log_probs, versions, loss_mask=mask)
    sample.status = _STATUSES[arrays["status"][i]]
    if arrays["has_reward"][i]:
        sample.reward = float(arrays["reward"][i])
    if words:
        sample.response, sample.reward_info = str(words["response"]), from_plain(words["reward_info"])
    return sample


def _prompt_from_state(state: dict[str, Any]) -> Prompt:
    values = {k: from_plain(v) if k in _OF_USERS else v for k, v in state.items() if k != _DIGEST}
    prompt = Prompt(**values)
    if _DIGEST in state:
        prompt.features[_DIGEST] = np.frombuffer(bytes.fromhex(state[_DIGEST]), dtype=np.uint8)
    return prompt
