"""Separates what a model thinks from what it answers, whatever pieces the text comes in."""

from __future__ import annotations

import codecs
from bisect import bisect_left
from collections.abc import Mapping, Sequence
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
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
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

    Attributes:
        thoughts_end: how many characters of the output were thoughts, marks and white space before them included; None
            while that is not known, and for thoughts that are never closed.
    """

    def __init__(self, form: ReasoningFormat, *, force_reasoning: bool, stream_reasoning: bool = True) -> None:
        self._form = form
        self._force = force_reasoning
        self._stream = stream_reasoning
        self._buffer = ""
        self._begun = False
        self._thoughts = TrimmedText()
        self._answer = TrimmedText()
        self._kept = ""
        self._passed = 0
        self.thoughts_end: int | None = None

    @property
    def thinks(self) -> bool:
        """Whether the output is known to begin with thoughts."""
        return self._force or (self._begun and self.thoughts_end != 0)

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
        if self.thoughts_end is None:
            self._think(result, last)
        if self.thoughts_end is not None:
            result.normal_text += self._answer.feed(self._buffer)
            self._buffer = ""
        if not self._stream:
            self._kept += result.reasoning_text
            result.reasoning_text = ""
            if self.thoughts_end is not None:
                result.reasoning_text, self._kept = self._kept, ""
        return result

    def _begin(self, last: bool) -> bool:
        """Whether it is known if the output begins with thoughts."""
        start, mark = self._buffer.lstrip(), self._form.think_start
        if not last and len(start) < len(mark) and mark.startswith(start):
            return False
        opened = start.startswith(mark)
        self._begun = True
        if not opened and not self._force:
            self.thoughts_end = 0
        else:
            rest = start.removeprefix(mark)
            self._passed = len(self._buffer) - len(rest)
            self._buffer = rest
            self._thoughts.boundary()
        return True

    def _think(self, result: StreamingParseResult, last: bool) -> None:
        buffer = self._buffer
        marks = [mark for mark in (self._form.think_end, self._form.tool_token) if mark]
        found = [(position, mark) for mark in marks if (position := buffer.find(mark)) >= 0]
        if found:
            position, mark = min(found)
            behind = position if mark == self._form.tool_token else position + len(mark)
            self.thoughts_end = self._passed + behind
            self._answer.boundary()
        else:
            behind = position = len(buffer) - (0 if last else max(partial_suffix(buffer, mark) for mark in marks))
        self._buffer = buffer[behind:]
        self._passed += behind
        result.reasoning_text += self._thoughts.feed(buffer[:position])


class ReasoningTokenCounter:
    """How many tokens of one output are thoughts: all that begin before their end, so that the marks count, as in
    SGLang.

    Args:
        pieces: the bytes of every token, special ones included.
        force_reasoning: as in :class:`ReasoningParser`.
    """

    def __init__(self, form: ReasoningFormat, pieces: Mapping[int, bytes], *, force_reasoning: bool) -> None:
        self._parser = ReasoningParser(form, force_reasoning=force_reasoning)
        self._pieces = pieces
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._starts: list[int] = []
        self._chars = 0

    def count(self, output_ids: Sequence[int]) -> int:
        """Of ``output_ids``, which are those of the last call and perhaps more."""
        if self._parser.thoughts_end is None:
            texts = [self._decode(self._pieces[i]) for i in output_ids[len(self._starts) :]]
            for text in texts:
                self._starts.append(self._chars)
                self._chars += len(text)
            self._parser.parse_streaming_increment("".join(texts))
        if not self._parser.thinks:
            return 0
        end = self._parser.thoughts_end
        return len(self._starts) if end is None else bisect_left(self._starts, end)
