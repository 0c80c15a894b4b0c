"""The state machine that finds tool calls in a model's text, whatever pieces the text comes in."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Collection
from typing import ClassVar

from sglang.srt.function_call.core_types import Function, StreamingParseResult, StrictTag, ToolCallItem
from sglang.srt.parser.held_text import TrimmedText, partial_suffix

_STRING = r'"(?:[^"\\]|\\.)*"'
# {"name": "f", "arguments": {
_HEADER = re.compile(rf'\{{\s*"name"\s*:\s*({_STRING})\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{{)', re.DOTALL)
_FIRST_KEY = re.compile(rf"\{{\s*({_STRING})", re.DOTALL)
_FIRST_NAME = re.compile(rf'\{{\s*"name"\s*:\s*({_STRING})', re.DOTALL)
_NOT_A_CALL = re.compile(r'\{\s*[^"\s]|\{\s*"name"\s*:\s*[^"\s]')
_KEYS = ('"name"', '"arguments"', '"parameters"', '"type"', '"id"')
_OPENING = re.compile(r"\s*\[?\s*")
_SEPARATOR = re.compile(r"\s*[,;]?\s*")
_CLOSING = re.compile(r"\s*\]?\s*")
_BRACKET_OR_QUOTE = re.compile(r'["{}\[\]]')
_QUOTE_OR_ESCAPE = re.compile(r'["\\]')


class _Brackets:
    """Finds the end of a JSON object or array without looking at a character twice."""

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._in_string = False
        self._position = 0

    def end(self, text: str) -> int:
        """Position behind the closing bracket; -1 if it has not come. ``text`` is the last call's, or longer."""
        while True:
            pattern = _QUOTE_OR_ESCAPE if self._in_string else _BRACKET_OR_QUOTE
            match = pattern.search(text, self._position)
            if match is None:
                self._position = len(text)
                return -1
            char = match[0]
            if char == "\\":
                if match.end() == len(text):  # what it escapes has not come
                    self._position = match.start()
                    return -1
                self._position = match.end() + 1
                continue
            self._position = match.end()
            if char == '"':
                self._in_string = not self._in_string
            else:
                self._depth += 1 if char in "{[" else -1
                if self._depth <= 0:
                    return self._position


class BaseFormatDetector:
    """Finds calls of known functions in a text: ``bot_token``, then one JSON object ``{"name", "arguments"}`` or
    several, in an array or not, then ``eot_token``.

    A call begins where the name of a known function and the ``{`` of its arguments have been read. Anything that
    looks like a call but does not get there (no JSON, an unknown name, no object) stays text. From then on the
    arguments are passed on as the model writes them, up to the bracket that closes them or the end of the output, so
    they may be cut off or, without a grammar, no valid JSON. White space between text and calls is dropped.

    Class attributes:
        bot_token, eot_token: what stands around calls; without ``bot_token`` calls are only looked for where the
            output begins.
        bare: the output may begin with a call, without ``bot_token``.

    Args:
        functions: the functions that may be called.
        parallel: more than one call is passed on; else the first one.
    """

    bot_token: ClassVar[str] = ""
    eot_token: ClassVar[str] = ""
    bare: ClassVar[bool] = False
    # Keyword of the arguments in the model's own format.
    arguments_key: ClassVar[str] = "arguments"

    def __init__(self, functions: Collection[Function], *, parallel: bool = True) -> None:
        self._names = frozenset(function.name for function in functions)
        self._parallel = parallel
        self._state: Callable[[StreamingParseResult, bool], bool] = self._first if self.bare else self._text
        self._buffer = ""
        self._fallback = ""
        self._text_out = TrimmedText()
        self._brackets = _Brackets()
        self._behind_arguments = self._after
        self._calls = 0
        self._given = 0

    @property
    def has_calls(self) -> bool:
        """A call was passed on."""
        return self._calls > 0

    def parse_streaming_increment(self, new_text: str) -> StreamingParseResult:
        """What ``new_text`` adds."""
        return self._run(new_text, last=False)

    def finish(self) -> StreamingParseResult:
        """The end of the output: what was held back."""
        result = self._run("", last=True)
        result.normal_text += self._text_out.finish()
        return result

    def _run(self, new_text: str, *, last: bool) -> StreamingParseResult:
        self._buffer += new_text
        result = StreamingParseResult()
        while self._state(result, last):
            pass
        return result

    # States. Each returns whether the next one can go on with what is buffered.

    def _first(self, result: StreamingParseResult, last: bool) -> bool:
        """The output's beginning, where a call may stand without ``bot_token``."""
        start = self._buffer.lstrip()
        if start[:1] in ("{", "["):
            self._state = self._opening
            return True
        if not start and not last:
            return False
        self._state = self._text
        return True

    def _text(self, result: StreamingParseResult, last: bool) -> bool:
        buffer, token = self._buffer, self.bot_token
        position = buffer.find(token) if token else -1
        if position >= 0:
            result.normal_text += self._text_out.feed(buffer[:position])
            self._buffer = buffer[position + len(token) :]
            self._fallback = token
            self._brackets = _Brackets()
            self._state = self._opening
            return True
        shown = len(buffer) - (0 if last else partial_suffix(buffer, token))
        result.normal_text += self._text_out.feed(buffer[:shown])
        self._buffer = buffer[shown:]
        return False

    def _opening(self, result: StreamingParseResult, last: bool) -> bool:
        """Behind ``bot_token``: a call, or no call after all."""
        match = _OPENING.match(self._buffer)
        assert match is not None  # matches the empty text
        if match.end() == len(self._buffer) and not last:
            return False
        return self._call(match.end(), result, last, self._no_call)

    def _no_call(self, result: StreamingParseResult) -> bool:
        result.normal_text += self._text_out.feed(self._fallback)
        self._state = self._text
        return True

    def _call(
        self, start: int, result: StreamingParseResult, last: bool, otherwise: Callable[[StreamingParseResult], bool]
    ) -> bool:
        """An object at ``start``: begin the call that it is, else go on with ``otherwise``."""
        text = self._buffer[start:]
        header = self._header(text)
        if header is not None:
            name, length = header
            if name not in self._names:
                return otherwise(result)
            self._begin(name, result)
            self._buffer = text[length:]
            self._state = self._arguments
            self._behind_arguments = self._rest_of_object if text[0] == "{" else self._after
            return True
        if self._is_no_call(text):
            return otherwise(result)
        end = self._brackets.end(text) if text[0] == "{" else -1
        if end < 0:
            return otherwise(result) if last else False
        call = _read_call(text[:end])
        if call is None or call[0] not in self._names:
            return otherwise(result)
        self._begin(call[0], result)
        self._give(call[1], result)
        self._buffer = text[end:]
        self._state = self._after
        return True

    def _header(self, text: str) -> tuple[str, int] | None:
        """Name and length of what stands before a call's arguments, if all of it is there."""
        match = _HEADER.match(text)
        return None if match is None else (_unquote(match[1]), match.end())

    def _is_no_call(self, text: str) -> bool:
        """Whether ``text`` can't become a call any more."""
        if not text.startswith("{") or _NOT_A_CALL.match(text):
            return True
        key = _FIRST_KEY.match(text)
        name = _FIRST_NAME.match(text)
        return (key is not None and key[1] not in _KEYS) or (name is not None and _unquote(name[1]) not in self._names)

    def _begin(self, name: str, result: StreamingParseResult) -> None:
        self._text_out.boundary()
        self._brackets = _Brackets()
        self._given = 0
        self._calls += 1
        if self._parallel or self._calls == 1:
            result.calls.append(ToolCallItem(self._calls - 1, "", name))

    def _give(self, arguments: str, result: StreamingParseResult) -> None:
        if arguments and (self._parallel or self._calls == 1):
            result.calls.append(ToolCallItem(self._calls - 1, arguments))

    def _arguments(self, result: StreamingParseResult, last: bool) -> bool:
        end = self._brackets.end(self._buffer)
        self._give(self._buffer[self._given : end if end >= 0 else None], result)
        self._given = len(self._buffer)
        if end < 0:
            return False
        self._buffer = self._buffer[end:]
        self._brackets = _Brackets(depth=1)
        self._state = self._behind_arguments
        return True

    def _rest_of_object(self, result: StreamingParseResult, last: bool) -> bool:
        """Behind the arguments: ``}``, maybe after further keys, which say nothing."""
        rest = self._buffer.lstrip()
        if not rest:
            return False
        if rest[0] in ",}":
            end = self._brackets.end(self._buffer)
            if end < 0:
                return False
            self._buffer = self._buffer[end:]
        self._state = self._after
        return True

    def _after(self, result: StreamingParseResult, last: bool) -> bool:
        """Behind a call: another one, or the end of the calls."""
        self._brackets = _Brackets()
        self._state = self._next
        return True

    def _next(self, result: StreamingParseResult, last: bool) -> bool:
        separator = _SEPARATOR.match(self._buffer)
        assert separator is not None  # matches the empty text
        if separator.end() == len(self._buffer):
            return False
        if self._buffer[separator.end()] == "{":
            return self._call(separator.end(), result, last, self._close)
        return self._close(result, last)

    def _close(self, result: StreamingParseResult, last: bool = False) -> bool:
        self._state = self._end
        return True

    def _end(self, result: StreamingParseResult, last: bool) -> bool:
        closing = _CLOSING.match(self._buffer)
        assert closing is not None  # matches the empty text
        rest = self._buffer[closing.end() :]
        if not last and (not rest or (rest != self.eot_token and self.eot_token.startswith(rest))):
            return False
        self._buffer = rest.removeprefix(self.eot_token)
        self._state = self._text
        return True

    @staticmethod
    def new_call_id() -> str:
        """A name for a call."""
        return f"call_{uuid.uuid4().hex[:24]}"

    # Constrained decoding

    @classmethod
    def strict_tags(cls, functions: Collection[Function]) -> list[StrictTag]:
        """The ways in which calls of ``functions`` may be written when their schemas are enforced."""
        before, behind = (f"{cls.bot_token}\n", f"\n{cls.eot_token}") if cls.eot_token else ("", "")
        return [
            StrictTag(
                trigger=cls.bot_token if cls.eot_token else f'{{"name": {json.dumps(function.name)}',
                begin=f'{before}{{"name": {json.dumps(function.name)}, "{cls.arguments_key}": ',
                function=function,
                end="}" + behind,
            )
            for function in functions
        ]


def _unquote(string: str) -> str:
    try:
        return str(json.loads(string, strict=False))
    except ValueError:
        return string


def _read_call(text: str) -> tuple[str, str] | None:
    """Name and arguments of a whole call object; None if it isn't one."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters"))
    if arguments is None:
        arguments = {}
    return (value["name"], json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None
