"""Holding NVFP4 GEMM backends against the exact product: layers, inputs, what is right, and how far off is right too.

The reference is a float64 product of the exactly dequantised weight and, for W4A4, of the exactly quantised input (of
the input as it is, for a backend that keeps activations). It shares no code with any backend, ``torch`` included.
Everything runs on the device of its operands.

How far a right backend may be off, with ``u`` half a unit in the last place of the output's dtype (2^-8 for bfloat16,
2^-11 for float16, 2^-24 for float32):

* Rounding the output, and once more after adding a bias, costs at most ``u |y|`` per element. Errors of many elements
  are spread evenly over the half unit, so together they are at most ``u / sqrt(3)`` of the norm (2.3e-3, 2.8e-4,
  3.4e-8), a little more for few elements.
* Sums are in float32: the rounding errors of K additions are about ``0.3 * 2^-24 |a| |w|`` together, in whatever order,
  |a| and |w| being the norms of the row of the input and of the weight. ``2^-23 |a| |w|`` is allowed for the norm,
  ``2^-21 |a| |w|`` for one element (and ``u`` of a typical element, which no reader of the output could see).
* Quantisers on a device use approximate reciprocals, which may move a code to its neighbour where the value lies
  between the two. Most rows have inputs that NVFP4 represents (rounded to the dtype, they are further than 3 % from
  every boundary), so codes are those of the exact quantiser and none of this is allowed. Rows with other inputs are
  for the quantiser: there one code in a hundred may be one step off, which is about 3 % of the norm; in one row a whole
  block, or one code in a hundred if that is more, by the largest step.

Errors are taken after dividing each element by its typical size ``sqrt((|a| |w|)^2 / K + bias^2)``: no row of a batch,
output or fused part can hide behind a larger one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, log2, sqrt
from typing import NamedTuple

import torch

from sglang.srt.layers.quantization.nvfp4 import Activation, NvFp4Linear, NvFp4Weight
from sglang.srt.layers.quantization.nvfp4_utils import (
    BLOCK_SIZE,
    E2M1_MAX,
    E4M3_MAX,
    dequantize_nvfp4,
    pack,
    quantize_nvfp4,
    unpack,
)

FLIPPED_CODES = 0.01
_LARGEST_SCALE = 0x7E  # 448
# The step to the farther neighbour of each magnitude code.
_STEPS = (0.5, 0.5, 0.5, 0.5, 1.0, 1.0, 2.0, 2.0)
# Half way between two values of bfloat16, and then of float16: a scale that is rounded to either shows.
_MANTISSA = 1 + 2**-8 + 2**-11
_CHUNK = 1 << 24  # elements of a weight that are float64 at a time


class _Range(NamedTuple):
    """Global scales of fused parts, scale of static inputs, and about the largest input of weight-only layers."""

    global_scales: tuple[float, ...]
    input_scale: float
    largest_input: float


# Elsewhere inputs are larger than float16 holds; there the outputs fit, and sums before the global scale do not.
_WIDE = _Range((1.0, 1e-9, 3e-3), 41.0, 1e5)
_RANGES = {torch.float16: _Range((3e-5, 1e-7, 1e-6), 0.0123, 1e3)}


@dataclass(frozen=True)
class Piece:
    """Rows of a weight, all of one part: ``values`` float64 [rows, K] and the norm of each row."""

    part: int
    rows: slice
    values: torch.Tensor
    norms: torch.Tensor


@dataclass(frozen=True)
class Layer:
    """A layer to verify.

    Attributes:
        on_grid: inputs are values that NVFP4 represents, so that every quantiser finds the same codes.
        activations_kept: the input of a W4A4 layer is not quantised (``Fp4GemmBackend.keeps_activations``).
    """

    name: str
    weight: NvFp4Weight
    bias: torch.Tensor | None
    on_grid: bool
    activations_kept: bool = False

    @property
    def activation(self) -> Activation:
        """What happens to the input in the exact product."""
        return Activation.NONE if self.activations_kept else self.weight.activation

    @property
    def kind(self) -> str:
        """What is multiplied, "W4A4 static, 3 parts, bias"."""
        weight = self.weight
        words = ["W4A16" if weight.activation is Activation.NONE else f"W4A4 {weight.activation.value}"]
        words += ["activations kept"] if weight.activation is not self.activation else []
        words += [f"{len(weight.part_sizes)} parts"] if len(weight.part_sizes) > 1 else []
        words += ["bias"] if self.bias is not None else []
        words += ["any input"] if weight.activation is not Activation.NONE and not self.on_grid else []
        return ", ".join(words)

    def pieces(self) -> Iterable[Piece]:
        """The exact weight, at most 2^24 elements at a time; kept if that is all of it."""
        small = self.weight.out_features * self.weight.in_features <= _CHUNK
        return self._kept_pieces if small else self._pieces()

    @cached_property
    def _kept_pieces(self) -> list[Piece]:
        return list(self._pieces())

    def _pieces(self) -> Iterator[Piece]:
        weight, end = self.weight, 0
        step = max(1, _CHUNK // weight.in_features)
        for part, size in enumerate(weight.part_sizes):
            first, end = end, end + size
            for start in range(first, end, step):
                rows = slice(start, min(start + step, end))
                values = dequantize_nvfp4(weight.packed[rows], weight.scale[rows], 1.0).double()
                values *= weight.global_scales[part].double()
                yield Piece(part, rows, values, values.norm(dim=1))


# ------------------------------------------------------------------------------------------------ layers and inputs
def random_weight(
    parts: tuple[int, ...], columns: int, activation: Activation, dtype: torch.dtype, generator: torch.Generator
) -> NvFp4Weight:
    """Random codes, and block scales that find faults: of eight neighbouring rows five have any, then one has only
    subnormal ones, one only 448 and one only 0; parts have global scales from 1 down to 1e-9."""
    device, rows = generator.device, sum(parts)
    packed = torch.randint(0, 256, (rows, columns // 2), generator=generator, dtype=torch.uint8, device=device)
    shape = (rows, columns // BLOCK_SIZE)
    scale = torch.randint(0, _LARGEST_SCALE + 1, shape, generator=generator, dtype=torch.uint8, device=device)
    scale[5::8] = scale[5::8] % 7 + 1
    scale[6::8] = _LARGEST_SCALE
    scale[7::8] = 0
    global_scales = _RANGES.get(dtype, _WIDE).global_scales[: len(parts)]
    input_scale = torch.tensor(_RANGES.get(dtype, _WIDE).input_scale * _MANTISSA, device=device)
    static = activation is Activation.STATIC
    return NvFp4Weight(
        packed=packed,
        scale=scale.view(torch.float8_e4m3fn),
        global_scales=torch.tensor(global_scales, device=device) * _MANTISSA,
        part_sizes=parts,
        activation=activation,
        dtype=dtype,
        input_scale=input_scale if static else None,
        input_scale_inv=1.0 / input_scale if static else None,
    )


def random_layers(rows: int, columns: int, dtype: torch.dtype, generator: torch.Generator) -> Iterator[Layer]:
    """The kinds of layer that differ for a backend, all of weight [``rows``, ``columns``]."""
    quarter = rows // 4
    fused = (rows - 2 * quarter, quarter, quarter) if quarter else (rows,)
    halves = fused if rows % 2 else (rows // 2, rows // 2)  # as gate and up are
    for activation, parts, with_bias, on_grid in (
        (Activation.STATIC, fused, False, True),
        (Activation.DYNAMIC, (rows,), True, True),
        (Activation.STATIC, (rows,), True, False),
        (Activation.NONE, halves, True, False),
    ):
        weight = random_weight(parts, columns, activation, dtype, generator)
        bias = None
        if with_bias:
            # As large as outputs are, so that neither hides the other.
            limits = _RANGES.get(dtype, _WIDE)
            typical_input = limits.largest_input / 10 if activation is Activation.NONE else 80 * limits.input_scale
            norms = dequantize_nvfp4(weight.packed, weight.scale, 1.0).norm(dim=1)
            typical = norms * weight.column_scale() * typical_input
            noise = torch.randn(rows, generator=generator, device=generator.device)
            bias = (noise * typical.clamp(max=torch.finfo(dtype).max / 100)).to(dtype)
        yield Layer(f"{rows}x{columns}", weight, bias, on_grid)


def random_input(layer: Layer, rows: int, generator: torch.Generator, halvings: int = 0) -> torch.Tensor:
    """[``rows``, K] for ``layer``, smaller by 2^``halvings`` than its scales allow.

    On the grid: codes under block scales from the smallest to the largest, every block with a 6, one in sixteen zero.
    Else normal, rows of very different size, the largest beyond what a static scale represents.
    """
    weight, device = layer.weight, generator.device
    columns = weight.in_features
    scale = weight.input_scale
    if scale is None:
        scale = torch.tensor(_RANGES.get(weight.dtype, _WIDE).input_scale, device=device)
    if not layer.on_grid:
        largest = _RANGES.get(weight.dtype, _WIDE).largest_input
        if weight.activation is not Activation.NONE:
            largest = float(scale) * E2M1_MAX * E4M3_MAX / 4
        size = 10 ** (3.3 * torch.rand(rows, 1, generator=generator, device=device) - 3)
        size[:1] = 2.0
        x = torch.randn(rows, columns, generator=generator, device=device) * size * largest
        return (x * 2.0**-halvings).to(weight.dtype)
    blocks = columns // BLOCK_SIZE
    codes = torch.randint(0, 16, (rows, blocks, BLOCK_SIZE), generator=generator, dtype=torch.uint8, device=device)
    block = torch.arange(blocks, device=device)
    codes[:, block, block % BLOCK_SIZE] |= 7
    # Half of the smallest scale must not be lost in the input's own dtype.
    values = torch.arange(_LARGEST_SCALE + 1, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn).float()
    finfo = torch.finfo(weight.dtype)
    lowest = int((values * scale < 16 * finfo.smallest_normal * finfo.eps).sum())
    highest = max(_LARGEST_SCALE - 8 * halvings, lowest)
    shape = (rows, blocks)
    scales = torch.randint(lowest, highest + 1, shape, generator=generator, dtype=torch.uint8, device=device)
    scales[torch.rand(shape, generator=generator, device=device) < 1 / 16] = 0
    scales[:1, :1] = highest
    x = dequantize_nvfp4(pack(codes.flatten(1)), scales.view(torch.float8_e4m3fn), 1.0) * scale
    return x.to(weight.dtype)


# ------------------------------------------------------------------------------------------------------- the truth
@dataclass(frozen=True)
class Exact:
    """The exact result of a layer on one batch, float64 [M, N], and what the module says of errors.

    Attributes:
        limit: most that each element may be off.
        size: typical size of each element.
        bound: largest relative error in the norm, elements divided by ``size``.
    """

    y: torch.Tensor
    limit: torch.Tensor
    size: torch.Tensor
    bound: float

    def error(self, y: torch.Tensor) -> float:
        """Relative error of ``y`` in the norm, elements divided by their typical size."""
        norm = (self.y / self.size).norm().clamp(min=torch.finfo(torch.float64).tiny)
        return float(((y.double() - self.y) / self.size).norm() / norm)


class _Input(NamedTuple):
    """What a part multiplies, float64 [M, K]; per row its norm, and how far codes that are one step off may move it:
    the norm of that for one code in a hundred anywhere, and for the largest steps. All [M, 1]."""

    values: torch.Tensor
    norm: torch.Tensor
    moved: torch.Tensor
    moved_most: torch.Tensor


def _input_of_part(layer: Layer, part: int, x: torch.Tensor) -> _Input:
    weight = layer.weight
    if weight.pre_quant_scale is not None:
        x = (x.float() * weight.pre_quant_scale[part]).to(weight.dtype)
    none = torch.zeros(x.shape[0], 1, dtype=torch.float64, device=x.device)
    if layer.activation is Activation.NONE:
        return _Input(x.double(), x.double().norm(dim=1, keepdim=True), none, none)
    scale, inverse = weight.activation_scales(x)
    packed, block_scales = quantize_nvfp4(x, inverse)
    values = dequantize_nvfp4(packed, block_scales, 1.0).double() * scale.double()
    norm = values.norm(dim=1, keepdim=True)
    if layer.on_grid:
        return _Input(values, norm, none, none)
    steps = torch.tensor(_STEPS, dtype=torch.float64, device=x.device)[(unpack(packed) & 7).long()]
    steps *= (block_scales.double() * scale.double()).repeat_interleave(BLOCK_SIZE, dim=1)
    # A block scale that falls on its neighbour moves a whole block.
    most = max(BLOCK_SIZE, ceil(FLIPPED_CODES * x.shape[1]))
    moved = sqrt(FLIPPED_CODES) * steps.norm(dim=1, keepdim=True)
    return _Input(values, norm, moved, sqrt(most) * steps.amax(dim=1, keepdim=True))


def exact_product(layer: Layer, x: torch.Tensor) -> Exact:
    """The exact result for ``x`` [M, K] with M > 0."""
    weight, rows, columns = layer.weight, x.shape[0], layer.weight.in_features
    product = torch.empty(rows, weight.out_features, dtype=torch.float64, device=x.device)
    norms, moved, moved_most = (torch.empty_like(product) for _ in range(3))
    inputs: dict[int, _Input] = {}
    for piece in layer.pieces():
        part = piece.part if weight.pre_quant_scale is not None else 0  # else they share an input
        if part not in inputs:
            inputs[part] = _input_of_part(layer, part, x)
        a, columns_of = inputs[part], (slice(None), piece.rows)
        product[columns_of] = a.values @ piece.values.T
        norms[columns_of] = a.norm * piece.norms
        moved[columns_of] = a.moved * piece.norms / sqrt(columns)
        moved_most[columns_of] = a.moved_most * piece.norms

    finfo = torch.finfo(weight.dtype)
    half_unit, floor = finfo.eps / 2, finfo.smallest_normal
    bias = torch.zeros(()).double() if layer.bias is None else layer.bias.double()
    y, typical = product + bias.to(product.device), norms / sqrt(columns)
    size_of = (typical**2 + bias.to(product.device) ** 2 + floor**2).sqrt()
    # What is rounded, one or two times; below the smallest normal number the steps no longer shrink.
    rounded = [y] if layer.bias is None else [product, y]
    magnitudes = [torch.where(value == 0, 0.0, value.abs().clamp(min=floor)) for value in rounded]
    limit = half_unit * (sum(magnitudes) + typical) + 2.0**-21 * norms + moved_most
    share = half_unit * min(1.0, (1 + 3 / sqrt(y.numel())) / sqrt(3))
    squares = sum((share * magnitude / size_of).norm() ** 2 for magnitude in magnitudes)
    squares += (moved / size_of).norm() ** 2
    allowed = float(squares.sqrt() + 2.0**-23 * (norms / size_of).norm())
    norm = float((y / size_of).norm())
    return Exact(y, limit, size_of, allowed / norm if norm else 0.0)


def make_batch(layer: Layer, rows: int, seed: int) -> tuple[torch.Tensor, Exact]:
    """An input of ``rows`` > 0 rows whose exact result the layer's dtype can hold, and that result."""
    halvings = 0
    while True:
        generator = torch.Generator(layer.weight.packed.device).manual_seed(seed)
        x = random_input(layer, rows, generator, halvings)
        exact = exact_product(layer, x)
        excess = float(exact.y.abs().max()) / (torch.finfo(layer.weight.dtype).max / 4)
        if excess <= 1 or halvings > 16:
            return x, exact
        halvings += max(1, ceil(log2(excess)))


# ------------------------------------------------------------------------------------------------------ the verdict
@dataclass(frozen=True)
class Finding:
    """What a backend computed. Errors are None where there was nothing to compare."""

    verdict: str
    error: float | None = None
    max_abs: float | None = None

    @property
    def ok(self) -> bool:
        return self.verdict == "ok"


def _compare(y: torch.Tensor, exact: Exact) -> str:
    """ "ok", or the first thing that is wrong with ``y``."""
    bad = int((~y.isfinite()).sum())
    if bad:
        return f"{bad} of {y.numel()} outputs are NaN or infinite"
    error, wrong = exact.error(y), (y.double() - exact.y).abs() > exact.limit
    if error <= exact.bound and not bool(wrong.any()):
        return "ok"
    if not bool(y.any()):
        return "every output is zero"
    if error > exact.bound:
        return f"error {error:.1e} exceeds {exact.bound:.1e}"
    row, column = wrong.nonzero()[0].tolist()
    return (
        f"{int(wrong.sum())} of {y.numel()} outputs are wrong; [{row}, {column}] is {float(y[row, column]):.6g}, "
        f"exactly {float(exact.y[row, column]):.6g}"
    )


def check_layer(linear: NvFp4Linear, layer: Layer, x: torch.Tensor, exact: Exact | None) -> Finding:
    """Multiply and judge: shape and dtype, the result, that a second call gives the same bits, and that the last row
    alone is right (unless its scale depends on the others).

    Args:
        exact: None for a batch of 0 rows.

    Raises:
        Exception: whatever the backend raises.
    """
    y = linear(x, layer.bias)
    expected = (x.shape[0], layer.weight.out_features)
    if y.shape != expected or y.dtype != layer.weight.dtype:
        return Finding(f"the output is {y.dtype} {list(y.shape)}, not {layer.weight.dtype} {list(expected)}")
    if exact is None:
        return Finding("ok")
    finding = Finding(_compare(y, exact), exact.error(y), float((y.double() - exact.y).abs().max()))
    if finding.ok and not torch.equal(_bits(y), _bits(linear(x, layer.bias))):
        return replace(finding, verdict="two calls with the same input differ")
    if finding.ok and x.shape[0] > 1 and layer.activation is not Activation.DYNAMIC:
        last = Exact(exact.y[-1:], exact.limit[-1:], exact.size[-1:], float("inf"))
        alone = _compare(linear(x[-1:], layer.bias), last)
        if alone != "ok":
            return replace(finding, verdict=f"the last row alone: {alone}")
    return finding


def _bits(y: torch.Tensor) -> torch.Tensor:
    return y.contiguous().view(torch.uint8)


def dense_weight(layer: Layer) -> torch.Tensor:
    """The weight [N, K] in the layer's dtype, which ``F.linear`` would take instead."""
    weight = layer.weight
    values = dequantize_nvfp4(weight.packed, weight.scale, 1.0)
    return values.mul_(weight.column_scale().unsqueeze(1)).to(weight.dtype)


def empty_input(layer: Layer) -> torch.Tensor:
    return torch.empty(0, layer.weight.in_features, dtype=layer.weight.dtype, device=layer.weight.packed.device)
