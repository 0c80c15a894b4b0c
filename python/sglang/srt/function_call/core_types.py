"""What a tool call parser gives."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Function:
    """A function that the model may call.

    Attributes:
        parameters: JSON schema of the arguments object; None where the client gave none.
        strict: arguments have to satisfy ``parameters``.
    """

    name: str
    parameters: dict[str, Any] | None = None
    strict: bool = False

    @property
    def schema(self) -> dict[str, Any]:
        """JSON schema of the arguments."""
        return self.parameters or {"type": "object", "properties": {}}


@dataclass(frozen=True)
class StrictTag:
    """How a call is written when a grammar enforces its arguments: ``begin``, the arguments, ``end``. Text is free up
    to ``trigger``, a beginning of ``begin``."""

    trigger: str
    begin: str
    function: Function
    end: str

    def as_format(self) -> dict[str, Any]:
        """In xgrammar's structural tags; the arguments of a function that is not strict may be any object."""
        schema = self.function.schema if self.function.strict else {"type": "object"}
        content = {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": 1}
        return {"type": "tag", "begin": self.begin, "content": content, "end": self.end}


@dataclass(frozen=True)
class ToolCallItem:
    """A piece of a call: the first one of a call has its ``name``, later ones continue ``parameters`` (JSON text)."""

    tool_index: int
    parameters: str
    name: str | None = None


@dataclass
class StreamingParseResult:
    """Text and calls, in the order in which they may be shown: text first."""

    normal_text: str = ""
    calls: list[ToolCallItem] = field(default_factory=list)
