"""The attention of one layer: what it needs to know, and the call of the backend that computes it."""

from __future__ import annotations

import logging
import math
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import nn

from sglang.srt.errors import CheckpointError
from sglang.srt.layers.quantization.base_config import QuantizationConfig, register_weight

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

logger = logging.getLogger(__name__)


def _check_scale(loaded: torch.Tensor) -> str | None:
    value = float(loaded.reshape(-1)[0])
    return None if math.isfinite(value) and value > 0 else f"a KV cache scale must be positive and finite, not {value}"


@cache
def _warn_of_missing_scales() -> None:
    logger.warning("The checkpoint asks for an FP8 KV cache but stores no k_scale and v_scale; 1.0 is used.")


class KVCacheScales:
    """Turns the loaded scales of a layer's keys and values into Python numbers."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Raises:
        CheckpointError: only one of the two was stored.
        """
        scales = {name: float(getattr(layer, name)) for name in ("k_scale", "v_scale")}
        missing = [name for name, value in scales.items() if math.isnan(value)]
        if len(missing) == 1:
            raise CheckpointError(f"layer {layer.prefix}: the checkpoint stores one KV cache scale but no {missing[0]}")
        if missing:
            _warn_of_missing_scales()
        for name in scales:
            delattr(layer, name)
            setattr(layer, name, 1.0 if missing else scales[name])


class RadixAttention(nn.Module):
    """Attention of ``num_heads`` query heads over ``num_kv_heads`` cached heads (of this rank).

    Where the checkpoint asks for an fp8 KV cache, ``k_scale`` and ``v_scale`` are parameters that the checkpoint
    fills (below the names of the k and v projections) and numbers once it is loaded; else they are None.

    Args:
        num_heads, num_kv_heads: of this rank; query head h reads KV head ``h // (num_heads / num_kv_heads)``.
        head_dim: size of a head.
        scaling: factor on the scores.
        layer_id: which layer of the KV cache.
        sliding_window: a token sees this many tokens, itself included; None means all before it.
        quant_config: whether the KV cache has scales.
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
        quant_config: QuantizationConfig | None = None,
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
        if quant_config is not None and quant_config.kv_cache_dtype == torch.float8_e4m3fn:
            self.quant_method = KVCacheScales()
            for name in ("k_scale", "v_scale"):
                register_weight(
                    self, name, torch.full((1,), float("nan"), dtype=torch.float32), check=_check_scale, optional=True
                )
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
