"""Tensor parallelism: which rank this process is, and the two collectives that layers need.

Layers receive a :class:`TensorParallelGroup`; nothing here is process-wide state.
"""

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class TensorParallelGroup:
    """``size`` processes that each hold one shard; this one is number ``rank``.

    ``process_group`` is a ``torch.distributed`` group (None where ``size`` is 1).
    """

    rank: int = 0
    size: int = 1
    process_group: Any = None

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum ``x`` over the ranks, in place."""
        if self.size > 1:
            torch.distributed.all_reduce(x, group=self.process_group)
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Concatenate ``x`` [..., n] of all ranks along the last dimension: [..., size * n]."""
        if self.size == 1:
            return x
        parts = [torch.empty_like(x) for _ in range(self.size)]
        torch.distributed.all_gather(parts, x.contiguous(), group=self.process_group)
        return torch.cat(parts, dim=-1)


SINGLE = TensorParallelGroup()
