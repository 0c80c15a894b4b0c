"""Which parser reads a model's tool calls."""

from __future__ import annotations

from sglang.srt.function_call.base_format_detector import BaseFormatDetector
from sglang.srt.function_call.hermes_detector import HermesDetector
from sglang.srt.function_call.llama32_detector import Llama32Detector
from sglang.srt.function_call.mistral_detector import MistralDetector

# Values of --tool-call-parser.
TOOL_CALL_PARSERS: dict[str, type[BaseFormatDetector]] = {
    "hermes": HermesDetector,
    "llama3": Llama32Detector,
    "mistral": MistralDetector,
    "qwen": HermesDetector,
    "qwen25": HermesDetector,
}

# What a chat template writes when it shows the model how to call, and what another format would have beside it.
_TRACES: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("qwen25", ("<tool_call>", "arguments"), ("<function=", "<arg_key>", "<tool_calls>", "<invoke ")),
    ("mistral", ("[TOOL_CALLS]",), ()),
    ("llama3", ('{"name": function name, "parameters": dictionary of argument name and its value}',), ()),
)


def tool_call_parser_of(template: str) -> str | None:
    """The parser of the format that a chat template teaches, if it teaches exactly one that is known."""
    found = [
        name
        for name, traces, others in _TRACES
        if all(trace in template for trace in traces) and not any(other in template for other in others)
    ]
    return found[0] if len(found) == 1 else None
