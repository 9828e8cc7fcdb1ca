"""Prompts in memory: keys, templates, order, epochs, resume, errors."""

import dataclasses
import json
import logging
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from relax_data.errors import DataError
from relax_data.prompts.open import open_prompts
from relax_data.settings import DataSettings
from relax_data.types import Prompt


def rows(n: int, **more: Any) -> list[dict[str, Any]]:
    return [{"input": f"question {i}", "answer": i, **more} for i in range(n)]


def settings(path: str | list[str], **options: Any) -> DataSettings:
    return DataSettings(prompt_data=(path,) if isinstance(path, str) else tuple(path), **options)


def labels(prompts: list[Prompt]) -> list[Any]:
    return [p.label for p in prompts]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_row_becomes_a_prompt(
    kind: str, write_jsonl: Callable[..., str], write_parquet: Callable[..., str], tokenizer: Any
) -> None:
    data = rows(3, metadata={"level": 2})
    path = write_jsonl(data) if kind == "jsonl" else write_parquet(data)
    source = open_prompts(settings(path, label_key="answer"), tokenizer)
    assert len(source) == 3
    first, second = source.next(2)
    assert (first.prompt_id, first.epoch, second.prompt_id) == (0, 0, 1)
    assert first.text == "question 0"
    assert first.input_ids == [1] + [ord(c) for c in "question 0"]
    assert first.label == 0
    assert first.metadata == {"level": 2}
    assert first.messages is None
    assert second.source == f"{path}:2"


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_chat_template_with_system_prompt_tools_and_arguments(
    kind: str, write_jsonl: Callable[..., str], write_parquet: Callable[..., str], tokenizer: Any
) -> None:
    tools = json.dumps([{"name": "calc"}])
    own = [{"role": "system", "content": "mine"}, {"role": "user", "content": "b"}]
    data = [
        {"messages": [{"role": "user", "content": "a"}], "tools": tools},
        {"messages": own, "tools": None},
    ]
    path = write_jsonl(data) if kind == "jsonl" else write_parquet(data)
    source = open_prompts(
        settings(
            path,
            input_key="messages",
            tool_key="tools",
            apply_chat_template=True,
            apply_chat_template_kwargs={"thinking": False},
            system_prompt="be brief",
        ),
        tokenizer,
    )
    first, second = source.next(2)
    assert first.text == "[tools=[{'name': 'calc'}]][thinking=False]<system>be brief<user>a<assistant>"
    assert second.text == "[thinking=False]<system>mine<user>b<assistant>"
    # The template writes the special tokens itself.
    assert first.input_ids[0] == ord("[")
    assert first.messages == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "a"}]


def test_a_string_is_one_user_message_and_the_real_tokenizer_agrees(
    write_jsonl: Callable[..., str], tiny_model: Path
) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    source = open_prompts(settings(write_jsonl([{"input": "1+2=?"}]), apply_chat_template=True), tokenizer)
    (prompt,) = source.next(1)
    assert prompt.text == "user: 1+2=?\nassistant: "
    assert prompt.messages is not None
    expected = tokenizer.apply_chat_template(prompt.messages, add_generation_prompt=True, return_dict=False)
    assert prompt.input_ids == expected
    assert all(type(i) is int for i in prompt.input_ids)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    "value", ["1e999", "-1e999", "Infinity", "-Infinity", "NaN", "[1, NaN]", '{"a": {"b": 1e999}}', "[[Infinity]]"]
)
def test_a_label_that_is_not_finite_is_named(
    write_jsonl: Callable[..., str], tokenizer: Any, value: str, streaming: bool
) -> None:
    path = write_jsonl([f'{{"input": "a", "answer": {value}}}'])
    with pytest.raises(DataError, match=r"prompts.jsonl:1: key 'answer' .*NaN.*--label-key"):
        open_prompts(settings(path, label_key="answer", use_streaming_dataset=streaming), tokenizer)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_label_of_parquet_that_is_not_finite_is_named(
    write_parquet: Callable[..., str], tokenizer: Any, value: float
) -> None:
    path = write_parquet([{"input": "a", "answer": 1.0}, {"input": "b", "answer": value}])
    with pytest.raises(DataError, match=r"prompts.parquet:2: key 'answer' .*NaN.*--label-key"):
        open_prompts(settings(path, label_key="answer"), tokenizer)


def test_images_stand_where_their_marks_are(write_jsonl: Callable[..., str], tokenizer: Any) -> None:
    data = [
        {"input": "see <image> and <image>!", "images": ["a.jpg", "b.jpg"]},
        {"input": "what is it?", "images": "c.jpg"},
        {"input": "no picture"},
    ]
    source = open_prompts(
        settings(write_jsonl(data), apply_chat_template=True, multimodal_keys={"image": "images"}), tokenizer
    )
    marked, plain, none = source.next(3)
    assert marked.messages is not None
    assert plain.messages is not None
    assert marked.messages[0]["content"] == [
        {"type": "text", "text": "see "},
        {"type": "image", "image": "a.jpg"},
        {"type": "text", "text": " and "},
        {"type": "image", "image": "b.jpg"},
        {"type": "text", "text": "!"},
    ]
    assert plain.messages[0]["content"][0] == {"type": "image", "image": "c.jpg"}
    assert plain.multimodal == {"image": ["c.jpg"]}
    assert none.multimodal == {}
    for text, images, message in [
        ("<image> <image>", ["a"], "more <image> marks than the key 'images' has items"),
        ("one <image>", ["a", "b"], "the key 'images' has 2 items and the text 1 marks of them"),
    ]:
        with pytest.raises(DataError, match=message):
            open_prompts(
                settings(
                    write_jsonl([{"input": text, "images": images}], "bad.jsonl"),
                    apply_chat_template=True,
                    multimodal_keys={"image": "images"},
                ),
                tokenizer,
            )


@pytest.mark.parametrize("images", [None, []])
def test_a_mark_without_an_item_is_the_error_of_its_row(
    write_jsonl: Callable[..., str], tokenizer: Any, images: Any
) -> None:
    path = write_jsonl([{"input": "an <audio>"}, {"input": "see <image>", "images": images}])
    chat = settings(path, apply_chat_template=True)
    keyed = dataclasses.replace(chat, multimodal_keys={"image": "images"})
    with pytest.raises(DataError, match=r"prompts.jsonl:2: key 'input': a <image> mark, and the row has no image"):
        open_prompts(keyed, tokenizer)
    assert len(open_prompts(dataclasses.replace(keyed, skip_bad_rows=True), tokenizer)) == 1
    assert len(open_prompts(chat, tokenizer)) == 2, "without --multimodal-keys it is text"


def test_without_shuffle_rows_come_in_file_order_epoch_after_epoch(
    write_jsonl: Callable[..., str], tokenizer: Any
) -> None:
    source = open_prompts(settings(write_jsonl(rows(5)), label_key="answer"), tokenizer, num_epoch=2)
    got = source.next(7)
    assert labels(got) == [0, 1, 2, 3, 4, 0, 1]
    assert [p.epoch for p in got] == [0] * 5 + [1] * 2
    assert labels(source.next(99)) == [2, 3, 4]
    assert source.next(1) == []


def test_shuffle_is_seeded_and_another_one_each_epoch(write_jsonl: Callable[..., str], tokenizer: Any) -> None:
    path = write_jsonl(rows(50))

    def epochs(seed: int) -> list[list[Any]]:
        source = open_prompts(settings(path, label_key="answer", rollout_shuffle=True, rollout_seed=seed), tokenizer)
        return [labels(source.next(50)) for _ in range(3)]

    first = epochs(1)
    assert first == epochs(1)
    assert first != epochs(2)
    assert first[0] != first[1] != first[2]
    assert all(sorted(e) == list(range(50)) for e in first)
    # Pinned: a checkpoint of today must go on in the same order with the numpy of tomorrow.
    assert first[0][:8] == [9, 36, 39, 31, 16, 2, 48, 28]


@pytest.mark.parametrize("cut", [0, 1, 6, 7, 8, 20])
def test_resume_goes_on_as_if_uninterrupted(write_jsonl: Callable[..., str], tokenizer: Any, cut: int) -> None:
    path = write_jsonl(rows(7))
    options = settings(path, label_key="answer", rollout_shuffle=True)
    straight = open_prompts(options, tokenizer).next(30)
    source = open_prompts(options, tokenizer)
    before = source.next(cut)
    state = json.loads(json.dumps(source.state_dict()))
    resumed = open_prompts(options, tokenizer)
    resumed.load_state_dict(state)
    assert before + resumed.next(30 - cut) == straight


def test_long_prompts_are_dropped_counted_and_named(
    write_jsonl: Callable[..., str], tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_jsonl([{"input": "x" * n} for n in (3, 30, 4, 40, 50, 60)])
    with caplog.at_level(logging.WARNING):
        source = open_prompts(settings(path, rollout_max_prompt_len=10), tokenizer)
    assert [len(p.text) for p in source.next(4)] == [3, 4, 3, 4]
    assert len(source) == 2
    assert source.drops.counts == Counter({"longer than --rollout-max-prompt-len 10": 4})
    assert f"4 rows dropped: longer than --rollout-max-prompt-len 10 ({path}:2 has 31 tokens" in caplog.text
    with pytest.raises(DataError, match=r"no prompt in .*6 rows dropped: longer than --rollout-max-prompt-len 1"):
        open_prompts(settings(path, rollout_max_prompt_len=1), tokenizer)


def test_blank_lines_are_no_rows_but_count_as_lines(write_jsonl: Callable[..., str], tokenizer: Any) -> None:
    path = write_jsonl([{"input": "a"}, "", "   ", {"input": "b"}])
    source = open_prompts(settings(path), tokenizer)
    assert [p.source for p in source.next(2)] == [f"{path}:1", f"{path}:4"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"input": "a", ', r":3: not valid JSON"),
        ("[1, 2]", r":3: a row must be a JSON object, not list"),
        ('{"inptu": "a"}', r":3: key 'input' is missing \(the row has 'inptu'\); --input-key names it"),
        ('{"input": null}', r":3: key 'input' is null"),
        ('{"input": ["a"]}', r":3: key 'input' must be a string, not list; add --apply-chat-template"),
        ('{"input": "a", "metadata": [1]}', r":3: key 'metadata' must be a JSON object, not list"),
        ("null", r":3: a row must be a JSON object, not null"),
        (" null ", r":3: a row must be a JSON object, not null"),
        ("NaN", r":3: a row must be a JSON object, not float"),
        (r'{"input": "\ud800"}', r":3: not valid JSON \(half of a surrogate pair\)"),
        (r'{"input": "a", "metadata": {"\udfff": 1}}', r":3: not valid JSON \(half of a surrogate pair\)"),
        ('{"input": "a", "metadata": ' + json.dumps("[" * 10**5) + "}", r":3: key 'metadata' must be a JSON object"),
        ('{"input": "the tokenizer stumbles"}', r":3: the tokenizer failed: RuntimeError: over this text"),
        ('{"input": ""}', None),
    ],
)
def test_a_bad_row_is_named_or_skipped_and_counted(
    write_jsonl: Callable[..., str], tokenizer: Any, line: str, message: str | None
) -> None:
    path = write_jsonl([{"input": "a"}, {"input": "b"}, line, {"input": "c"}])
    if message is not None:
        with pytest.raises(DataError, match=message):
            open_prompts(settings(path), tokenizer)
    source = open_prompts(settings(path, skip_bad_rows=True), tokenizer)
    texts = [p.text for p in source.next(4)]
    if message is not None:
        assert texts == ["a", "b", "c", "a"]
        assert source.drops.counts == Counter({"unusable row (--skip-bad-rows)": 1})
        assert source.drops.unusable == 1
        assert f"{path}:3" in source.drops.lines()[0]


@pytest.mark.parametrize(
    ("label", "message"),
    [
        ("NaN", r":1: key 'answer' is not a number \(NaN\); --label-key"),
        ("null", r":1: key 'answer' is null; --label-key"),
        ("123456789012345678901", r":1: key 'answer' is a number beyond 64 bits .*as a string"),
        ('"123456789012345678901"', None),
        ("9007199254740993", None),
        ("2.5", None),
    ],
)
def test_a_label_without_a_value_or_with_lost_digits_is_refused(
    write_jsonl: Callable[..., str], tokenizer: Any, label: str, message: str | None
) -> None:
    options = settings(write_jsonl([f'{{"input": "x", "answer": {label}}}']), label_key="answer")
    if message is None:
        assert labels(open_prompts(options, tokenizer).next(1)) == [json.loads(label)]
    else:
        with pytest.raises(DataError, match=message):
            open_prompts(options, tokenizer)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("lines", "options", "message"),
    [
        (["", "  "], {}, "all 2 lines are blank"),
        (["", "null", "null"], {"skip_bad_rows": True}, r"2 rows dropped: unusable row \(--skip-bad-rows\) .*not null"),
        ([{"input": "long"}, ""], {"rollout_max_prompt_len": 2}, "1 rows dropped: longer than --rollout-max-prompt"),
        ([{"input": "the tokenizer stumbles"}], {"skip_bad_rows": True}, "1 rows dropped: .*:1: the tokenizer failed"),
        ("@[9:]", {}, "there are no rows"),
        ([], {}, "there are no rows"),
    ],
)
def test_no_usable_prompt_is_an_error_that_says_why(
    write_jsonl: Callable[..., str],
    write_parquet: Callable[..., str],
    tokenizer: Any,
    streaming: bool,
    lines: Any,
    options: dict[str, Any],
    message: str,
) -> None:
    if isinstance(lines, str):
        path = write_jsonl(rows(9)) + lines
    elif lines:
        path = write_jsonl(lines)
    else:
        import pyarrow as pa
        import pyarrow.parquet as pq

        path = write_parquet(rows(1))
        pq.write_table(pa.table({"input": pa.array([], pa.string())}), path)
    with pytest.raises(DataError, match=rf"no prompt in .*prompts\..*: {message}"):
        open_prompts(settings(path, use_streaming_dataset=streaming, **options), tokenizer, num_epoch=2).next(1)


@pytest.mark.parametrize("skip", [False, True])
def test_a_value_of_parquet_that_cannot_be_read_is_named_or_skipped(tmp_path: Path, tokenizer: Any, skip: bool) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    no_text = pa.StringArray.from_buffers(3, pa.py_buffer(np.array([0, 1, 2, 3], np.int32)), pa.py_buffer(b"a\xffc"))
    path = str(tmp_path / "x.parquet")
    pq.write_table(pa.table({"input": no_text}), path)
    if skip:
        source = open_prompts(settings(path, skip_bad_rows=True), tokenizer, num_epoch=1)
        assert [p.text for p in source.next(9)] == ["a", "c"]
        assert len(source.drops) == 1
    else:
        with pytest.raises(DataError, match=r"x.parquet:2: column 'input' cannot be read: .*utf-8"):
            open_prompts(settings(path), tokenizer)


def test_a_prompt_that_is_no_text_is_named_whoever_made_it(write_jsonl: Callable[..., str], tokenizer: Any) -> None:
    # A command line that is no UTF-8 comes as halves of surrogate pairs.
    options = settings(write_jsonl(rows(1)), apply_chat_template=True, system_prompt="\udcff")
    with pytest.raises(DataError, match=r"prompts.jsonl:1: the prompt holds half of a surrogate pair"):
        open_prompts(options, tokenizer)


def test_a_label_that_is_missing_or_a_template_that_raises_is_named(
    write_jsonl: Callable[..., str], tokenizer: Any
) -> None:
    with pytest.raises(DataError, match=r"a.jsonl:1: key 'answer' is missing .*--label-key"):
        open_prompts(settings(write_jsonl([{"input": "x"}], "a.jsonl"), label_key="answer"), tokenizer)
    path = write_jsonl([{"input": [{"role": "forbidden", "content": "x"}]}], "b.jsonl")
    with pytest.raises(DataError, match=r"b.jsonl:1: the chat template failed: RuntimeError: role not allowed"):
        open_prompts(settings(path, apply_chat_template=True), tokenizer)
    tokenizer.chat_template = None
    with pytest.raises(DataError, match="the tokenizer has no chat template"):
        open_prompts(settings(path, apply_chat_template=True), tokenizer)


def test_slices_and_several_files_are_read_in_order(
    write_jsonl: Callable[..., str], write_parquet: Callable[..., str], tokenizer: Any
) -> None:
    a, b = write_jsonl(rows(300), "a.jsonl"), write_parquet(rows(250), row_group_size=70)
    source = open_prompts(settings([f"{b}@[100:150]", f"{a}@[-2:]"], label_key="answer"), tokenizer)
    assert labels(source.next(52)) == [*range(100, 150), 298, 299]
    evaluation = open_prompts(settings(a, label_key="answer"), tokenizer, paths=[f"{b}@[:1]"])
    assert len(evaluation) == 1


def test_resume_with_other_data_says_what_differs(write_jsonl: Callable[..., str], tokenizer: Any) -> None:
    path = write_jsonl(rows(5))
    options = settings(path, rollout_shuffle=True)
    state = open_prompts(options, tokenizer).state_dict()
    for changed, message in [
        (dataclasses.replace(options, rollout_seed=7), "--rollout-seed is 7 and was 42"),
        (dataclasses.replace(options, rollout_shuffle=False), "--rollout-shuffle was True"),
        (dataclasses.replace(options, prompt_data=(path + "@[:5]",)), "is sliced differently"),
        (dataclasses.replace(options, use_streaming_dataset=True), "reads with --use-streaming-dataset"),
    ]:
        with pytest.raises(DataError, match=message):
            open_prompts(changed, tokenizer).load_state_dict(state)
    write_jsonl(rows(6))
    with pytest.raises(DataError, match=r"prompts.jsonl has \d+ bytes, at the checkpoint it had"):
        open_prompts(options, tokenizer).load_state_dict(state)
    write_jsonl([*rows(4), {"input": "question X", "answer": 4}])
    with pytest.raises(DataError, match=r"prompts.jsonl begins or ends differently"):
        open_prompts(options, tokenizer).load_state_dict(state)


def test_a_changed_filter_on_resume_is_an_error(write_jsonl: Callable[..., str], tokenizer: Any) -> None:
    options = settings(write_jsonl([{"input": "x" * n} for n in range(1, 9)]))
    state = open_prompts(options, tokenizer).state_dict()
    with pytest.raises(DataError, match="8 prompts an epoch, now there are 4"):
        open_prompts(dataclasses.replace(options, rollout_max_prompt_len=5), tokenizer).load_state_dict(state)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("specs", "both", "twice"),
    [
        (["a.jsonl", "{}/a.jsonl"], ("a.jsonl", "{}/a.jsonl"), 4),
        (["a.jsonl", "link.jsonl"], ("a.jsonl", "link.jsonl"), 4),
        (["sub/../a.jsonl", "a.jsonl"], ("sub/../a.jsonl", "a.jsonl"), 4),
        (["sub", "sub/../a.jsonl"], ("sub/linked.jsonl", "sub/../a.jsonl"), 4),
        (["a.jsonl", "a.jsonl@[:2]"], ("a.jsonl", "a.jsonl@[:2]"), 2),
        (["a.jsonl@[:3]", "link.jsonl@[-2:]"], ("a.jsonl@[:3]", "link.jsonl@[-2:]"), 1),
        (["a.jsonl@[:2]", "link.jsonl@[2:]"], None, 0),
        (["a.jsonl", "b.jsonl"], None, 0),
    ],
)
def test_rows_that_are_read_twice_are_told_once(
    write_jsonl: Callable[..., str],
    tokenizer: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    specs: list[str],
    both: tuple[str, str] | None,
    twice: int,
    streaming: bool,
) -> None:
    write_jsonl(rows(4), "a.jsonl")
    write_jsonl(rows(4), "b.jsonl")
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "a.jsonl")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/linked.jsonl").symlink_to(tmp_path / "a.jsonl")
    monkeypatch.chdir(tmp_path)
    with caplog.at_level(logging.WARNING):
        open_prompts(settings([s.format(tmp_path) for s in specs], use_streaming_dataset=streaming), tokenizer)
    told = [r.getMessage() for r in caplog.records]
    if both is None:
        assert told == []
    else:
        [message] = told
        assert all(f"{name.format(tmp_path)} " in message for name in both)
        assert f"hold {twice} rows in common" in message
