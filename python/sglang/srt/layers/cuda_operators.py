"""The operators of ``kernels/layers.cu`` and ``greedy.cu``: bfloat16, float16 and float32.

Torch takes other types, and shapes and strides that the kernels don't read.

Each is one launch on the current stream and can be captured in a CUDA graph. A row's bits depend on that row alone.
"""

from __future__ import annotations

from functools import reduce
from operator import or_

import torch

from sglang.kernels import layers
from sglang.kernels.layers import COS_SIN, EMBEDDING, GATE, GREEDY, HEADS, NORM, ROTATE, TYPES
from sglang.srt.layers.operators import Operators
from sglang.srt.sampling.sampling_batch_info import BROKEN_LOGITS, NOTHING_POSSIBLE

VECTOR = 16  # bytes of one load
THREADS = 128  # of a block whose threads work by themselves
LONGEST_GRID = 65535  # of blocks in y


class CudaOperators(Operators):
    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        if not _norm_takes(x, weight):
            return super().rms_norm(x, weight, eps)
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if x.dim() == 3 and _norm_heads((x, weight, out), None, eps):
            return out
        rows = _rows(x)
        if rows is None:
            return super().rms_norm(x, weight, eps)
        _norm_rows(x, None, weight, out, rows, eps)
        return out

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = _rows(x)
        if not _norm_takes(x, weight) or rows is None or residual.dtype != x.dtype or residual.shape != x.shape:
            return super().add_rms_norm(x, residual, weight, eps)
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        _norm_rows(x, residual, weight, out, rows, eps)
        return out, x

    def norm_heads(
        self, q: torch.Tensor, k: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        taken = q.dtype == k.dtype and q.shape[::2] == k.shape[::2] and q.dim() == k.dim() == 3
        if not taken or not _norm_takes(q, q_weight) or not _norm_takes(k, k_weight):
            return super().norm_heads(q, k, q_weight, k_weight, eps)
        if not _norm_heads((q, q_weight, q), (k, k_weight, k), eps):
            return super().norm_heads(q, k, q_weight, k_weight, eps)
        return q, k

    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        n, size = x.shape[-1] // 2, x.itemsize
        if x.dtype not in TYPES or x.shape[-1] % 2:
            return super().silu_and_mul(x)
        out = torch.empty((*x.shape[:-1], n), dtype=x.dtype, device=x.device)
        rows = _rows(x)
        if rows is None:
            x = x.contiguous()
            rows = x.numel() // (2 * n or 1), 2 * n
        count, stride = rows
        wide = _wide(size, x.data_ptr() | out.data_ptr(), stride | n)
        blocks = _blocks(n, wide)
        if blocks > LONGEST_GRID:
            return super().silu_and_mul(x)
        params = GATE.pack(x.data_ptr(), out.data_ptr(), stride, n)
        _launch("silu_and_mul" if wide > 1 else "silu_and_mul_any", x, (count, blocks), THREADS, params)
        return out

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
        if not _rotates(x, cos, signed_sin):
            return super().rotate(x, cos, signed_sin)
        heads, dim = x.shape[1:]
        addresses = x.data_ptr(), 0, 0, cos.data_ptr(), signed_sin.data_ptr()
        wide = _wide(x.itemsize, addresses[0] | addresses[3] | addresses[4], x.stride(0) | dim // 2)
        params = ROTATE.pack(*addresses, 0, 0, 0, x.stride(0), 0, 0, 0, 0, heads, 0, dim // 2, 0, 1.0, 1.0)
        blocks = _blocks(heads * dim // 2, wide)
        _launch("rotate" if wide > 1 else "rotate_any", x, (x.shape[0], blocks), THREADS, params)
        return x

    def rotate_and_store(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cos: torch.Tensor,
        signed_sin: torch.Tensor,
        key_buffer: torch.Tensor,
        value_buffer: torch.Tensor,
        loc: torch.Tensor,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> None:
        stored = key_buffer.dtype
        fp8, heads_of_slot = stored == torch.float8_e4m3fn, k.shape[1:]
        taken = (
            _rotates(q, cos, signed_sin)
            and k.shape == v.shape
            and q.shape[::2] == k.shape[::2]
            and q.dtype == k.dtype == v.dtype
            and (fp8 or stored == q.dtype)
            and value_buffer.dtype == stored
            and key_buffer.shape[1:] == value_buffer.shape[1:] == heads_of_slot
            and all(map(_heads_are_joined, (k, v, key_buffer, value_buffer)))
            and loc.dtype == torch.int64
            and loc.shape == q.shape[:1]
            and loc.is_contiguous()
        )
        if not taken:
            super().rotate_and_store(q, k, v, cos, signed_sin, key_buffer, value_buffer, loc, k_scale, v_scale)
            return
        tokens, heads, dim = q.shape
        kv_heads = k.shape[1]
        new = q.data_ptr(), k.data_ptr(), v.data_ptr(), cos.data_ptr(), signed_sin.data_ptr()
        buffers = key_buffer.data_ptr(), value_buffer.data_ptr()
        strides = q.stride(0), k.stride(0), v.stride(0)
        slots = key_buffer.stride(0), value_buffer.stride(0)
        wide = _wide(
            q.itemsize, new[0] | new[1] | new[2] | new[3] | new[4], strides[0] | strides[1] | strides[2] | dim // 2
        )
        if (buffers[0] | buffers[1] | (slots[0] | slots[1]) * key_buffer.itemsize) % (wide * key_buffer.itemsize):
            wide = 1
        params = ROTATE.pack(
            *new, *buffers, loc.data_ptr(), *strides, *slots, heads, kv_heads, dim // 2, fp8, k_scale, v_scale
        )
        blocks = _blocks((heads + 2 * kv_heads) * dim // 2, wide)
        _launch("rotate" if wide > 1 else "rotate_any", q, (tokens, blocks), THREADS, params)

    def cos_sin(
        self, positions: torch.Tensor, inv_freq: torch.Tensor, factor: float, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        integers = positions.dtype == torch.int64 and positions.dim() == 1 and positions.is_contiguous()
        if not integers or dtype not in TYPES or inv_freq.dtype != torch.float32 or inv_freq.stride(-1) != 1:
            return super().cos_sin(positions, inv_freq, factor, dtype)
        tokens, half = positions.shape[0], inv_freq.shape[-1]
        cos, sin = torch.empty((2, tokens, 1, 2 * half), dtype=dtype, device=positions.device).unbind()
        stride = inv_freq.stride(0) if inv_freq.dim() == 2 else 0
        params = COS_SIN.pack(
            positions.data_ptr(), inv_freq.data_ptr(), cos.data_ptr(), sin.data_ptr(), stride, half, factor
        )
        _launch("cos_sin", cos, (tokens, -(-half // 64)), 64, params)
        return cos, sin

    def embedding(
        self, ids: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype, first: int | None = None
    ) -> torch.Tensor:
        rows = ids.dtype == torch.int64 and ids.dim() == 1 and ids.is_contiguous() and weight.is_contiguous()
        if not rows or dtype not in TYPES or weight.dtype != dtype:
            return super().embedding(ids, weight, dtype, first)
        size, n = weight.shape
        out = torch.empty((ids.shape[0], n), dtype=dtype, device=weight.device)
        wide = _wide(weight.itemsize, weight.data_ptr() | out.data_ptr(), n)
        params = EMBEDDING.pack(
            ids.data_ptr(), weight.data_ptr(), out.data_ptr(), first or 0, size, n, first is not None
        )
        _launch("embedding" if wide > 1 else "embedding_any", out, (ids.shape[0], _blocks(n, wide)), THREADS, params)
        return out

    def greedy(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if x.dtype != torch.float32 or x.dim() != 2 or x.shape[1] == 0 or x.stride(1) != 1:
            return super().greedy(x)
        (rows, n), device = x.shape, x.device
        values, ids = torch.empty(rows, device=device), torch.empty(rows, dtype=torch.int64, device=device)
        if rows == 0:
            return values, ids
        plan = layers.greedy_plan(device)
        splits = plan.splits(rows, n)
        chunk = -(-n // (4 * splits)) * 4
        vector = x.data_ptr() % VECTOR == 0 and (rows == 1 or x.stride(0) % 4 == 0)
        params = GREEDY.pack(
            x.data_ptr(), values.data_ptr(), ids.data_ptr(), plan.partial.data_ptr(), plan.arrived.data_ptr(),
            x.stride(0), n, chunk, vector, BROKEN_LOGITS, NOTHING_POSSIBLE,
        )  # fmt: skip
        _launch("greedy", x, (rows, splits), 256, params)
        return values, ids


def _launch(name: str, x: torch.Tensor, grid: tuple[int, int], threads: int, params: bytes) -> None:
    if grid[0] and grid[1]:
        layers.launch(name, x.dtype, x.get_device(), grid, threads, params)


def _wide(size: int, addresses: int, values: int) -> int:
    """Values of ``size`` bytes that can be read at once where everything is a multiple of ``addresses`` bytes and of
    ``values`` values: a whole vector, or one."""
    return 1 if (addresses | values * size) % VECTOR else VECTOR // size


def _blocks(n: int, wide: int) -> int:
    return -(-n // (wide * THREADS))


def _rows(x: torch.Tensor) -> tuple[int, int] | None:
    """How many rows ``x`` [..., n] has and how far apart they lie, in values; None where neither is one number."""
    n = x.shape[-1]
    if x.is_contiguous():
        return x.numel() // (n or 1), n
    return (x.shape[0], x.stride(0)) if x.dim() == 2 and x.stride(1) == 1 else None


def _heads_are_joined(x: torch.Tensor) -> bool:
    """Whether x [rows, heads, dim] has each row's values behind each other."""
    if x.dim() != 3:
        return False
    (_, heads, dim), (_, between, one) = x.shape, x.stride()
    return one == 1 and (between == dim or heads == 1)


def _rotates(x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> bool:
    dtype = x.dtype
    if dtype not in TYPES or not _heads_are_joined(x) or x.shape[2] % 2 or not dtype == cos.dtype == signed_sin.dtype:
        return False
    rows = (x.shape[0], 1, x.shape[2])
    return cos.shape == signed_sin.shape == rows and cos.is_contiguous() and signed_sin.is_contiguous()


def _norm_takes(x: torch.Tensor, weight: torch.Tensor) -> bool:
    same = x.dtype in TYPES and weight.dtype == x.dtype and weight.shape == x.shape[-1:] and x.shape[-1] > 0
    return same and weight.is_contiguous() and x.stride(-1) == 1


def _norm_rows(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    out: torch.Tensor,
    rows: tuple[int, int],
    eps: float,
) -> None:
    """A block for each of x's rows (number and distance); with ``residual``, x becomes the sum."""
    count, stride = rows
    n, residual_address, residual_stride = x.shape[-1], 0, 0
    if residual is not None:
        residual_rows = _rows(residual)
        if residual_rows is None:
            residual = residual.contiguous()
            residual_rows = count, n
        residual_address, residual_stride = residual.data_ptr(), residual_rows[1]
    addresses = x.data_ptr(), residual_address, weight.data_ptr(), out.data_ptr()
    together = addresses[0] | addresses[1] | addresses[2] | addresses[3]
    vectors = n // _wide(x.itemsize, together, stride | residual_stride | n)
    name, threads = "rms_norm_any", min(512, -(-n // 32) * 32)
    if vectors < n and vectors <= 4096:
        each = 1 if vectors <= 512 else 2 if vectors <= 1024 else 4
        name, threads = f"rms_norm_{each}", -(-vectors // (32 * each)) * 32
    _launch(name, x, (count, 1), threads, NORM.pack(*addresses, stride, residual_stride, n, eps))


Normed = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # x and out [T, heads, n], weight [n] between them


def _norm_heads(q: Normed, k: Normed | None, eps: float) -> bool:
    """Whether every head was normalised, by a few threads each; the kernel takes short and aligned ones."""
    (x, q_weight, q_out), (y, k_weight, k_out) = q, k or q
    (tokens, heads, n), size, kv_heads = x.shape, x.itemsize, y.shape[1] if k else 0
    addresses = (
        x.data_ptr(),
        y.data_ptr(),
        q_weight.data_ptr(),
        k_weight.data_ptr(),
        q_out.data_ptr(),
        k_out.data_ptr(),
    )
    strides = (x.stride(0), y.stride(0), q_out.stride(0), k_out.stride(0))
    between = (x.stride(1), y.stride(1), q_out.stride(1), k_out.stride(1))
    together = reduce(or_, addresses)
    distance = reduce(or_, (*strides, *between), n)
    wide = _wide(size, together, distance)
    if wide == 1 or n > 32 * wide:
        return False
    lanes = 1 << (n // wide - 1).bit_length()
    params = HEADS.pack(*addresses, *strides, *between, tokens, heads, kv_heads, n, lanes, eps)
    blocks = -(-tokens * (heads + kv_heads) * lanes // THREADS)
    _launch("norm_heads", x, (blocks, 1), THREADS, params)
    return True
