"""The arithmetic of NVFP4, exact, on any device: quantise, dequantise, pack, and the scale layouts of FlashInfer.

A value is ``e2m1(code) * e4m3(scale of its block of 16) * global scale``. Codes are stored two to a byte, element 2j in
the low nibble; block scales one byte each, never negative. ``global_scale`` is always the multiplier (ModelOpt's
convention, amax / 2688); ``global_scale_inv`` its reciprocal, which quantisers take (FlashInfer's convention).
Golden vectors for everything here come from FlashInfer's exact reference (tests/fixtures/numerics.safetensors).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

BLOCK_SIZE = 16
E2M1_MAX = 6.0
E4M3_MAX = 448.0
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)

_FLOAT32_MAX = torch.finfo(torch.float32).max
_FLOAT32_TINY = torch.finfo(torch.float32).tiny


def to_e2m1(x: torch.Tensor) -> torch.Tensor:
    """Nearest e2m1 code (ties to even, saturating at 6, NaN to +6) of float32 values: uint8 0..15, same shape."""
    magnitude, nan = x.abs(), x.isnan()
    code = (x.signbit() & ~nan).to(torch.uint8) << 3
    # Strictly above a midpoint, except where the code above it is the even one.
    for midpoint in (0.25, 1.25, 2.5, 5.0):
        code += magnitude > midpoint
    for midpoint in (0.75, 1.75, 3.5):
        code += magnitude >= midpoint
    return code.masked_fill_(nan, 7)


def to_e4m3(x: torch.Tensor) -> torch.Tensor:
    """Nearest E4M3 (ties to even), saturating at 448; NaN stays NaN (torch's own conversion makes overflow NaN)."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def pack(codes: torch.Tensor) -> torch.Tensor:
    """uint8 codes [..., K] to bytes [..., K / 2]."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """Bytes [..., K / 2] to uint8 codes [..., K]."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def _values_of_byte(device: torch.device) -> torch.Tensor:
    """The two values in each byte, float32 [256, 2]: one look-up a byte is half the work of one a code.

    Computed on ``device``, since nothing can be copied to a GPU while a CUDA graph is captured.
    """
    byte = torch.arange(256, dtype=torch.int32, device=device)
    codes = torch.stack((byte & 15, byte >> 4), dim=-1)
    # Sign, exponent and mantissa in their places of a float32, whose exponent counts from 126 further down.
    bits = ((codes & 8) << 28) | ((codes & 7) << 22)
    return bits.view(torch.float32) * 2.0**126


def quantize_nvfp4(x: torch.Tensor, global_scale_inv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise activations by FlashInfer's exact recipe (its device kernel with fast math off).

    In float32, each step rounded once: ``byte = e4m3(amax * (global_scale_inv * fp32(1/6)))``;
    ``inv = min(1 / (value(byte) * (1 / global_scale_inv)), FLT_MAX)``; ``code = e2m1(x * inv)``. A NaN is ignored in
    its block's amax (unless all 16 are NaN) and becomes +6.

    Args:
        x: [M, K], any floating dtype, K a multiple of 16.
        global_scale_inv: float32 scalar, about 2688 / amax of the tensor.

    Returns:
        packed codes uint8 [M, K / 2] and block scales float8_e4m3fn [M, K / 16].
    """
    blocks = x.float().unflatten(-1, (-1, BLOCK_SIZE))
    magnitude = blocks.abs()
    nan = magnitude.isnan()
    amax = magnitude.masked_fill(nan, 0.0).amax(-1).masked_fill_(nan.all(-1), float("nan"))
    scale = to_e4m3(amax * (global_scale_inv * (1.0 / 6.0)))  # a Python number is rounded to float32 first
    inverse = (1.0 / (scale.float() * (1.0 / global_scale_inv))).clamp(max=_FLOAT32_MAX)
    codes = to_e2m1(blocks * inverse.unsqueeze(-1))
    return pack(codes.flatten(-2)), scale


def dequantize_nvfp4(packed: torch.Tensor, scale: torch.Tensor, global_scale: torch.Tensor | float) -> torch.Tensor:
    """float32 [N, K] of packed uint8 [N, K / 2], scale float8_e4m3fn [N, K / 16] and a global multiplier.

    With ``global_scale`` 1 every value is exact, in bfloat16 too (2 + 4 significant bits).
    """
    values = F.embedding(packed.int(), _values_of_byte(packed.device))
    blocks = values.view(*scale.shape, BLOCK_SIZE)
    return (blocks * (scale.float() * global_scale).unsqueeze(-1)).flatten(-2)


def nvfp4_global_scale(amax: torch.Tensor) -> torch.Tensor:
    """The multiplier for a tensor whose largest magnitude is ``amax``: amax / (6 * 448) in float32, never 0."""
    return (amax.float() / (E2M1_MAX * E4M3_MAX)).clamp(min=_FLOAT32_TINY)


def swizzle_scale(scale: torch.Tensor, rows_per_tile: int = 128) -> torch.Tensor:
    """Block scales [R, C] (one byte each) in FlashInfer's 128x4 or 8x4 layout.

    Rows are padded to ``rows_per_tile`` (128 or 8), columns to 4, with zeros. Returns the padded 2-D shape. With
    C4 padded columns, byte (r, c) stands at flat offset
    ``(r // 128) * 128 * C4 + (c // 4) * 512 + (r % 32) * 16 + ((r % 128) // 32) * 4 + c % 4`` (128x4) or
    ``(r // 8) * 8 * C4 + (c // 4) * 32 + (r % 8) * 4 + c % 4`` (8x4).
    """
    rows, columns = scale.shape
    tiles, quads = -(-rows // rows_per_tile), -(-columns // 4)
    padded = scale.new_zeros(tiles * rows_per_tile, quads * 4, dtype=torch.uint8)
    padded[:rows, :columns] = scale.view(torch.uint8)
    inner = rows_per_tile // 4 if rows_per_tile == 128 else rows_per_tile
    grouped = padded.view(tiles, rows_per_tile // inner, inner, quads, 4).permute(0, 3, 2, 1, 4)
    return grouped.reshape(padded.shape).view(scale.dtype)


def unswizzle_scale(swizzled: torch.Tensor, rows: int, columns: int, rows_per_tile: int = 128) -> torch.Tensor:
    """The [rows, columns] block scales that :func:`swizzle_scale` laid out."""
    padded_rows, padded_columns = swizzled.shape
    inner = rows_per_tile // 4 if rows_per_tile == 128 else rows_per_tile
    grouped = swizzled.view(torch.uint8).view(
        padded_rows // rows_per_tile, padded_columns // 4, inner, rows_per_tile // inner, 4
    )
    linear = grouped.permute(0, 3, 2, 1, 4).reshape(padded_rows, padded_columns)
    return linear[:rows, :columns].contiguous().view(swizzled.dtype)


def shuffle_rows(matrix: torch.Tensor) -> torch.Tensor:
    """Rows in the order of FlashInfer's trtllm kernels: inside each block of 32, new row l takes old row
    ``(l % 8) * 4 + l // 8``. The number of rows must be a multiple of 32."""
    rows = torch.arange(matrix.shape[0], device=matrix.device)
    lane = rows % 32
    return matrix[rows - lane + (lane % 8) * 4 + lane // 8]
