"""The attention of one layer: what it needs to know, and the call of the backend that computes it."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

import torch
from torch import nn

from sglang.srt.errors import CheckpointError
from sglang.srt.layers.quantization.base_config import register_weight

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

logger = logging.getLogger(__name__)


def check_kv_scale(loaded: torch.Tensor) -> str | None:
    """What is wrong with a stored scale of keys or values."""
    if loaded.numel() != 1:
        return f"a KV cache scale must be one value, found shape {list(loaded.shape)}"
    value = float(loaded)
    return None if math.isfinite(value) and value > 0 else f"a KV cache scale must be positive and finite, not {value}"


class KVCacheScales:
    """Turns the loaded scales of a layer's keys and values into Python numbers.

    Attributes:
        stored: whether the checkpoint had them; False until the layer was processed.
    """

    stored = False

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Raises:
        CheckpointError: only one of the two was stored.
        """
        scales = {name: float(getattr(layer, name)) for name in ("k_scale", "v_scale")}
        missing = [name for name, value in scales.items() if math.isnan(value)]
        if len(missing) == 1:
            raise CheckpointError(f"layer {layer.prefix}: the checkpoint stores one KV cache scale but no {missing[0]}")
        self.stored = not missing
        for name in scales:
            delattr(layer, name)
            setattr(layer, name, 1.0 if missing else scales[name])


def check_all_or_no_scales(model: nn.Module) -> None:
    """Compare the processed layers of ``model`` that have an fp8 KV cache; warn if the checkpoint had no scales at all.

    Raises:
        CheckpointError: some layers have scales and others have none, for which 1.0 would be a guess.
    """
    methods = {
        module.prefix: module.quant_method
        for module in model.modules()
        if isinstance(module, RadixAttention) and module.quant_method is not None
    }
    without = [prefix for prefix, method in methods.items() if not method.stored]
    if 0 < len(without) < len(methods):
        other = next(prefix for prefix, method in methods.items() if method.stored)
        raise CheckpointError(
            f"layer {without[0]}: the checkpoint stores no k_scale and v_scale, but those of other layers ({other}); "
            "store both for every layer or for none, or keep the cache in another type (--kv-cache-dtype bf16)"
        )
    if without:
        logger.warning("The KV cache is in FP8, but the checkpoint stores no k_scale and v_scale; 1.0 is used.")


class RadixAttention(nn.Module):
    """Attention of ``num_heads`` query heads over ``num_kv_heads`` cached heads (of this rank).

    Where the KV cache is in fp8, ``k_scale`` and ``v_scale`` are parameters that the checkpoint fills (below the names
    of the k and v projections) and numbers once it is loaded; else they are None.

    Args:
        num_heads, num_kv_heads: of this rank; query head h reads KV head ``h // (num_heads / num_kv_heads)``.
        head_dim: size of a head.
        scaling: factor on the scores.
        layer_id: which layer of the KV cache.
        sliding_window: a token sees this many tokens, itself included; None means all before it.
        kv_cache_dtype: what keys and values are stored in; only float8_e4m3fn has scales.
        prefix: the layer's name.
    """

    k_scale: float | None
    v_scale: float | None

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        scaling: float,
        num_kv_heads: int,
        layer_id: int,
        sliding_window: int | None = None,
        kv_cache_dtype: torch.dtype | None = None,
        prefix: str = "",
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.scaling = scaling
        self.layer_id = layer_id
        self.sliding_window = sliding_window
        self.prefix = prefix
        self.quant_method: KVCacheScales | None = None
        if kv_cache_dtype == torch.float8_e4m3fn:
            self.quant_method = KVCacheScales()
            for name in ("k_scale", "v_scale"):
                unset = torch.full((1,), float("nan"), dtype=torch.float32)
                register_weight(self, name, unset, check=check_kv_scale, optional=True)
        else:
            self.k_scale = None
            self.v_scale = None

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        forward_batch: ForwardBatch,
        rotary: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Cache ``k``, ``v`` [T, num_kv_heads, head_dim] and attend with ``q`` [T, num_heads, head_dim].

        With ``rotary``, what :class:`RotaryEmbedding` returned for the step, q and k are rotated before, and may be
        overwritten.

        Returns:
            [T, num_heads * head_dim]
        """
        return forward_batch.attn_backend.forward(q, k, v, self, forward_batch, rotary)
