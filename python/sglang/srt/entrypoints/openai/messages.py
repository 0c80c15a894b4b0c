"""``messages``: what a client sends, as chat templates expect it."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any

from sglang.srt.errors import RequestError

# What a template may use of a message; anything else must ask for nothing.
_FIELDS = frozenset({"role", "content", "name", "reasoning_content"})
_ROLE_FIELDS: dict[str, Collection[str]] = {
    "assistant": _FIELDS | {"tool_calls"},
    "tool": _FIELDS | {"tool_call_id"},
}


def template_messages(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages for a template: contents as text, arguments of tool calls as objects.

    Raises:
        RequestError: naming what is wrong or not supported.
    """
    if not messages:
        raise RequestError("'messages' is empty.", "messages")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message: dict[str, Any], where: str) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise RequestError(f"'{where}.role' must be a string such as 'user'.", f"{where}.role")
    fields = _ROLE_FIELDS.get(role, _FIELDS)
    for name, value in message.items():
        if name not in fields and value not in (None, False, [], {}):
            raise RequestError(f"'{where}.{name}' is not supported by this server.", f"{where}.{name}")
    used = {name: value for name, value in message.items() if name in fields and value not in (None, [])}
    if "tool_calls" in used:
        used["tool_calls"] = _tool_calls(used["tool_calls"], f"{where}.tool_calls")
    content = message.get("content")
    if content is None:
        if role != "assistant":
            raise RequestError(
                f"'{where}.content' is missing: only an assistant's message may have none.", f"{where}.content"
            )
        content = ""
    return {**used, "role": role, "content": _content(content, f"{where}.content")}


def _content(content: Any, where: str) -> str:
    """A message's text; parts are joined with spaces as SGLang does."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"'{where}' must be a string or a list of parts.", where)
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise RequestError(f"'{where}[{i}]' must be a text part; this model reads text only.", f"{where}[{i}]")
        texts.append(part["text"])
    return " ".join(texts)


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise RequestError(f"'{where}' must be a list.", where)
    return [_tool_call(call, f"{where}[{i}]") for i, call in enumerate(calls)]


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError(f"'{where}' must be {{'type': 'function', 'function': {{'name': ...}}}}.", where)
    if call.get("type", "function") != "function":
        raise RequestError(f"'{where}.type' must be 'function'.", where)
    arguments = function.get("arguments")
    if isinstance(arguments, str) and arguments.strip():
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            raise RequestError(f"'{where}.function.arguments' is not valid JSON: {error}", where) from None
    if arguments in (None, ""):
        arguments = {}
    if not isinstance(arguments, dict):
        raise RequestError(f"'{where}.function.arguments' must be a JSON object.", where)
    known = {name: value for name, value in call.items() if name in ("id", "type") and value is not None}
    return {"type": "function", **known, "function": {"name": function["name"], "arguments": arguments}}
