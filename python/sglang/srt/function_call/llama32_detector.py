"""Llama 3.1, 3.2 and 3.3."""

from sglang.srt.function_call.base_format_detector import BaseFormatDetector


class Llama32Detector(BaseFormatDetector):
    """``{"name": "f", "parameters": {...}}`` where the output begins or behind ``<|python_tag|>``; several calls are
    separated by ``;``."""

    bot_token = "<|python_tag|>"
    bare = True
    arguments_key = "parameters"
