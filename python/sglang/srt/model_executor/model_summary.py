"""What a loaded model consists of, in words: for the table at the start and for ``/server_info``."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from torch import nn

from sglang.srt.layers.quantization.base_config import LinearMethodBase
from sglang.srt.layers.quantization.fp8 import Fp8LinearMethod
from sglang.srt.layers.quantization.nvfp4_linear import Activation, NvFp4Linear
from sglang.srt.layers.quantization.split import SplitLinearMethod

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner


def summarize(runner: ModelRunner) -> dict[str, Any]:
    """Kinds of layers with their number and quantisation ({"o_proj": "30 NVFP4 W4A4 (torch)"}), the attention's
    backend and the type of the KV cache."""
    return {
        "layers": layer_kinds(runner.model),
        "resolved_attention_backend": runner.attn_backend.name,
        "resolved_kv_cache_dtype": str(runner.kv_cache_dtype).removeprefix("torch."),
    }


def layer_kinds(model: nn.Module) -> dict[str, str]:
    """The last part of linear layers' names, with how many there are of which quantisation."""
    kinds: dict[str, Counter[str]] = {}
    for path, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        # A split layer's parts are modules of their own.
        if isinstance(method, LinearMethodBase) and not isinstance(method, SplitLinearMethod):
            kinds.setdefault(path.rpartition(".")[2], Counter())[_quantization(module, method)] += 1
    return {
        kind: ", ".join(f"{number} {text}" for text, number in found.most_common()) for kind, found in kinds.items()
    }


def _quantization(module: nn.Module, method: LinearMethodBase) -> str:
    linear = getattr(module, "nvfp4", None)
    if isinstance(linear, NvFp4Linear):
        name = "W4A16" if linear.activation is Activation.NONE else "W4A4"
        backends = dict.fromkeys(linear.choices.values())
        return f"NVFP4 {name} ({', '.join(backends)})"
    return "FP8" if isinstance(method, Fp8LinearMethod) else "unquantised"
