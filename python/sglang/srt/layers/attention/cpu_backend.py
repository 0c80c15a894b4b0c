"""Attention of ``kernels/cpu/attention.cpp``: rotates, writes to the paged KV cache, reads keys and values there.

Prompts and single tokens, all requests of a batch in one call. A request's bits depend on that request and on how its
prompt was cut into steps, not on the rest of the batch or the number of threads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sglang.kernels import cpu_extension
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend, AttentionTarget, Rotary

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

DTYPES = {torch.float32: 0, torch.bfloat16: 1}
CACHE_DTYPES = {**DTYPES, torch.float8_e4m3fn: 2}


class CpuAttnBackend(AttentionBackend):
    """One call per layer."""

    name = "cpu"
    priority = 30
    captures_decode = True

    def __init__(self, target: AttentionTarget) -> None:
        super().__init__(target)
        self._attention = cpu_extension.load().sglang_attention
        self._new = torch.empty(0, dtype=torch.int64)
        self._ones = torch.empty(0, dtype=torch.int64)

    @classmethod
    def unsupported_reason(cls, target: AttentionTarget) -> str | None:
        if target.device.type != "cpu":
            return f"needs a CPU; this device is {target.device.type}"
        if target.dtype not in DTYPES:
            return f"takes float32 and bfloat16, not {str(target.dtype).removeprefix('torch.')}"
        return cpu_extension.unavailable()

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        self._new = torch.tensor(batch.extend_seq_lens, dtype=torch.int64)

    def init_cuda_graph_state(self, max_batch_size: int, max_context_len: int) -> None:
        self._ones = torch.ones(max_batch_size, dtype=torch.int64)

    def init_graph_metadata(self, batch: ForwardBatch) -> None:
        self._new = self._ones[: batch.batch_size]

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
        pool, table = batch.token_to_kv_pool, batch.req_to_token_pool.req_to_token
        q, k, v = _rows(q), _rows(k), _rows(v)
        cos, sin = (None, None) if rotary is None else (_matching(part, q) for part in rotary)
        keys, values = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
        fp8 = keys.dtype == torch.float8_e4m3fn
        if out is None:
            out = torch.empty(q.shape[0], layer.num_heads * layer.head_dim, dtype=q.dtype)
        error = self._attention(
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            q.stride(0),
            k.stride(0),
            v.stride(0),
            None if cos is None else cos.data_ptr(),
            None if sin is None else sin.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            batch.out_cache_loc.data_ptr(),
            table.data_ptr(),
            table.stride(0),
            batch.req_pool_indices.data_ptr(),
            batch.seq_lens.data_ptr(),
            self._new.data_ptr(),
            out.data_ptr(),
            self._new.shape[0],
            layer.num_heads,
            layer.num_kv_heads,
            layer.head_dim,
            layer.sliding_window or 0,
            layer.scaling,
            (layer.k_scale or 1.0) if fp8 else 1.0,
            (layer.v_scale or 1.0) if fp8 else 1.0,
            DTYPES[q.dtype],
            CACHE_DTYPES[keys.dtype],
            torch.get_num_threads(),
        )
        if error:
            raise MemoryError(f"no memory for the attention of {q.shape[0]} tokens")
        return out


def _matching(rotary: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Cosines or sines, which must be [T, 1, dim] for q [T, heads, dim]."""
    expected = (q.shape[0], 1, q.shape[2])
    if rotary.shape != expected or rotary.dtype != q.dtype or q.shape[2] % 2:
        raise ValueError(f"rotary: expected {q.dtype} {list(expected)} of even size, got {rotary.dtype} {rotary.shape}")
    return rotary.contiguous()


def _rows(x: torch.Tensor) -> torch.Tensor:
    """x [T, heads, dim] with the values of a token behind each other."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()
