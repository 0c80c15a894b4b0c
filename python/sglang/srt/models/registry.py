"""Which architectures can be served, and where their classes are. Importing this module imports no torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from sglang.srt.errors import CheckpointError

if TYPE_CHECKING:
    from sglang.srt.models.llama import LlamaForCausalLM

# Name in config.json's "architectures" to the module that has a class of this name.
SUPPORTED_ARCHITECTURES: dict[str, str] = {
    "LlamaForCausalLM": "sglang.srt.models.llama",
    "MistralForCausalLM": "sglang.srt.models.llama",
    "Qwen2ForCausalLM": "sglang.srt.models.llama",
    "Qwen3ForCausalLM": "sglang.srt.models.llama",
}


def get_model_class(architecture: str) -> type[LlamaForCausalLM]:
    """The model class of an architecture.

    Raises:
        CheckpointError: it isn't supported; the text lists those that are.
    """
    if architecture not in SUPPORTED_ARCHITECTURES:
        supported = ", ".join(sorted(SUPPORTED_ARCHITECTURES))
        raise CheckpointError(f"architecture {architecture} is not supported; supported: {supported}")
    module = importlib.import_module(SUPPORTED_ARCHITECTURES[architecture])
    model_class: type[LlamaForCausalLM] = getattr(module, architecture)
    return model_class
