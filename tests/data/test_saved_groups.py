"""Samples in a checkpoint: every number comes back as it was, and a file that is not what was written is refused."""

import dataclasses
import io
import json
import os
import pickle
import random
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from relax_data.errors import DataError
from relax_data.prompts.ledger import PromptLedger
from relax_data.prompts.saved_groups import SAMPLES_FILE, groups_from_state, groups_to_state, read_arrays
from relax_data.types import Prompt, Sample, SampleGroup, SampleStatus

ROUNDS = 400


def random_sample(draw: random.Random, prompt: Prompt, index: int) -> Sample:
    """Empty, half done or whole, with tool tokens, and floats of any kind."""
    sample = Sample(prompt, index, aborted_count=draw.choice([0, 0, 3]))
    for _ in range(draw.randrange(4)):
        n = draw.randrange(6)
        tokens = [draw.randrange(200_000) for _ in range(n)]
        if draw.random() < 0.3:  # of a tool
            sample.append(tokens, [0.0] * n, draw.randrange(5), loss_mask=0)
            continue
        exact = draw.random() < 0.9
        log_probs = [-draw.expovariate(1) for _ in range(n)]
        sample.append(tokens, [float(np.float32(p)) if exact else p for p in log_probs], draw.randrange(2**31))
    if sample.tokens and draw.random() < 0.05:
        sample.log_probs[0] = draw.choice([-float("inf"), -1e300, -5e-324, -0.0])
    sample.status = draw.choice(list(SampleStatus))
    if sample.status.finished and draw.random() < 0.9:
        sample.reward = draw.choice([0.1, float("nan"), -1e300, 1, 0.0])
        sample.reward_info = draw.choice([{}, {"hint": "ä", "n": 2.5}])
    if sample.status.finished:
        sample.response = draw.choice(["", "2\n", "\ud800"])  # a text of a function may have half a character
    if sample.status is SampleStatus.FAILED:
        sample.error = "no reward"
    return sample


def random_group(draw: random.Random, prompt_id: int) -> SampleGroup:
    prompt = Prompt(prompt_id, 0, f"a.jsonl:{prompt_id + 1}", "1+1=", [5, 6], label={"a": (1, 2)})
    group = SampleGroup(prompt, [random_sample(draw, prompt, i) for i in range(draw.randrange(5))])
    oldest = [v for s in group.samples if (v := s.oldest_version) is not None]
    if oldest and draw.random() < 0.7:
        group.start_version = draw.randint(0, min(oldest))
    return group


def as_resumed(group: SampleGroup, keep_partial: bool) -> SampleGroup:
    """What a checkpoint has to give back, worked out in another way."""
    samples = []
    for sample in group.samples:
        empty = Sample(group.prompt, sample.index, aborted_count=sample.aborted_count)
        if sample.status.finished:
            samples.append(dataclasses.replace(sample))
        elif keep_partial:
            samples.append(dataclasses.replace(sample, status=SampleStatus.PENDING, error=None))
        else:
            samples.append(empty)
    versions = [v for s in samples for v in s.versions]
    start = min(versions, default=None)
    if versions and keep_partial and group.start_version is not None:
        start = group.start_version
    return SampleGroup(group.prompt, samples, start)


def resumed(groups: list[SampleGroup], keep_partial: bool) -> list[SampleGroup]:
    states, content = groups_to_state(groups, keep_partial=keep_partial)
    return groups_from_state(json.loads(json.dumps(states)), content)


@pytest.mark.parametrize("keep_partial", [False, True])
def test_groups_come_back_as_they_were(keep_partial: bool) -> None:
    """Compared as text, in which NaN equals NaN, -0.0 is not 0.0, and a float has all its digits."""
    seen: Counter[str] = Counter()
    for seed in range(ROUNDS):
        draw = random.Random(seed)
        groups = [random_group(draw, i) for i in range(draw.randrange(5))]
        before = repr(groups)
        again = resumed(groups, keep_partial)
        expected = [as_resumed(g, keep_partial) for g in groups]
        for sample in (s for g in expected for s in g.samples):
            sample.reward = None if sample.reward is None else float(sample.reward)
            seen["half done"] += bool(sample.tokens) and not sample.status.finished
            seen["empty"] += not sample.tokens and not sample.status.finished
            seen["not scored"] += sample.status.finished and sample.reward is None
            seen["not a number"] += sample.reward is not None and sample.reward != sample.reward
            seen["tool"] += 0 in sample.loss_mask
        seen["no start"] += sum(g.start_version is None for g in again)
        seen["no samples"] += sum(not g.samples for g in again)
        assert repr(again) == repr(expected), f"seed {seed}"
        assert repr(groups) == before, "saving changes nothing"
    wanted = ["half done", "empty", "not scored", "not a number", "tool", "no start", "no samples"]
    assert min(seen[what] for what in wanted if keep_partial or what != "half done") > 20, seen
    assert bool(seen["half done"]) == keep_partial


def whole(*log_probs: float) -> SampleGroup:
    group = SampleGroup.start(Prompt(0, 0, "a.jsonl:1", "p", [1]), 2)
    for sample in group.samples:
        sample.append([7] * len(log_probs), log_probs, 3)
        sample.status, sample.reward = SampleStatus.COMPLETED, 0.5
    return group


def test_float32_is_stored_where_it_is_exact_and_float64_where_it_is_not() -> None:
    for value, kind in ((float(np.float32(-0.1)), "float32"), (-0.1, "float64"), (-1e300, "float64")):
        states, content = groups_to_state([whole(-0.5, value)])
        assert read_arrays(content)["log_probs"].dtype == kind
        (group,) = groups_from_state(states, content)
        assert group.samples[1].log_probs == [-0.5, value]


def test_a_running_sample_whose_columns_are_being_written_is_saved_empty() -> None:
    group = whole(-0.5)
    group.samples[0].status = SampleStatus.PENDING
    group.samples[0].tokens.append(8)
    (again,) = resumed([group], keep_partial=True)
    assert [s.tokens for s in again.samples] == [[], [7]]


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("tokens", 2**31, "int32"),
        ("versions", -(2**40), "int32"),
        ("loss_mask", -1, "uint8"),
        ("log_probs", "x", "flo"),
    ],
)
def test_a_value_that_does_not_fit_is_named(column: str, value: Any, message: str) -> None:
    group = whole(-0.5, -0.25)
    getattr(group.samples[1], column)[0] = value
    with pytest.raises(ValueError, match=rf"a\.jsonl:1 response 1: its {column} cannot be stored as {message}"):
        groups_to_state([group])


# ---------------------------------------------------------------------- damage


class Program:
    """A pickle of it makes a folder when it is read."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._path),)


def changed(**changes: Callable[[np.ndarray], Any] | None) -> bytes:
    """A file with two samples of two tokens in which arrays are changed, or left out."""
    _, content = groups_to_state([whole(-0.5, -0.25)])
    arrays = read_arrays(content)
    for name, change in changes.items():
        if change is None:
            del arrays[name]
        else:
            arrays[name] = np.asarray(change(arrays[name]))
    file = io.BytesIO()
    np.savez(file, **arrays)  # type: ignore[arg-type]  # the stub takes all keywords for arrays
    return file.getvalue()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (changed(tokens=None), "cannot be read: KeyError: .*tokens"),
        (changed(tokens=lambda a: a.astype(np.int64)), r"its tokens are int64\[4\], not a row of int32"),
        (changed(log_probs=lambda a: a.astype(np.float16)), "its log_probs are float16"),
        (changed(loss_mask=lambda a: a.astype(bool)), "its loss_mask are bool"),
        (changed(tokens=lambda a: a.reshape(2, 2)), r"its tokens are int32\[2, 2\]"),
        (changed(offsets=lambda a: a[0]), r"its offsets are int64\[\]"),
        (changed(versions=lambda a: a[:-1]), "it has 3 versions instead of 4"),
        (changed(reward=lambda a: a[:-1]), "it has 1 reward instead of 2"),
        (changed(start_version=lambda a: a[:0]), "it has 0 start_version instead of 1"),
        (changed(offsets=lambda a: a[:-1]), "it has 2 offsets instead of 3"),
        (changed(offsets=lambda a: [0, 5, 4]), "its offsets do not cut 4 tokens into 2 samples"),
        (changed(offsets=lambda a: [0, 2, 5]), "its offsets do not cut"),
        (changed(offsets=lambda a: [-2, 2, 4]), "its offsets do not cut"),
        (changed(group_sizes=lambda a: [3]), "its groups do not have 2 samples together"),
        (changed(group_sizes=lambda a: [-2]), "its groups do not have"),
        (changed(tokens=lambda a: -a), "its tokens have values that they cannot have"),
        (changed(loss_mask=lambda a: a + 1, status=lambda a: a + 9), "its loss_mask and status have values"),
        (changed(start_version=lambda a: a - 9), "its start_version have values"),
        (changed(aborted_count=lambda a: a - 1), "its aborted_count have values"),
        (b"", "cannot be read: "),
        (b"x" * 1000, "cannot be read: "),
        (changed()[:-30], "cannot be read: BadZipFile"),
        (changed()[:100], "cannot be read: "),
    ],
)
def test_a_damaged_file_is_refused(content: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=rf"samples\.npz (is damaged: )?{message}"):
        read_arrays(content)


def test_any_flipped_bit_is_refused_or_changes_nothing() -> None:
    """The rest, in headers of the zip file that nobody reads, is found by the checksum of the checkpoint."""
    content = changed()
    expected = read_arrays(content)
    refused = 0
    for place in range(len(content)):
        flipped = bytearray(content)
        flipped[place] ^= 1 << place % 8
        try:
            arrays = read_arrays(bytes(flipped))
        except ValueError:
            refused += 1
        else:
            assert all(np.array_equal(arrays[name], array) for name, array in expected.items()), place
    assert refused > len(content) / 2


def test_a_pickle_in_the_file_runs_no_code(tmp_path: Path) -> None:
    objects = np.array([Program(tmp_path / "ran")] * 4, dtype=object)
    for content in (changed(tokens=lambda a: objects), with_member("tokens.npy", pickle.dumps(objects))):
        with pytest.raises(ValueError, match=r"samples\.npz (cannot be read|is damaged): "):
            read_arrays(content)
    assert not (tmp_path / "ran").exists()


def with_member(name: str, content: bytes) -> bytes:
    """The file with one member replaced."""
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(changed())) as old, zipfile.ZipFile(file, "w") as new:
        for each in old.namelist():
            new.writestr(each, content if each == name else old.read(each))
    return file.getvalue()


def test_a_header_that_claims_too_much_is_refused() -> None:
    huge = io.BytesIO()
    np.lib.format.write_array_header_1_0(huge, {"descr": "<i4", "fortran_order": False, "shape": (2**44,)})
    with pytest.raises(ValueError, match=r"samples\.npz cannot be read: "):
        read_arrays(with_member("tokens.npy", huge.getvalue()))


def test_a_ledger_whose_numbers_do_not_add_up_is_refused() -> None:
    ledger = PromptLedger()
    ledger.hand_out([whole(-0.5)])
    state = ledger.state_dict()
    damages: list[tuple[dict[str, Any], str]] = [
        ({"handed_out": 2}, "2 prompts were handed out and 1 are accounted for"),
        ({"samples": b""}, f"{SAMPLES_FILE} cannot be read"),
        ({"samples": None}, f"{SAMPLES_FILE} cannot be read"),
    ]
    for odd, message in damages:
        with pytest.raises(DataError, match=f"ledger is damaged: .*{message}.*; load another checkpoint"):
            PromptLedger().load_state_dict(state | odd)
    del state["samples"]
    with pytest.raises(DataError, match="ledger is damaged: KeyError"):
        PromptLedger().load_state_dict(state)
