"""Chat messages, parts and tools of rows: what a template may see, alike from every kind of file; begin tokens."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from char_tokenizer import char_tokenizer
from relax_data.errors import DataError
from relax_data.prompts.open import open_prompts
from relax_data.settings import DataSettings

PRINTS_STRINGS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content if m.content is string else '' }}"
    "{% if m.tool_calls is defined %}{{ m.tool_calls | tojson }}{% endif %}{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}"
)
"""A template that takes strings only, as many published ones."""


@pytest.fixture
def real_tokenizer() -> Any:
    return char_tokenizer()


def chat(path: str, **options: Any) -> DataSettings:
    return DataSettings(
        prompt_data=(path,), input_key="messages", tool_key="tools", apply_chat_template=True, **options
    )


def test_a_text_that_begins_with_the_begin_token_gets_no_second_one(
    write_jsonl: Callable[..., str], real_tokenizer: Any
) -> None:
    from tokenizers import processors

    begin = real_tokenizer.bos_token_id
    real_tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", begin)]
    )
    messages = [{"role": "user", "content": "1+1="}]
    real_tokenizer.chat_template = "{{ bos_token }}" + real_tokenizer.chat_template
    rendered = real_tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    texts = ["1+1=", rendered, "<bos><bos>1", "<bos>"]
    path = write_jsonl([{"input": t} for t in texts])
    plain = open_prompts(DataSettings(prompt_data=(path,)), real_tokenizer).next(4)
    assert [p.input_ids.count(begin) for p in plain] == [1, 1, 2, 1]
    path = write_jsonl([{"input": messages}], "chat.jsonl")
    [prompt] = open_prompts(DataSettings(prompt_data=(path,), apply_chat_template=True), real_tokenizer).next(1)
    assert prompt.input_ids == plain[1].input_ids
    # A tokenizer that adds none: what the text holds stays.
    real_tokenizer.backend_tokenizer.post_processor = None
    path = write_jsonl([{"input": "<bos><bos>1"}], "none.jsonl")
    assert open_prompts(DataSettings(prompt_data=(path,)), real_tokenizer).next(1)[0].input_ids[:2] == [begin, begin]


def test_text_parts_are_joined_and_nothing_of_a_message_is_lost(
    write_jsonl: Callable[..., str], real_tokenizer: Any
) -> None:
    real_tokenizer.chat_template = PRINTS_STRINGS
    parts = [{"type": "text", "text": "1+"}, {"text": "1="}]
    calls = [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]
    path = write_jsonl(
        [
            {"messages": [{"role": "user", "content": parts}]},
            {
                "messages": [
                    {"role": "user", "content": "a"},
                    {"role": "assistant", "content": None, "tool_calls": calls},
                ]
            },
            {"messages": json.dumps([{"role": "user", "content": "b"}])},
            {"messages": "[1, 2]"},
        ]
    )
    first, second, third, fourth = open_prompts(chat(path), real_tokenizer).next(4)
    assert first.text == "<user>1+1="
    assert second.text == f"<user>a<assistant>{json.dumps(calls)}"
    assert third.text == "<user>b"
    assert fourth.text == "<user>[1, 2]"


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ({"role": "user", "content": None}, r"message 1: 'content' must be .* not null"),
        ({"role": "user"}, r"message 1: 'content' must be .* not null"),
        ({"role": "assistant", "content": None, "tool_calls": []}, r"message 1: 'content' must be .* not null"),
        ({"role": "user", "content": 5}, r"message 1: 'content' must be .* not a number"),
        ({"role": "user", "content": True}, r"message 1: 'content' must be .* not true or false"),
        ({"role": "user", "content": {"text": "a"}}, r"message 1: 'content' must be .* not an object"),
        ({"role": "user", "content": []}, r"message 1: 'content' must be .* not an empty list"),
        ({"role": "user", "content": ["a"]}, r"message 1, part 1 must be an object with 'type', not a string"),
        ({"role": "user", "content": [{"type": "text"}]}, r"message 1, part 1: 'text' must be a string, not null"),
        (
            {"role": "user", "content": [{"type": "text", "text": 4}]},
            r"message 1, part 1: 'text' must be a string, not a number",
        ),
        (
            {"role": "user", "content": [{"type": 1, "text": "a"}]},
            r"message 1, part 1: 'type' must be a string .* not a number",
        ),
        ({"role": None, "content": "a"}, r"message 1: 'role' must be a string, not null"),
        ({"role": ["user"], "content": "a"}, r"message 1: 'role' must be a string, not a list"),
        ({"role": "human", "content": "a"}, r"message 1: the role 'human' is unknown \(known are assistant, "),
        (
            {"role": "assistant", "content": "a", "tool_calls": "f"},
            r"message 1: 'tool_calls' must be a list of objects",
        ),
        (
            {"role": "user", "content": [{"type": "text", "text": "1+1="}, {"type": "image", "image": "a.png"}]},
            r"message 1: the chat template loses the text '1\+1=' of a content that is a list",
        ),
    ],
)
@pytest.mark.parametrize("streaming", [False, True])
def test_a_message_that_a_template_would_print_or_drop_is_refused(
    write_jsonl: Callable[..., str], real_tokenizer: Any, message: dict[str, Any], error: str, streaming: bool
) -> None:
    real_tokenizer.chat_template = PRINTS_STRINGS
    path = write_jsonl([{"messages": [message]}])
    with pytest.raises(DataError, match=r"prompts.jsonl:1: key 'messages', " + error):
        open_prompts(chat(path, use_streaming_dataset=streaming), real_tokenizer)


def test_a_template_that_prints_a_list_as_python_does_is_refused(
    write_jsonl: Callable[..., str], real_tokenizer: Any
) -> None:
    content = [{"type": "text", "text": "a"}, {"type": "image", "image": "a.png"}]
    path = write_jsonl([{"messages": [{"role": "user", "content": content}]}])
    with pytest.raises(DataError, match="the chat template prints as Python does a content that is a list"):
        open_prompts(chat(path), real_tokenizer)


def test_a_role_that_the_template_names_is_taken(write_jsonl: Callable[..., str], real_tokenizer: Any) -> None:
    real_tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'critic' %}{{ m.content }}{% endif %}{% endfor %}"
    )
    path = write_jsonl([{"messages": [{"role": "critic", "content": "ab"}]}])
    assert open_prompts(chat(path), real_tokenizer).next(1)[0].text == "ab"


def test_rows_render_alike_from_jsonl_and_from_parquet(
    write_jsonl: Callable[..., str], write_parquet: Callable[..., str], real_tokenizer: Any
) -> None:
    real_tokenizer.chat_template = (
        "{{ messages | tojson }}{% if tools %}{{ tools | tojson }}{% endif %}"  # all that a template can see
    )
    call = {"function": {"name": "f", "arguments": {"x": 1}}}
    other = {"function": {"name": "g", "arguments": {"y": {"z": "q"}}}, "id": "c1"}
    tool = {"function": {"name": "f", "parameters": {"properties": {"x": {"type": "integer"}}}}}
    more = {"function": {"name": "g", "parameters": {"properties": {"y": {"enum": ["a"]}}, "required": ["y"]}}}
    data: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": "a"}], "tools": [tool]},
        {
            "messages": [
                {"role": "user", "content": "b", "name": "n"},
                {"role": "assistant", "tool_calls": [call, other]},
                {"role": "tool", "content": "c", "tool_call_id": "c1"},
            ],
            "tools": [more, tool],
        },
        {"messages": [{"role": "assistant", "content": "d", "tool_calls": [call]}]},
    ]
    seen = []
    for path in (write_jsonl(data), write_parquet(data)):
        prompts = open_prompts(chat(path), real_tokenizer).next(3)
        texts = [json.JSONDecoder().raw_decode(p.text) for p in prompts]
        assert not any("null" in p.text for p in prompts)
        seen.append(
            [(m, p.text[end:] and json.loads(p.text[end:])) for (m, end), p in zip(texts, prompts, strict=True)]
        )
    assert seen[0] == seen[1]


def test_parts_render_alike_from_jsonl_and_from_parquet(
    write_jsonl: Callable[..., str], write_parquet: Callable[..., str], tokenizer: Any
) -> None:
    parts = [{"type": "image", "image": "a.png"}, {"type": "text", "text": "x"}]
    data = [{"messages": [{"role": "user", "content": parts}]}, {"messages": [{"role": "user", "content": parts[1:]}]}]
    seen = [open_prompts(chat(path), tokenizer).next(2) for path in (write_jsonl(data), write_parquet(data))]
    assert [p.messages for p in seen[0]] == [p.messages for p in seen[1]]
    assert [p.text for p in seen[1]] == ["<user><image>x<assistant>", "<user>x<assistant>"]


@pytest.mark.parametrize("tools", [[1], {"name": "f"}, ["f"], 3, [None]])
def test_tools_that_are_no_objects_are_refused(write_jsonl: Callable[..., str], tokenizer: Any, tools: Any) -> None:
    path = write_jsonl([{"messages": "a", "tools": tools}])
    with pytest.raises(DataError, match=r"prompts.jsonl:1: key 'tools'.* must be a .*; see --tool-key"):
        open_prompts(chat(path), tokenizer)
