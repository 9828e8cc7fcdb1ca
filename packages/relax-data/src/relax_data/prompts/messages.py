"""Chat messages and tools of a row: checked, and the same from every kind of file, before a template sees them.

Chat templates are programs that print what they are given: a number, a null or an object in place of a text appears in
the prompt as Python writes it, or not at all. So what is no text is an error here, or becomes one.
"""

import json
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from relax_data.errors import DataError
from relax_data.types import Messages

ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
"""Roles that are taken with every template; others only when the template names them."""
_MAY_BE_SILENT = ("tool_calls", "function_call", "reasoning_content", "thinking")
"""A message with one of these may have no content."""
_MARK = re.compile(r"<(image|video|audio)>")


def read_messages(
    value: Any,
    system: str | None,
    multimodal: dict[str, Any],
    template: str,
    where: str,
    keys: Mapping[str, str] = MappingProxyType({}),
) -> Messages:
    """Chat messages of a row, as a template is given them.

    A string is one user message, unless it holds the JSON of a list of messages. Content that is a list of texts alone
    is joined without anything between, since many templates take strings only. Keys with the value null are left out
    at every depth: Arrow gives each object all the keys that any other of its column has.

    Args:
        value: what stands under ``--input-key``.
        system: put before messages that have no system message of their own.
        multimodal: items by modality, to be put where their marks stand.
        template: source of the chat template; a role that is none of :data:`ROLES` must occur in it.
        where: file, line and key, for errors.
        keys: of ``--multimodal-keys``, by modality; a mark of one needs an item.

    Raises:
        DataError: it is no list of messages, or a role, content or part of one is not of a kind that can be rendered;
            or marks and items do not go together.
    """
    if isinstance(value, str):
        parsed = parsed_json(value) if value.lstrip().startswith("[") else None
        value = parsed if _looks_like_messages(parsed) else [{"role": "user", "content": value}]
    if not _looks_like_messages(value):
        raise DataError(f"{where} must be a string or a list of messages with 'role' and 'content'")
    messages = [_message(m, template, f"{where}, message {i + 1}") for i, m in enumerate(value)]
    if system is not None and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    if multimodal:
        return _place_items(messages, multimodal, keys, where)
    for text in (m["content"] for m in messages if isinstance(m["content"], str)):
        if lone := next((mark[1] for mark in _MARK.finditer(text) if mark[1] in keys), None):
            raise DataError(
                f"{where}: a <{lone}> mark, and the row has no {lone} under the key {keys[lone]!r} (--multimodal-keys)"
            )
    return messages


def read_tools(value: Any, where: str) -> list[dict[str, Any]]:
    """Tool descriptions of a row: a list of objects, or JSON of it, or a list of JSON objects; without nulls.

    Raises:
        DataError: they are something else.
    """
    value = parsed_json(value)
    if not isinstance(value, list):
        raise DataError(f"{where} must be a list of tool descriptions, not {kind(value)}; see --tool-key")
    tools = [parsed_json(tool) for tool in value]
    for i, tool in enumerate(tools):
        if not isinstance(tool, dict):
            raise DataError(f"{where}: tool {i + 1} must be a JSON object, not {kind(tool)}; see --tool-key")
    return [without_nulls(tool) for tool in tools]


def parsed_json(value: Any) -> Any:
    """Parquet has no type for free-form objects, so they are often strings of JSON there."""
    if isinstance(value, str):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def without_nulls(value: Any) -> Any:
    """The value without those keys of its objects, at any depth, that are null."""
    if isinstance(value, dict):
        return {k: without_nulls(v) for k, v in value.items() if v is not None}
    if isinstance(value, list):
        return [without_nulls(v) for v in value]
    return value


def kind(value: Any) -> str:
    """Names the kind of a value in the words of JSON."""
    if value is None:
        return "null"
    names = {str: "a string", bool: "true or false", int: "a number", float: "a number", list: "a list"}
    return names.get(type(value), "an object" if isinstance(value, dict) else f"a {type(value).__name__}")


def check_rendered(messages: Messages, text: str, where: str) -> None:
    """Holds that a template has rendered contents that are lists: one that takes strings prints or drops them.

    Raises:
        DataError: the text of a part is not in ``text``, or the list is in it as Python prints it.
    """
    for i, message in enumerate(messages):
        content = message["content"]
        if not isinstance(content, list):
            continue
        lost = next((p["text"] for p in content if p["type"] == "text" and p["text"].strip() not in text), None)
        if lost is not None or str(content) in text:
            what = "prints as Python does" if lost is None else f"loses the text {lost[:60]!r} of"
            raise DataError(
                f"{where}, message {i + 1}: the chat template {what} a content that is a list of parts; use a template "
                "that takes lists, or give the content as one string"
            )


def _looks_like_messages(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(m, dict) and "role" in m for m in value)


def _message(message: dict[str, Any], template: str, where: str) -> dict[str, Any]:
    role = message["role"]
    if not isinstance(role, str):
        raise DataError(f"{where}: 'role' must be a string, not {kind(role)}")
    if role not in ROLES and not re.search(rf"""(['"]){re.escape(role)}\1""", template):
        known = ", ".join(sorted(ROLES))
        raise DataError(f"{where}: the role {role[:60]!r} is unknown (known are {known}, and what the template names)")
    clean: dict[str, Any] = without_nulls(message)
    calls = clean.get("tool_calls", [])
    if not isinstance(calls, list) or not all(isinstance(c, dict) for c in calls):
        raise DataError(f"{where}: 'tool_calls' must be a list of objects")
    content = message.get("content")
    if content is None and any(clean.get(key) for key in _MAY_BE_SILENT):
        content = ""
    return {**clean, "content": _content(content, where)}


def _content(content: Any, where: str) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        what = "an empty list" if content == [] else kind(content)
        raise DataError(f"{where}: 'content' must be a string or a list of parts, not {what}")
    parts = [_part(p, f"{where}, part {i + 1}") for i, p in enumerate(content)]
    if all(p["type"] == "text" for p in parts):
        return "".join(p["text"] for p in parts)
    return parts


def _part(part: Any, where: str) -> dict[str, Any]:
    if not isinstance(part, dict):
        raise DataError(f"{where} must be an object with 'type', not {kind(part)}")
    clean: dict[str, Any] = without_nulls(part)
    if set(clean) == {"text"}:
        clean["type"] = "text"
    if not isinstance(clean.get("type"), str):
        raise DataError(f"{where}: 'type' must be a string such as 'text' or 'image', not {kind(clean.get('type'))}")
    if clean["type"] == "text" and not isinstance(clean.get("text"), str):
        raise DataError(f"{where}: 'text' must be a string, not {kind(clean.get('text'))}")
    return clean


def _place_items(messages: Messages, multimodal: dict[str, Any], keys: Mapping[str, str], where: str) -> Messages:
    """Puts images and the like where their marks stand; without any mark, before the first user text."""
    queues = {modality: list(items) for modality, items in multimodal.items()}
    marked = any(_MARK.search(m["content"]) for m in messages if isinstance(m.get("content"), str))
    placed: Messages = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, str) and marked:
            message = {**message, "content": _split_marks(content, queues, keys, where)}
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
    for modality, left in queues.items():
        if left:
            raise DataError(
                f"{where}: the key {keys.get(modality, modality)!r} has {len(multimodal[modality])} items and the text "
                f"{len(multimodal[modality]) - len(left)} marks of them: write <{modality}> once for each"
            )
    return placed


def _split_marks(text: str, queues: dict[str, list[Any]], keys: Mapping[str, str], where: str) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = []
    position = 0
    for mark in _MARK.finditer(text):
        modality = mark[1]
        if not queues.get(modality):
            where_items = f"the key {keys[modality]!r} has items" if modality in keys else "--multimodal-keys has items"
            raise DataError(f"{where}: more <{modality}> marks than {where_items}: write one for each")
        if mark.start() > position:
            parts.append({"type": "text", "text": text[position : mark.start()]})
        parts.append({"type": modality, modality: queues[modality].pop(0)})
        position = mark.end()
    if position < len(text):
        parts.append({"type": "text", "text": text[position:]})
    return parts
