"""Separates what a model thinks from what it answers, whatever pieces the text comes in."""

from __future__ import annotations

from dataclasses import dataclass

from sglang.srt.parser.held_text import TrimmedText, partial_suffix


@dataclass(frozen=True)
class ReasoningFormat:
    """How a model marks its thoughts.

    Attributes:
        always: every output begins with thoughts, even where the prompt does not open them.
        tool_token: begins tool calls, which end thoughts that were not closed.
    """

    think_start: str = "<think>"
    think_end: str = "</think>"
    always: bool = False
    tool_token: str | None = None


# Values of --reasoning-parser.
REASONING_PARSERS: dict[str, ReasoningFormat] = {
    "deepseek-r1": ReasoningFormat(always=True),
    "qwen3": ReasoningFormat(tool_token="<tool_call>"),
    "qwen3-thinking": ReasoningFormat(always=True, tool_token="<tool_call>"),
}


@dataclass
class StreamingParseResult:
    normal_text: str = ""
    reasoning_text: str = ""


class ReasoningParser:
    """One output. White space next to the marks is dropped; thoughts that are never closed are thoughts.

    Args:
        force_reasoning: the output begins inside thoughts, with their opening mark or without.
        stream_reasoning: pass thoughts on as they come; else in one piece when they end.
    """

    def __init__(self, form: ReasoningFormat, *, force_reasoning: bool, stream_reasoning: bool = True) -> None:
        self._form = form
        self._force = force_reasoning
        self._stream = stream_reasoning
        self._buffer = ""
        self._begun = self._ended = False
        self._thoughts = TrimmedText()
        self._answer = TrimmedText()
        self._kept = ""

    def parse_streaming_increment(self, new_text: str) -> StreamingParseResult:
        """What ``new_text`` adds."""
        return self._run(new_text, last=False)

    def finish(self) -> StreamingParseResult:
        """The end of the output: what was held back."""
        result = self._run("", last=True)
        result.normal_text += self._answer.finish()
        result.reasoning_text, self._kept = self._kept + result.reasoning_text, ""
        return result

    def _run(self, new_text: str, *, last: bool) -> StreamingParseResult:
        result = StreamingParseResult()
        self._buffer += new_text
        if not self._begun and not self._begin(last):
            return result
        if not self._ended:
            self._think(result, last)
        if self._ended:
            result.normal_text += self._answer.feed(self._buffer)
            self._buffer = ""
        if not self._stream:
            self._kept += result.reasoning_text
            result.reasoning_text = ""
            if self._ended:
                result.reasoning_text, self._kept = self._kept, ""
        return result

    def _begin(self, last: bool) -> bool:
        """Whether it is known if the output begins with thoughts."""
        start, mark = self._buffer.lstrip(), self._form.think_start
        if not last and len(start) < len(mark) and mark.startswith(start):
            return False
        opened = start.startswith(mark)
        self._begun = True
        self._ended = not opened and not self._force
        if not self._ended:
            self._buffer = start.removeprefix(mark)
            self._thoughts.boundary()
        return True

    def _think(self, result: StreamingParseResult, last: bool) -> None:
        buffer = self._buffer
        marks = [mark for mark in (self._form.think_end, self._form.tool_token) if mark]
        found = [(position, mark) for mark in marks if (position := buffer.find(mark)) >= 0]
        if found:
            position, mark = min(found)
            self._ended = True
            self._buffer = buffer[position:] if mark == self._form.tool_token else buffer[position + len(mark) :]
            self._answer.boundary()
        else:
            position = len(buffer) - (0 if last else max(partial_suffix(buffer, mark) for mark in marks))
            self._buffer = buffer[position:]
        result.reasoning_text += self._thoughts.feed(buffer[:position])
