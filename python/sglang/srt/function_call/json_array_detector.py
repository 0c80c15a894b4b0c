"""Calls that a grammar has forced (``tool_choice`` required or a named function), whatever the model's own format."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang.srt.function_call.base_format_detector import BaseFormatDetector
from sglang.srt.function_call.core_types import Function


class JsonArrayDetector(BaseFormatDetector):
    """``[{"name": "f", "parameters": {...}}, ...]`` and nothing else."""

    bare = True


def get_json_schema_constraint(functions: Sequence[Function], *, parallel: bool) -> dict[str, Any]:
    """The schema of such an array with at least one call, and with one call only unless ``parallel``.

    Raises:
        ValueError: two functions define one ``$defs`` name differently.
    """
    definitions: dict[str, Any] = {}
    calls = []
    for function in functions:
        # References point to the root of a schema, so definitions have to move there.
        parameters = dict(function.schema)
        for name, definition in parameters.pop("$defs", {}).items():
            if definitions.setdefault(name, definition) != definition:
                raise ValueError(f"'$defs' of two functions define {name!r} differently; rename one of them.")
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"type": "string", "enum": [function.name]}, "parameters": parameters},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    schema: dict[str, Any] = {
        "type": "array",
        "minItems": 1,
        "items": calls[0] if len(calls) == 1 else {"anyOf": calls},
    }
    if not parallel:
        schema["maxItems"] = 1
    if definitions:
        schema["$defs"] = definitions
    return schema
