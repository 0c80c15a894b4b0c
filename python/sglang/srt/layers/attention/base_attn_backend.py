"""What an attention backend must do, and what it is asked about."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

import torch

from sglang.srt.layers.backend_registry import BackendRegistry

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

Rotary = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class AttentionTarget:
    """Everything that a backend's answer may depend on: the machine, and the model on it.

    Attributes:
        device, dtype: where and in what queries, keys and values are computed.
        kv_cache_dtype: what keys and values are stored in.
        num_heads, num_kv_heads: of this rank.
        page_size: neighbouring slots of the KV cache that belong to one request.
        sliding_windows: of all layers: how many tokens a token sees, itself included; None for all.
    """

    device: torch.device
    dtype: torch.dtype
    kv_cache_dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int = 1
    sliding_windows: frozenset[int | None] = frozenset({None})

    def __str__(self) -> str:
        dtype, cache = (str(one).removeprefix("torch.") for one in (self.dtype, self.kv_cache_dtype))
        return f"{self.device.type} in {dtype} with a KV cache in {cache}, head size {self.head_dim}"


class Attention(Protocol):
    """What a layer of the model asks for."""

    @abstractmethod
    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        batch: ForwardBatch,
        rotary: Rotary | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Rotate ``q`` and ``k``, write ``k`` and ``v`` to the step's slots, and attend causally.

        Args:
            q: [T, heads, dim], the new tokens of every request behind each other. With ``rotary`` it may be
                overwritten, and so may ``k``. All three may be views with rows further apart than their size.
            k, v: [T, kv_heads, dim].
            rotary: what :class:`RotaryEmbedding` returned for the step; None if nothing is to be rotated.
            out: contiguous, where the result is to be; None: in new memory.

        Returns:
            [T, heads * dim] in ``q``'s dtype, ``out`` if given.
        """


class AttentionBackend(Attention):
    """Attention over the paged KV cache. Subclassing registers. One object serves all layers; it may keep what it
    prepared for one step.

    Attributes:
        name: the value of ``--attention-backend``.
        priority: rank among the candidates of "auto"; higher is tried first, negative never.
        captures_decode: a decode step can be captured in a graph of the device and replayed.
    """

    name: ClassVar[str]
    aliases: ClassVar[tuple[str, ...]] = ()
    priority: ClassVar[int]
    captures_decode: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        registry.add(cls)

    def __init__(self, target: AttentionTarget) -> None:
        self.target = target

    @classmethod
    @abstractmethod
    def unsupported_reason(cls, target: AttentionTarget) -> str | None:
        """Why this backend can't compute there, as a sentence without its subject; None if it can."""

    @abstractmethod
    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        """Prepare a step. Called once before the model's forward; the batch's slots are in ``req_to_token`` already."""

    def init_cuda_graph_state(self, max_batch_size: int, max_context_len: int) -> None:
        """Allocate what captured decode steps read, once, before the first capture.

        Args:
            max_batch_size: requests of the largest captured batch.
            max_context_len: most tokens of one request.
        """
        raise NotImplementedError(f"attention backend {self.name} can't be captured")

    def init_graph_metadata(self, batch: ForwardBatch) -> None:
        """Prepare a decode step that is captured, before its capture and before every replay.

        ``batch`` has the size that was or will be captured, and its tensors are those that the graph reads. Rows
        behind the real requests have length 1, the pool's padding row and slot 0.
        """
        raise NotImplementedError(f"attention backend {self.name} can't be captured")


registry: BackendRegistry[AttentionBackend] = BackendRegistry("Attention")
