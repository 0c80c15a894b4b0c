"""Attention with torch's ``scaled_dot_product_attention``, one request at a time: any device, any page size.

A loop over requests beats a padded batch because requests differ in length. Slots of the KV cache are token indices
whatever the page size, so one gather collects the keys of several requests behind each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import scaled_dot_product_attention

from sglang.srt.layers.attention.base_attn_backend import AttentionBackend, AttentionTarget, Rotary
from sglang.srt.layers.rotary_embedding import apply_rotary

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

# Queries of one call. It bounds the mask to this many rows and skips the keys behind the block's last query.
QUERY_BLOCK = 256
# Tokens of one gather, unless a single request has more: requests that share a prefix each get a copy of it.
GATHER_TOKENS = 16384


@dataclass(frozen=True)
class Gather:
    """Neighbouring requests of a batch whose keys are collected together.

    Attributes:
        slots: int32, of the first request's visible tokens, then of the second's, ...
        lengths: how many of them each request has.
        new: how many new tokens each request has.
    """

    slots: torch.Tensor
    lengths: list[int]
    new: list[int]


class TorchNativeAttnBackend(AttentionBackend):
    """One ``scaled_dot_product_attention`` per request (and per block of new tokens)."""

    name = "torch_native"
    priority = 0

    def __init__(self, target: AttentionTarget) -> None:
        super().__init__(target)
        self._rows: list[int] = []
        self._gathers: dict[int | None, list[Gather]] = {}
        self._masks: dict[int | None, torch.Tensor] = {}

    @classmethod
    def unsupported_reason(cls, target: AttentionTarget) -> str | None:
        return None

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        self._rows = batch.req_pool_indices.tolist()
        self._gathers.clear()

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
        if rotary is not None:
            q, k = apply_rotary(q, *rotary), apply_rotary(k, *rotary)
        pool = batch.token_to_kv_pool
        pool.set_kv_buffer(layer, batch.out_cache_loc, k, v)
        key_buffer, value_buffer = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
        # [T, kv_heads, groups, dim]: the query heads that share a KV head are a dimension of their own.
        q = q.unflatten(1, (layer.num_kv_heads, -1))
        outputs: list[torch.Tensor] = []
        start = 0
        for gather in self._gathers.get(layer.sliding_window) or self._plan(layer.sliding_window, batch):
            keys = _collect(key_buffer, gather.slots, layer.k_scale, q.dtype).transpose(0, 1)
            values = _collect(value_buffer, gather.slots, layer.v_scale, q.dtype).transpose(0, 1)
            end = start + sum(gather.new)
            for request_q, request_keys, request_values in zip(
                q[start:end].split_with_sizes(gather.new),
                keys.split_with_sizes(gather.lengths, dim=1),
                values.split_with_sizes(gather.lengths, dim=1),
                strict=True,
            ):
                if request_q.shape[0] == 1:
                    outputs.append(_attend_one(request_q, request_keys, request_values, layer.scaling))
                else:
                    outputs.extend(self._attend_causal(request_q, request_keys, request_values, layer))
            start = end
        return torch.cat(outputs, out=out)

    def _plan(self, window: int | None, batch: ForwardBatch) -> list[Gather]:
        """How to collect what layers with this window read in this step."""
        table = batch.req_to_token_pool.req_to_token
        plan: list[tuple[list[torch.Tensor], list[int]]] = []
        room = 0
        for row, length, new in zip(self._rows, batch.seq_lens_list, batch.extend_seq_lens, strict=True):
            # The first new token sees window - 1 tokens before it.
            first = 0 if window is None else max(0, length - new - window + 1)
            room -= length - first
            if room < 0:
                plan.append(([], []))
                room = GATHER_TOKENS - (length - first)
            parts, news = plan[-1]
            parts.append(table[row, first:length])
            news.append(new)
        gathers = [Gather(torch.cat(parts), [len(part) for part in parts], news) for parts, news in plan]
        self._gathers[window] = gathers
        return gathers

    def _attend_causal(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layer: RadixAttention
    ) -> Iterator[torch.Tensor]:
        """Queries [new, kv_heads, groups, dim] stand at the end of the sequence of keys [kv_heads, length, dim].

        Yields [tokens, heads * dim] of one block of queries after the other.
        """
        new, length = q.shape[0], keys.shape[1]
        q = q.permute(1, 2, 0, 3)
        keys = keys.unsqueeze(1).expand(-1, q.shape[1], -1, -1)
        values = values.unsqueeze(1).expand(-1, q.shape[1], -1, -1)
        mask = self._mask(layer.sliding_window, length, q.device)
        before = length - new
        for begin in range(0, new, QUERY_BLOCK):
            end = min(new, begin + QUERY_BLOCK)
            first = mask.shape[1] - QUERY_BLOCK - before - begin
            out = scaled_dot_product_attention(
                q[:, :, begin:end],
                keys[:, :, : before + end],
                values[:, :, : before + end],
                attn_mask=mask[: end - begin, first : first + before + end],
                scale=layer.scaling,
            )
            yield out.permute(2, 0, 1, 3).reshape(end - begin, -1)

    def _mask(self, window: int | None, length: int, device: torch.device) -> torch.Tensor:
        """[QUERY_BLOCK, n + QUERY_BLOCK] with n >= ``length``: row i may see the columns up to n + i.

        A block of queries that has p keys before it takes the columns from n - p on: one mask serves every block of
        every request.
        """
        mask = self._masks.get(window)
        if mask is None or mask.shape[1] < length + QUERY_BLOCK or mask.device != device:
            columns = 1 << (length - 1).bit_length()
            mask = torch.ones(QUERY_BLOCK, columns + QUERY_BLOCK, dtype=torch.bool, device=device).tril_(columns)
            if window is not None:
                mask.triu_(columns - window + 1)
            self._masks[window] = mask
        return mask


def _collect(buffer: torch.Tensor, slots: torch.Tensor, scale: float | None, dtype: torch.dtype) -> torch.Tensor:
    """Rows ``slots`` of ``buffer`` [all slots, kv_heads, dim] in ``dtype``; fp8 values are multiplied by ``scale``."""
    rows = buffer.index_select(0, slots)
    if rows.dtype == torch.float8_e4m3fn:
        rows = rows.float()
        if scale is not None:
            rows *= scale
    return rows.to(dtype)


def _attend_one(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float) -> torch.Tensor:
    """One query per head [1, kv_heads, groups, dim] sees all keys: a group's heads stand in for a query sequence.

    Returns [1, heads * dim].
    """
    out = scaled_dot_product_attention(q, keys.unsqueeze(0), values.unsqueeze(0), scale=scaling)
    return out.reshape(1, -1)
