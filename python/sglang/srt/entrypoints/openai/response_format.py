"""What an answer has to look like, as /generate's fields and xgrammar's structural tags say it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from sglang.srt.errors import RequestError
from sglang.srt.function_call.core_types import StrictTag
from sglang.srt.parser.reasoning_parser import ReasoningFormat

GRAMMAR_FIELDS = ("json_schema", "regex", "ebnf", "structural_tag")
_ANY_OBJECT = json.dumps({"type": "object"})


def grammar_of(response_format: Mapping[str, Any] | None, fields: Mapping[str, str | None]) -> dict[str, str]:
    """The one field that constrains the output, or none.

    Args:
        response_format: OpenAI's object, with SGLang's ``structural_tag``.
        fields: SGLang's own fields of the request.

    Raises:
        RequestError: there is more than one, or ``response_format`` is wrong.
    """
    asked = [(name, {name: value}) for name, value in fields.items() if value is not None]
    if response_format is not None and (meant := _response_format(response_format)):
        asked.append(("response_format", meant))
    if len(asked) > 1:
        names = [name for name, _ in asked]
        raise RequestError(f"Only one of {', '.join(map(repr, names))} can be set.", names[-1])
    return asked[0][1] if asked else {}


def _response_format(response_format: Mapping[str, Any]) -> dict[str, str]:
    match response_format:
        case {"type": "text"}:
            return {}
        case {"type": "json_object"}:
            return {"json_schema": _ANY_OBJECT}
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            return {"json_schema": json.dumps(schema)}
        case {"type": "json_schema"}:
            raise RequestError("'response_format.json_schema.schema' must be an object.", "response_format")
        case {"type": "structural_tag"}:
            return {"structural_tag": json.dumps(dict(response_format))}
    raise RequestError(
        "'response_format.type' must be text, json_object, json_schema or structural_tag, got "
        f"{response_format.get('type')!r}.",
        "response_format",
    )


def forced_calls(schema: Mapping[str, Any]) -> dict[str, str]:
    """JSON that fits ``schema``, with little white space: small models would write nothing else for ever."""
    return _tag({"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": 1})


def with_strict_calls(grammar: Mapping[str, str], tags: Sequence[StrictTag], *, parallel: bool) -> dict[str, str]:
    """What ``grammar`` says or else tool calls; without a grammar free text in which tool calls fit their schemas."""
    calls: dict[str, Any] = {"tags": [tag.as_format() for tag in tags], "stop_after_first": not parallel}
    if not grammar:
        triggers = list(dict.fromkeys(tag.trigger for tag in tags))
        return _tag({"type": "triggered_tags", "triggers": triggers, **calls})
    calls |= {"type": "tags_with_separator", "separator": "\n", "at_least_one": True}
    return _tag({"type": "or", "elements": [_as_format(grammar), calls]})


def after_thoughts(grammar: Mapping[str, str], form: ReasoningFormat, *, opened: bool, certain: bool) -> dict[str, str]:
    """``grammar`` for what comes behind a model's thoughts.

    Args:
        opened: the prompt has opened them.
        certain: the output begins with thoughts; else the model may leave them out.
    """
    thoughts: dict[str, Any] = {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": form.think_end}
    start = {"type": "const_string", "value": form.think_start}
    space = {"type": "regex", "pattern": r"\s{0,4}"}
    if not certain:
        elements = [{"type": "optional", "content": {**thoughts, "begin": form.think_start}}]
    else:
        elements = [thoughts] if opened else [{"type": "optional", "content": start}, thoughts]
    return _tag({"type": "sequence", "elements": [*elements, space, _as_format(grammar)]})


def _tag(content: dict[str, Any]) -> dict[str, str]:
    return {"structural_tag": json.dumps({"type": "structural_tag", "format": content})}


def _as_format(grammar: Mapping[str, str]) -> dict[str, Any]:
    """A grammar field in xgrammar's structural tags."""
    ((name, value),) = grammar.items()
    if name == "json_schema":
        try:
            return {"type": "json_schema", "json_schema": json.loads(value)}
        except ValueError as error:
            raise RequestError(f"'json_schema' is not valid JSON: {error}", "json_schema") from None
    if name == "regex":
        return {"type": "regex", "pattern": value}
    if name == "ebnf":
        return {"type": "grammar", "grammar": value}
    tag = json.loads(value)
    if "format" not in tag:
        raise RequestError(
            "'response_format' with 'structures' can't be combined with thoughts or tools; write it as xgrammar's "
            "'format', or switch them off.",
            "response_format",
        )
    return dict(tag["format"])
