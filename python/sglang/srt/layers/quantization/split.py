"""A fused layer whose parts are quantised differently: multiplied part by part."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from sglang.srt.errors import CheckpointError
from sglang.srt.layers.quantization.base_config import LinearMethodBase


class SplitLinearMethod(LinearMethodBase):
    """Holds nothing itself: the layer gets one sub-layer per part, each with the method of its own name.

    Args:
        kinds: each part's name in the checkpoint, and how it is quantised (for messages).
    """

    def __init__(self, kinds: dict[str, str]) -> None:
        self.kinds = kinds
        self._parts: list[Any] = []

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Raises:
        CheckpointError: the layer is not one of ours, so that it can't be split.
        """
        split = getattr(layer, "split", None)
        if split is None:
            listed = ", ".join(f"{name}: {kind}" for name, kind in self.kinds.items())
            raise CheckpointError(f"the parts of a fused layer are quantised differently ({listed})")
        self._parts = split(list(self.kinds))

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        sizes = [sum(part.output_partition_sizes) for part in self._parts]
        biases = [None] * len(sizes) if bias is None else bias.split(sizes)
        outputs = [part.quant_method.apply(part, x, b) for part, b in zip(self._parts, biases, strict=True)]
        return torch.cat(outputs, dim=-1)
