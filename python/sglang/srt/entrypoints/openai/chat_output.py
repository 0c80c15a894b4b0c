"""A model's text as an assistant's message: content, thoughts and tool calls, in one piece or in deltas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.function_call.base_format_detector import BaseFormatDetector
from sglang.srt.function_call.core_types import ToolCallItem
from sglang.srt.parser.reasoning_parser import ReasoningParser


class ChatOutput:
    """One choice. A message is the sum of its deltas, however the text is cut.

    Args:
        reasoning: takes the thoughts out; None: they are content.
        detector: takes the tool calls out; None: they are content.
        new_call_id: names a call.
    """

    def __init__(
        self,
        reasoning: ReasoningParser | None,
        detector: BaseFormatDetector | None,
        new_call_id: Callable[[], str] = BaseFormatDetector.new_call_id,
    ) -> None:
        self._reasoning = reasoning
        self._detector = detector
        self._new_call_id = new_call_id

    @property
    def has_tool_calls(self) -> bool:
        return self._detector is not None and self._detector.has_calls

    def deltas(self, text: str, *, last: bool) -> list[dict[str, Any]]:
        """What ``text`` adds to the message, as deltas in order; ``last``: no more text will come."""
        deltas: list[dict[str, Any]] = []
        if self._reasoning is not None:
            split = self._reasoning.parse_streaming_increment(text)
            if last:
                end = self._reasoning.finish()
                split.normal_text += end.normal_text
                split.reasoning_text += end.reasoning_text
            if split.reasoning_text:
                deltas.append({"reasoning_content": split.reasoning_text})
            text = split.normal_text
        if self._detector is None:
            return [*deltas, {"content": text}] if text else deltas
        results = [self._detector.parse_streaming_increment(text)]
        if last:
            results.append(self._detector.finish())
        for result in results:
            if result.normal_text:
                deltas.append({"content": result.normal_text})
            deltas += [{"tool_calls": [self._tool_call(item)]} for item in result.calls]
        return deltas

    def message(self, text: str) -> dict[str, Any]:
        """The whole message."""
        content = reasoning = ""
        calls: list[dict[str, Any]] = []
        for delta in self.deltas(text, last=True):
            content += delta.get("content", "")
            reasoning += delta.get("reasoning_content", "")
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    calls.append({**call, "function": dict(call["function"])})
                else:
                    calls[-1]["function"]["arguments"] += call["function"]["arguments"]
        return {
            "role": "assistant",
            "content": None if calls and not content else content,
            "reasoning_content": reasoning or None,
            "tool_calls": calls or None,
        }

    def _tool_call(self, item: ToolCallItem) -> dict[str, Any]:
        if item.name is None:
            return {"index": item.tool_index, "function": {"arguments": item.parameters}}
        function = {"name": item.name, "arguments": item.parameters}
        return {"index": item.tool_index, "id": self._new_call_id(), "type": "function", "function": function}
