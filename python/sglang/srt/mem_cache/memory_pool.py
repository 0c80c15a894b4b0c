"""Where keys and values live, and which slot holds which token of which request.

``req_to_token[row, position]`` is the KV slot of a request's token at ``position``; the slot indexes every layer's
key and value buffer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention

FP8_MAX = torch.finfo(torch.float8_e4m3fn).max  # 448


class ReqToTokenPool:
    """One row of KV slots per running request, and one of zeros: what pads a batch owns the padding page.

    Attributes:
        req_to_token: int32 [size + 1, max_context_len] on ``device``.
        padding_row: the one that no request gets.
    """

    def __init__(self, size: int, max_context_len: int, device: torch.device) -> None:
        self.size = size
        self.max_context_len = max_context_len
        self.padding_row = size
        self.req_to_token = torch.zeros((size + 1, max_context_len), dtype=torch.int32, device=device)
        self._free_rows = list(range(size))

    def available_size(self) -> int:
        return len(self._free_rows)

    def alloc(self) -> int:
        """A free row; IndexError if there is none (admission counts rows first)."""
        return self._free_rows.pop()

    def free(self, row: int) -> None:
        self._free_rows.append(row)

    def write(self, rows: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> None:
        """``req_to_token[rows[i], positions[i]] = slots[i]``; all int64 [n]."""
        flat = torch.add(positions, rows, alpha=self.max_context_len)
        self.req_to_token.view(-1).index_copy_(0, flat, slots.to(torch.int32))


class MHATokenToKVPool:
    """Keys and values of all layers, one slot per token.

    Slots 0 .. ``page_size`` - 1 are the padding page: padded tokens of a captured graph write there, and no request
    ever owns them.

    Args:
        size: tokens that can be held (a multiple of ``page_size``), beside the padding page.
        dtype: as stored. ``torch.float8_e4m3fn`` divides by the layer's ``k_scale``/``v_scale`` and saturates.
        head_num, head_dim: KV heads of this rank.
        layer_num: layers of the model.
    """

    def __init__(
        self,
        size: int,
        page_size: int,
        dtype: torch.dtype,
        head_num: int,
        head_dim: int,
        layer_num: int,
        device: torch.device,
    ) -> None:
        self.size = size
        self.page_size = page_size
        self.dtype = dtype
        shape = (size + page_size, head_num, head_dim)
        # Not zeroed: a slot is written before it is read, and a CPU gives memory only to pages that are touched.
        self._k = [torch.empty(shape, dtype=dtype, device=device) for _ in range(layer_num)]
        self._v = [torch.empty(shape, dtype=dtype, device=device) for _ in range(layer_num)]

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        """[size + page_size, head_num, head_dim] in ``dtype``; an fp8 value times ``k_scale`` is the key."""
        return self._k[layer_id]

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        """As :meth:`get_key_buffer`, with ``v_scale``."""
        return self._v[layer_id]

    def set_kv_buffer(self, layer: RadixAttention, loc: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store ``k`` and ``v`` [T, head_num, head_dim] (the last two may be flattened) in slots ``loc`` [T]."""
        store_rows(self.get_key_buffer(layer.layer_id), loc, k, layer.k_scale)
        store_rows(self.get_value_buffer(layer.layer_id), loc, v, layer.v_scale)

    def get_kv_size_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in (*self._k, *self._v))


def store_rows(buffer: torch.Tensor, loc: torch.Tensor, x: torch.Tensor, scale: float | None) -> None:
    """Write x [T, head_num, head_dim] (the last two may be flattened) to rows ``loc`` [T] int64 of ``buffer``.

    A float8_e4m3fn buffer gets x / scale (None: 1), saturated at 448, for any other the scale is ignored.
    """
    if buffer.dtype == torch.float8_e4m3fn:
        # In float32, so that the value is rounded once. Whether a cast saturates or gives NaN depends on torch.
        x = x.float()
        if scale is not None:
            x = x / scale
        # Indexed writes of fp8 tensors are not implemented everywhere; bytes are.
        x = x.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
        buffer = buffer.view(torch.uint8)
    buffer.index_copy_(0, loc, x.view(-1, *buffer.shape[1:]).to(buffer.dtype))
