"""Hermes, Qwen2.5 and Qwen3."""

from sglang.srt.function_call.base_format_detector import BaseFormatDetector


class HermesDetector(BaseFormatDetector):
    """``<tool_call>{"name": "f", "arguments": {...}}</tool_call>``, once for each call."""

    bot_token = "<tool_call>"
    eot_token = "</tool_call>"
