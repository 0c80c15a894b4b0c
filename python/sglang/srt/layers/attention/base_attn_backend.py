"""What an attention backend must do, and which ones there are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


class AttentionBackend(ABC):
    """Attention over the paged KV cache. One object serves all layers; it may keep what it prepared for one step."""

    @classmethod
    @abstractmethod
    def unsupported_reason(cls, device: torch.device, dtype: torch.dtype) -> str | None:
        """Why this backend can't compute on ``device`` in ``dtype``; None if it can."""

    @abstractmethod
    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        """Prepare a step. Called once before the model's forward; the batch's slots are in ``req_to_token`` already."""

    @abstractmethod
    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: RadixAttention, batch: ForwardBatch
    ) -> torch.Tensor:
        """Write ``k``, ``v`` [T, kv_heads, dim] to the step's slots and attend causally.

        Args:
            q: [T, heads, dim], the new tokens of every request behind each other.

        Returns:
            [T, heads * dim] in ``q``'s dtype.
        """
