"""NVFP4 decoded byte by byte from its documented layouts, in numpy and float64; it shares no code with the package."""

from typing import Any

import numpy as np
import torch

from sglang.srt.layers.quantization.nvfp4 import Activation, NvFp4Weight

Array = np.ndarray[Any, Any]
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
_FLOAT32_MAX = np.finfo(np.float32).max


def _e4m3(byte: int) -> float:
    exponent, mantissa = byte >> 3 & 15, byte & 7
    magnitude = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return float("nan") if byte & 127 == 127 else -magnitude if byte & 128 else magnitude


E4M3 = np.array([_e4m3(byte) for byte in range(256)])
E4M3_MAX_BYTE = 126


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def scale_offset(r: Array, c: Array, padded_columns: int, rows_per_tile: int) -> Any:
    """Where the scale of row ``r`` and block column ``c`` stands in the flat 128x4 or 8x4 buffer."""
    if rows_per_tile == 8:
        return (r // 8) * 8 * padded_columns + (c // 4) * 32 + (r % 8) * 4 + c % 4
    return (r // 128) * 128 * padded_columns + (c // 4) * 512 + (r % 32) * 16 + (r % 128 // 32) * 4 + c % 4


def swizzled_offsets(rows: int, columns: int, rows_per_tile: int = 128) -> Any:
    r, c = np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij")
    return scale_offset(r, c, round_up(columns, 4), rows_per_tile)


def shuffled_row(old: Array) -> Any:
    """Where trtllm's kernels expect old row ``old``: eight groups of four neighbours become four of eight."""
    lane = old % 32
    return old - lane + lane % 4 * 8 + lane // 4


def codes(packed: Array) -> Array:
    """[R, K / 2] bytes to [R, K] codes, the even column in the low nibble."""
    both = np.empty((packed.shape[0], packed.shape[1] * 2), np.uint8)
    both[:, 0::2], both[:, 1::2] = packed % 16, packed // 16
    return both


def nearest(table: Array, values: Array) -> Array:
    """Index of the entry of an ascending ``table`` nearest to each of ``values`` >= 0; ties to the even index."""
    middle = (table[1:] + table[:-1]) / 2
    low = np.searchsorted(middle, values, side="left")  # a tie stays below
    tie = np.isin(values, middle) & (low % 2 == 1)
    return np.asarray(low + tie)


def quantize(x: torch.Tensor, global_scale_inv: Any) -> tuple[Array, Array]:
    """FlashInfer's exact recipe in float32 for a float32 scale: codes [M, K] and E4M3 bytes [M, K / 16] of finite ``x``
    [M, K]."""
    blocks = x.float().numpy().reshape(x.shape[0], -1, 16)
    factor = global_scale_inv * np.float32(1 / 6)
    scale = nearest(E4M3[: E4M3_MAX_BYTE + 1], (np.abs(blocks).max(-1) * factor).astype(np.float64)).astype(np.uint8)
    with np.errstate(divide="ignore"):
        inverse = np.float32(1) / (E4M3[scale].astype(np.float32) * (np.float32(1) / global_scale_inv))
    scaled = blocks * np.minimum(inverse, _FLOAT32_MAX)[..., None]
    code = nearest(E2M1[:8], np.abs(scaled).astype(np.float64)).astype(np.uint8) | np.signbit(scaled) * np.uint8(8)
    return code.reshape(x.shape), scale


def dequantize(code: Array, scale: Array) -> Array:
    """Exact float64 of codes [R, K] and scale bytes [R, K / 16], without the global scale."""
    return np.asarray(E2M1[code] * np.repeat(E4M3[scale], 16, axis=1))


def product(a: Array, b: Array) -> torch.Tensor:
    """float64 ``a`` [M, K] times the transpose of ``b`` [N, K]."""
    return torch.from_numpy(a) @ torch.from_numpy(b).T


def exact_product(x: torch.Tensor, weight: NvFp4Weight) -> torch.Tensor:
    """float64 [M, N] that a W4A4 or weight-only layer must give before its one rounding."""
    w = dequantize(codes(weight.packed.numpy()), weight.scale.view(torch.uint8).numpy())
    w *= np.repeat(weight.global_scales.double().numpy(), weight.part_sizes)[:, None]
    if weight.activation is Activation.NONE:
        return product(x.double().numpy(), w)
    if weight.activation is Activation.DYNAMIC:
        scale = np.abs(x.float().numpy()).max() / np.float32(2688)
        inverse = np.float32(1) / scale
    else:
        assert weight.input_scale is not None and weight.input_scale_inv is not None
        scale, inverse = weight.input_scale.numpy(), weight.input_scale_inv.numpy()
    a = dequantize(*quantize(x, np.float32(inverse)))
    return product(a, w) * float(scale)


def rounding(exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Half a unit in the last place of ``dtype`` at ``exact``, and a hundredth for float32 alphas on the way."""
    info = torch.finfo(dtype)
    exponent = torch.floor(torch.log2(exact.abs().clamp(min=info.tiny)))
    return torch.exp2(exponent) * info.eps * 0.505


def assert_product(y: torch.Tensor, x: torch.Tensor, weight: NvFp4Weight, bias: torch.Tensor | None = None) -> None:
    """``y`` is the exact product rounded once to the layer's dtype, and once more where a bias was added."""
    assert y.dtype == weight.dtype
    exact = exact_product(x, weight)
    assert y.shape == exact.shape
    allowed = rounding(exact, weight.dtype)
    if bias is not None:
        exact = exact + bias.double()
        allowed = allowed + rounding(exact.abs() + allowed, weight.dtype)
    excess = (y.double() - exact).abs() - allowed
    assert not bool((excess.isnan() | (excess > 0)).any()), (
        f"{int((~(excess <= 0)).sum())} of {excess.numel()} values differ by more than a rounding; relative error "
        f"{float((y.double() - exact).norm() / exact.norm()):.3g}"
    )
