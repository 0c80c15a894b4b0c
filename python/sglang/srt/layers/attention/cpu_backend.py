"""Attention of ``kernels/cpu/attention.cpp``: keys and values are read where the paged KV cache has them.

Prompts and single tokens, all requests of a batch in one call. A request's bits depend on that request and on how its
prompt was cut into steps, not on the rest of the batch or the number of threads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sglang.kernels import cpu_extension
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

DTYPES = {torch.float32: 0, torch.bfloat16: 1}
CACHE_DTYPES = {**DTYPES, torch.float8_e4m3fn: 2}


class CpuAttnBackend(AttentionBackend):
    """One call per layer, which writes the new keys and values too."""

    def __init__(self) -> None:
        self._attention = cpu_extension.load().sglang_attention
        self._new = torch.empty(0, dtype=torch.int64)

    @classmethod
    def unsupported_reason(cls, device: torch.device, dtype: torch.dtype) -> str | None:
        if device.type != "cpu":
            return f"needs a CPU; this device is {device.type}"
        if dtype not in DTYPES:
            return f"takes float32 and bfloat16, not {str(dtype).removeprefix('torch.')}"
        return cpu_extension.unavailable()

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        self._new = torch.tensor(batch.extend_seq_lens, dtype=torch.int64)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: RadixAttention, batch: ForwardBatch
    ) -> torch.Tensor:
        pool, table = batch.token_to_kv_pool, batch.req_to_token_pool.req_to_token
        q, k, v = _rows(q), _rows(k), _rows(v)
        if k.stride(0) != v.stride(0):
            k, v = k.contiguous(), v.contiguous()
        keys, values = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
        fp8 = keys.dtype == torch.float8_e4m3fn
        out = torch.empty(q.shape[0], layer.num_heads * layer.head_dim, dtype=q.dtype)
        error = self._attention(
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            q.stride(0),
            k.stride(0),
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


def _rows(x: torch.Tensor) -> torch.Tensor:
    """x [T, heads, dim] with the values of a token behind each other."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()
