"""Mistral, both formats."""

from __future__ import annotations

import re
import uuid
from collections.abc import Collection

from sglang.srt.function_call.base_format_detector import BaseFormatDetector
from sglang.srt.function_call.core_types import Function, StrictTag

_WORD = r'[^\s\[\]{}"]+'
_NAME = re.compile(_WORD)
_CALL_ID = re.compile(rf"\[CALL_ID\](?:{_WORD})?")
_COMPACT_HEADER = re.compile(rf"({_WORD})(?:\[CALL_ID\]{_WORD})?\[ARGS\]\s*(?=\{{)")


class MistralDetector(BaseFormatDetector):
    """``[TOOL_CALLS] [{"name": "f", "arguments": {...}}, ...]``, or ``[TOOL_CALLS]f[ARGS]{...}`` (with a
    ``[CALL_ID]`` in between or not) once for each call."""

    bot_token = "[TOOL_CALLS]"

    def _header(self, text: str) -> tuple[str, int] | None:
        match = _COMPACT_HEADER.match(text)
        return super()._header(text) if match is None else (match[1], match.end())

    def _is_no_call(self, text: str) -> bool:
        name = _NAME.match(text)
        if name is None:
            return super()._is_no_call(text)
        rest = text[name.end() :]
        if not rest:
            return not any(known.startswith(name[0]) for known in self._names)
        if name[0] not in self._names:
            return True
        if call_id := _CALL_ID.match(rest):
            rest = rest[call_id.end() :]
        elif "[CALL_ID]".startswith(rest):
            return False
        if "[ARGS]".startswith(rest):
            return False
        return not (rest.startswith("[ARGS]") and not rest[len("[ARGS]") :].strip())

    @staticmethod
    def new_call_id() -> str:
        """Mistral's templates take nine letters and digits and nothing else."""
        return uuid.uuid4().hex[:9]

    @classmethod
    def strict_tags(cls, functions: Collection[Function]) -> list[StrictTag]:
        compact = [StrictTag(f"{f.name}[ARGS]", f"{f.name}[ARGS]", f, "") for f in functions]
        return super().strict_tags(functions) + compact
