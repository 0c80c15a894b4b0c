"""The byte layout of NVFP4 weights that the kernels in ``w4a16_*.cu`` read, and the way back."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F

ROWS = 16  # of a unit
COLUMNS = 128
CODE_BYTES = ROWS * COLUMNS // 2
UNIT = CODE_BYTES + ROWS * COLUMNS // 16
_SLAB = 1 << 26  # bytes of packed weights repacked at a time, which bounds the temporaries

# Where the bits (sign, e1, e0, m) of a pair's first code lie in word i of a piece (g, t), for the pairs (row g, k 2 i),
# (g + 8, k 2 i), (g, k 2 i + 8), (g + 8, k 2 i + 8) of the 16 k from 16 t on; the second code's are 16 further, modulo
# 32. In bfloat16 the sign must come to bit 15 and the magnitude to bits 8..6, in float16 to 11..9: three pairs of
# bfloat16, two of float16 do with one shift or rotation and one mask, the others need two of each. No arrangement of 32
# bits is cheaper.
BIT_POSITIONS: dict[torch.dtype, tuple[tuple[int, int, int, int], ...]] = {
    torch.bfloat16: ((9, 2, 1, 0), (19, 12, 11, 10), (13, 6, 5, 4), (15, 8, 7, 14)),
    torch.float16: ((9, 5, 4, 3), (6, 2, 1, 0), (13, 11, 8, 7), (15, 14, 10, 12)),
}


@cache
def _spread(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """int32 [4 pairs, 256]: the bits of a byte (two codes, the first in the low half) at their places in the word."""
    byte = torch.arange(256, dtype=torch.int64)
    result = torch.zeros(4, 256, dtype=torch.int64)
    for pair, positions in enumerate(BIT_POSITIONS[dtype]):
        for index, position in enumerate(positions):  # sign first
            result[pair] |= (byte >> (3 - index) & 1) << position
            result[pair] |= (byte >> (7 - index) & 1) << ((position + 16) % 32)
    return result.to(torch.int32).to(device)  # wraps to negative numbers, bits unchanged


@cache
def _pieces(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices [8, 4] of (g, t): what stands at place (g, t) of a step, and the other way round. Lanes (g, t) that read
    one piece each and lanes that read word t of piece (g, i) both find 32 different banks of shared memory."""
    g, t = torch.arange(8, device=device)[:, None], torch.arange(4, device=device)
    return g.expand(8, 4), t ^ (g >> 1)


def packed_shape(rows: int, columns: int) -> tuple[int, int, int]:
    """Of the result of :func:`pack`: [row blocks, units, bytes]."""
    return -(-rows // ROWS), -(-columns // COLUMNS), UNIT


def pack(packed: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``packed`` uint8 [N, K / 2] and ``scale`` float8_e4m3fn [N, K / 16] as uint8 [N / 16, K / 128, 1152], rounded up
    with zeros, for activations of ``dtype``. See ``w4a16_small.cu`` for the order."""
    rows, columns = packed.shape[0], packed.shape[1] * 2
    blocks, units, _ = packed_shape(rows, columns)
    result = torch.empty(blocks, units, UNIT, dtype=torch.uint8, device=packed.device)
    raw = scale.view(torch.uint8)
    table = _spread(dtype, packed.device)
    g, t = _pieces(packed.device)
    step = max(1, _SLAB // (units * CODE_BYTES))
    for first in range(0, blocks, step):
        last = min(first + step, blocks)
        part = slice(first * ROWS, last * ROWS)
        padding = last * ROWS - min(last * ROWS, rows)
        codes = F.pad(packed[part], (0, units * COLUMNS // 2 - columns // 2, 0, padding))
        scales = F.pad(raw[part], (0, units * COLUMNS // 16 - columns // 16, 0, padding))
        # Axes: block, row half, g, unit, step, t, k half, word.
        codes = codes.view(-1, 2, 8, units, 2, 4, 2, 4)
        word = torch.zeros((), dtype=torch.int32, device=packed.device)
        for pair in range(4):
            byte = codes[:, pair % 2, ..., pair // 2, :]
            word = word | table[pair].index_select(0, byte.int().flatten()).view(byte.shape)
        words = word.permute(0, 2, 3, 1, 4, 5)[:, :, :, g, t].contiguous()  # block, unit, step, g, t, word
        result[first:last, :, :CODE_BYTES] = words.view(torch.uint8).view(-1, units, CODE_BYTES)
        scales = scales.view(-1, 2, 8, units, 2, 4).permute(0, 3, 2, 5, 1, 4)  # block, unit, g, t, row half, step
        result[first:last, :, CODE_BYTES:] = scales.reshape(-1, units, UNIT - CODE_BYTES)
    return result


def unpack(weight: torch.Tensor, rows: int, columns: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The two arguments of :func:`pack` that gave ``weight``."""
    blocks, units, _ = weight.shape
    words = weight[:, :, :CODE_BYTES].contiguous().view(torch.int32).long().view(blocks, units, 2, 8, 4, 4)
    g, t = _pieces(weight.device)
    words = words[:, :, :, g, t]
    codes = torch.empty(blocks, 2, 8, units, 2, 4, 2, 4, dtype=torch.uint8, device=weight.device)
    for pair, positions in enumerate(BIT_POSITIONS[dtype]):
        byte = torch.zeros_like(words)
        for index, position in enumerate(positions):
            byte |= (words >> position & 1) << (3 - index)
            byte |= (words >> ((position + 16) % 32) & 1) << (7 - index)
        codes[:, pair % 2, ..., pair // 2, :] = byte.permute(0, 3, 1, 2, 4, 5).to(torch.uint8)
    packed = codes.view(blocks * ROWS, -1)[:rows, : columns // 2].contiguous()
    scales = weight[:, :, CODE_BYTES:].view(blocks, units, 8, 4, 2, 2).permute(0, 4, 2, 1, 5, 3)
    scale = scales.reshape(blocks * ROWS, -1)[:rows, : columns // 16].contiguous()
    return packed, scale.view(torch.float8_e4m3fn)
