"""``tools`` and ``tool_choice``: which functions may or must be called."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
from sglang.srt.errors import RequestError
from sglang.srt.function_call.core_types import Function
from sglang.srt.function_call.json_array_detector import get_json_schema_constraint
from sglang.srt.request_validation import convert, select_supported


class _Function(msgspec.Struct, kw_only=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _Name(msgspec.Struct, kw_only=True):
    name: str


class _Named(msgspec.Struct, kw_only=True):
    """``{"type": "function", "function": {"name": ...}}``."""

    type: Literal["function"]
    function: _Name


class _AllowedTools(msgspec.Struct, kw_only=True):
    mode: Literal["auto", "required"]
    tools: list[_Named]


class _Allowed(msgspec.Struct, kw_only=True):
    type: Literal["allowed_tools"]
    allowed_tools: _AllowedTools


@dataclass(frozen=True)
class ToolChoice:
    """The functions that this answer may call.

    Attributes:
        mode: auto: the model decides; required: it calls at least one.
        functions: those that may be called.
        shown: what the chat template is given: all tools, as the client wrote them.
    """

    mode: Literal["none", "auto", "required"] = "none"
    functions: tuple[Function, ...] = ()
    shown: Sequence[dict[str, Any]] = ()

    def required_schema(self, *, parallel: bool) -> dict[str, Any]:
        """JSON schema of the calls, for mode required.

        Raises:
            RequestError: the functions' schemas contradict each other.
        """
        try:
            return get_json_schema_constraint(self.functions, parallel=parallel)
        except ValueError as error:
            raise RequestError(str(error), "tools") from None


def parse_tools(request: ChatCompletionRequest) -> ToolChoice:
    """``tools`` and ``tool_choice`` of a request, checked.

    Raises:
        RequestError: naming what is wrong.
    """
    tools = request.tools or []
    functions = [_function(tool, f"tools[{i}]") for i, tool in enumerate(tools)]
    known = {function.name: function for function in functions}
    if len(known) < len(functions):
        raise RequestError("Two of 'tools' have the same name.", "tools")
    choice = "auto" if request.tool_choice is None else request.tool_choice
    if choice == "none" or (choice == "auto" and not tools):
        return ToolChoice()
    if not tools:
        raise RequestError("'tool_choice' is only allowed when 'tools' are given.", "tool_choice")
    if choice == "auto":
        return ToolChoice("auto", tuple(functions), tools)
    if choice == "required":
        return ToolChoice("required", tuple(functions), tools)
    if isinstance(choice, str):
        raise RequestError(f"'tool_choice' must be none, auto, required or an object, got {choice!r}.", "tool_choice")
    mode, names = _chosen(choice)
    for name in names:
        if name not in known:
            raise RequestError(f"'tool_choice' names {name!r}, which is not in 'tools'.", "tool_choice")
    return ToolChoice(mode, tuple(known[name] for name in names), tools)


def _chosen(choice: dict[str, Any]) -> tuple[Literal["auto", "required"], list[str]]:
    try:
        if choice.get("type") == "allowed_tools":
            allowed = convert(choice, _Allowed).allowed_tools
            if not allowed.tools:
                raise RequestError("'tool_choice.allowed_tools.tools' is empty.", "tool_choice")
            return allowed.mode, list(dict.fromkeys(tool.function.name for tool in allowed.tools))
        return "required", [convert(choice, _Named).function.name]
    except RequestError as error:
        raise RequestError(f"'tool_choice': {error}", "tool_choice") from None


def _function(tool: dict[str, Any], where: str) -> Function:
    if tool.get("type") != "function" or not isinstance(tool.get("function"), dict):
        raise RequestError(
            f"'{where}' must be {{'type': 'function', 'function': {{...}}}}; this server has no other kind.", where
        )
    try:
        select_supported(tool, ("type", "function"), {"defer_loading": (False,)})
        given = select_supported(tool["function"], _Function.__struct_fields__, {"defer_loading": (False,)})
        function = convert(given, _Function)
    except RequestError as error:
        raise RequestError(f"'{where}': {error}", where) from None
    if not function.name:
        raise RequestError(f"'{where}.function.name' is empty.", where)
    return Function(function.name, function.parameters, bool(function.strict))
