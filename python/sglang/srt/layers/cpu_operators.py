"""The operators of ``kernels/cpu/layers.cpp`` and ``linear.cpp``: float32 and bfloat16; torch takes what is neither.

A row's bits depend on that row alone, not on the other rows or the number of threads.
"""

from __future__ import annotations

import math

import torch

from sglang.kernels import cpu_extension
from sglang.srt.layers.operators import Operators
from sglang.srt.sampling.sampling_batch_info import BROKEN_LOGITS, NOTHING_POSSIBLE

DTYPES = {torch.float32: 0, torch.bfloat16: 1}


class CpuOperators(Operators):
    """Raises what :func:`cpu_extension.load` raises where the library can't be had."""

    def __init__(self) -> None:
        library = cpu_extension.load()
        self._rms_norm, self._silu_and_mul = library.sglang_rms_norm, library.sglang_silu_and_mul
        self._cos_sin, self._embedding = library.sglang_cos_sin, library.sglang_embedding
        self._greedy, self._bf16_linear = library.sglang_greedy, library.sglang_bf16_linear

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        dtype = DTYPES.get(x.dtype)
        if dtype is None or weight.dtype != x.dtype or not 1 <= x.dim() <= 3:
            return super().rms_norm(x, weight, eps)
        return self._norm(x, None, weight, eps, dtype)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dtype = DTYPES.get(x.dtype)
        same = weight.dtype == residual.dtype == x.dtype and residual.shape == x.shape
        if dtype is None or not same or not 1 <= x.dim() <= 3 or x.stride(-1) != 1:
            return super().add_rms_norm(x, residual, weight, eps)
        return self._norm(x, residual.contiguous(), weight, eps, dtype), x

    def _norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, dtype: int
    ) -> torch.Tensor:
        if x.stride(-1) != 1:
            x = x.contiguous()
        out = torch.empty(x.shape, dtype=x.dtype)
        shape, strides = x.shape, x.stride()
        outer, inner = (shape[0], shape[1]) if len(shape) == 3 else (shape[0] if len(shape) == 2 else 1, 1)
        self._rms_norm(
            x.data_ptr(),
            None if residual is None else residual.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            outer,
            inner,
            strides[0],
            strides[1] if len(shape) == 3 else 0,
            shape[-1],
            eps,
            dtype,
            torch.get_num_threads(),
        )
        return out

    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        dtype = DTYPES.get(x.dtype)
        if dtype is None or x.shape[-1] % 2:
            return super().silu_and_mul(x)
        columns = x.shape[-1] // 2
        shape = (*x.shape[:-1], columns)
        if x.dim() != 2 or x.stride(1) != 1:
            x = x.reshape(math.prod(shape[:-1]), 2 * columns).contiguous()
        out = torch.empty(shape, dtype=x.dtype)
        self._silu_and_mul(
            x.data_ptr(), x.stride(0), out.data_ptr(), x.shape[0], columns, dtype, torch.get_num_threads()
        )
        return out

    def cos_sin(
        self, positions: torch.Tensor, inv_freq: torch.Tensor, factor: float, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        number = DTYPES.get(dtype)
        if number is None or inv_freq.dtype != torch.float32 or not inv_freq.is_contiguous():
            return super().cos_sin(positions, inv_freq, factor, dtype)
        positions = positions.contiguous()
        rows, half = positions.shape[0], inv_freq.shape[-1]
        cos, sin = (torch.empty(rows, 1, 2 * half, dtype=dtype) for _ in range(2))
        self._cos_sin(
            positions.data_ptr(),
            inv_freq.data_ptr(),
            half if inv_freq.dim() == 2 else 0,
            cos.data_ptr(),
            sin.data_ptr(),
            rows,
            half,
            factor,
            number,
            torch.get_num_threads(),
        )
        return cos, sin

    def embedding(
        self, ids: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype, first: int | None = None
    ) -> torch.Tensor:
        stored, number = DTYPES.get(weight.dtype), DTYPES.get(dtype)
        if stored is None or number is None or first is not None or not weight.is_contiguous():
            return super().embedding(ids, weight, dtype, first)
        ids = ids.contiguous()
        out = torch.empty(ids.shape[0], weight.shape[1], dtype=dtype)
        error = self._embedding(
            ids.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            ids.shape[0],
            weight.shape[1],
            weight.shape[0],
            stored,
            number,
            torch.get_num_threads(),
        )
        if error:
            raise IndexError(f"a token id is outside the vocabulary of {weight.shape[0]}")
        return out

    def greedy(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if x.dtype != torch.float32 or x.dim() != 2 or x.shape[1] == 0 or x.stride(1) != 1:
            return super().greedy(x)
        values, ids = torch.empty(x.shape[0]), torch.empty(x.shape[0], dtype=torch.int64)
        self._greedy(
            x.data_ptr(),
            x.stride(0),
            values.data_ptr(),
            ids.data_ptr(),
            x.shape[0],
            x.shape[1],
            BROKEN_LOGITS,
            NOTHING_POSSIBLE,
            torch.get_num_threads(),
        )
        return values, ids

    def bf16_linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if x.stride(1) != 1:
            x = x.contiguous()
        weight = weight.contiguous()
        if bias is not None:
            bias = bias.contiguous()
        out = torch.empty(x.shape[0], weight.shape[0], dtype=torch.float32)
        error = self._bf16_linear(
            x.data_ptr(),
            x.stride(0),
            weight.data_ptr(),
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            x.shape[0],
            weight.shape[0],
            x.shape[1],
            DTYPES[x.dtype],
            torch.get_num_threads(),
        )
        if error:
            raise MemoryError(f"no memory for an input of {list(x.shape)}")
        return out
