"""An NVFP4 weight and the product with it: fused parts, padding, and which backend multiplies how many rows.

Nothing here knows of checkpoints or of the machine; backends see a padded :class:`NvFp4Weight`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from enum import Enum

import torch
import torch.nn.functional as F
from torch import nn

from sglang.srt.distributed import SINGLE, TensorParallelGroup
from sglang.srt.layers.fusion import Rows, SiluAndMul, Step, Then, count_of
from sglang.srt.layers.quantization.fp4_utils import Fp4GemmBackend, PreparedWeight
from sglang.srt.layers.quantization.nvfp4_utils import BLOCK_SIZE, nvfp4_global_scale
from sglang.srt.utils.progress import progress_of


class Activation(Enum):
    """How the input of a layer is treated: kept (W4A16), quantised with the checkpoint's scale, or with a scale
    computed from each call's input (W4A4)."""

    NONE = "none"
    STATIC = "static"
    DYNAMIC = "dynamic"


@dataclass(frozen=True)
class NvFp4Weight:
    """One linear layer's weight, in the multiply convention: value = e2m1 * e4m3 * global scale of its part.

    Attributes:
        packed: uint8 [N, K / 2].
        scale: float8_e4m3fn [N, K / 16].
        global_scales: float32 [parts].
        part_sizes: rows of each part; they sum to N.
        activation: what happens to the input.
        input_scale, input_scale_inv: float32 scalars (STATIC), the multiplier and what the quantiser takes. Both are
            kept since a checkpoint stores either, and one is not the exact reciprocal of the other.
        dtype: of inputs and outputs.
        pre_quant_scale: float32 [parts, K]; the input of each part is multiplied by it first (NVFP4_AWQ).
        input_ranks: the ranks that hold the columns of one input among them, and so share its scale (DYNAMIC).
    """

    packed: torch.Tensor
    scale: torch.Tensor
    global_scales: torch.Tensor
    part_sizes: tuple[int, ...]
    activation: Activation
    dtype: torch.dtype
    input_scale: torch.Tensor | None = None
    input_scale_inv: torch.Tensor | None = None
    pre_quant_scale: torch.Tensor | None = None
    input_ranks: TensorParallelGroup = SINGLE

    def check(self) -> None:
        """Raises:
        ValueError: an attribute is not what this class says; the text names it.
        """
        rows, blocks, parts = self.packed.shape[0], self.scale.shape[-1], len(self.part_sizes)
        if sum(self.part_sizes) != rows:
            raise ValueError(f"part_sizes: expected a sum of {rows}, got {self.part_sizes}")
        expected: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
            "packed": (torch.uint8, (rows, blocks * BLOCK_SIZE // 2)),
            "scale": (torch.float8_e4m3fn, (rows, blocks)),
            "global_scales": (torch.float32, (parts,)),
        }
        if self.activation is Activation.STATIC:
            expected |= {"input_scale": (torch.float32, ()), "input_scale_inv": (torch.float32, ())}
        if self.pre_quant_scale is not None:
            expected["pre_quant_scale"] = (torch.float32, (parts, self.in_features))
        for name, (dtype, shape) in expected.items():
            value: torch.Tensor | None = getattr(self, name)
            if value is None or value.dtype != dtype or tuple(value.shape) != shape:
                found = "None" if value is None else f"{value.dtype} {list(value.shape)}"
                raise ValueError(f"{name}: expected {dtype} {list(shape)}, got {found}")
            if value.device != self.packed.device:
                raise ValueError(f"{name}: expected on {self.packed.device} like packed, got {value.device}")

    @property
    def out_features(self) -> int:
        return self.scale.shape[0]

    @property
    def in_features(self) -> int:
        return self.scale.shape[1] * BLOCK_SIZE

    @property
    def product(self) -> str:
        """What of this weight the speed of a product depends on: sizes, types, and what has to be multiplied apart.

        "N=96 K=64 static bfloat16 joined=96 apart=64+32": output columns of the products that a backend with a global
        scale per column makes, and one without.
        """
        joined, apart = ("+".join(str(part.out_features) for part in self.segments(each)) for each in (True, False))
        cut = "" if joined == apart == str(self.out_features) else f" joined={joined} apart={apart}"
        dtype = str(self.dtype).removeprefix("torch.")
        return f"N={self.out_features} K={self.in_features} {self.activation.value} {dtype}{cut}"

    def column_scale(self) -> torch.Tensor:
        """The global scale of every output column: float32 [N]."""
        sizes = torch.tensor(self.part_sizes, device=self.global_scales.device)
        return torch.repeat_interleave(self.global_scales, sizes)

    def activation_scales(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Multiplier and reciprocal for quantising ``x``: float32 scalars on its device."""
        if self.activation is Activation.DYNAMIC:
            scale = nvfp4_global_scale(self.input_ranks.all_reduce_max(x.abs().amax()))
            return scale, 1.0 / scale
        assert self.input_scale is not None and self.input_scale_inv is not None
        return self.input_scale, self.input_scale_inv

    def without_codes(self) -> NvFp4Weight:
        """Everything but the codes and block scales, for backends that keep those in a layout of their own."""
        # Not views: those would keep the whole storage.
        return replace(self, packed=self.packed[:0].clone(), scale=self.scale[:0].clone())

    def segments(self, per_column_scale: bool) -> list[NvFp4Weight]:
        """Runs of neighbouring parts that one product can take: they share their ``pre_quant_scale`` and, unless the
        backend takes one per column, their global scale (of which the result then has a single one)."""
        scales = self.global_scales.tolist()
        pre = self.pre_quant_scale

        def joined(a: int, b: int) -> bool:
            same_input = pre is None or torch.equal(pre[a], pre[b])
            return same_input and (per_column_scale or scales[a] == scales[b])

        result: list[NvFp4Weight] = []
        row = first = 0
        for index in range(len(scales)):
            if index + 1 < len(scales) and joined(index, index + 1):
                continue
            sizes, parts = self.part_sizes[first : index + 1], slice(first, index + 1)
            rows = slice(row, row + sum(sizes))
            global_scales = self.global_scales[parts]
            if not per_column_scale:
                sizes, global_scales = (sum(sizes),), global_scales[:1]
            result.append(
                replace(
                    self,
                    packed=self.packed[rows],
                    scale=self.scale[rows],
                    global_scales=global_scales,
                    part_sizes=sizes,
                    pre_quant_scale=None if pre is None else pre[first : first + 1],
                )
            )
            row, first = rows.stop, index + 1
        return result

    def padded(self, out_multiple: int, in_multiple: int) -> NvFp4Weight:
        """Zero rows and columns appended up to multiples of these; the last part takes the rows."""
        rows = -self.out_features % out_multiple
        columns = -self.in_features % in_multiple
        if not rows and not columns:
            return self
        packed = F.pad(self.packed, (0, columns // 2, 0, rows))
        scale = F.pad(self.scale.view(torch.uint8), (0, columns // BLOCK_SIZE, 0, rows)).view(torch.float8_e4m3fn)
        sizes = (*self.part_sizes[:-1], self.part_sizes[-1] + rows)
        return replace(self, packed=packed, scale=scale, part_sizes=sizes)


@dataclass(frozen=True)
class Segment:
    """One product: a prepared weight, its output columns, and what multiplies its input (float32 [1, K] or None)."""

    prepared: PreparedWeight
    out_features: int
    pre_quant_scale: torch.Tensor | None


class NvFp4Linear:
    """A weight ready to multiply: cut into what its backends take, padded, in the layout that they share.

    Args:
        weight: the layer's.
        by_rows: ``by_rows[i]`` multiplies inputs of more than 2^(i-1) and at most 2^i rows, the last one those of more
            rows too; so a single one multiplies everything.

    Raises:
        ValueError: an attribute of ``weight`` is not what its class says, or the backends read different layouts.
    """

    def __init__(self, weight: NvFp4Weight, *by_rows: Fp4GemmBackend) -> None:
        weight.check()
        self.backend = backend = by_rows[0]
        self.product, self.activation = weight.product, weight.activation
        self.in_features, self.out_features, self.dtype = weight.in_features, weight.out_features, weight.dtype
        self.device = weight.packed.device
        self.segments: list[Segment] = []
        for part in weight.segments(backend.per_column_scale):
            prepared = backend.prepare(part.padded(backend.out_multiple, backend.in_multiple))
            self.segments.append(Segment(prepared, part.out_features, part.pre_quant_scale))
        self.in_padding = -self.in_features % backend.in_multiple
        self._by_rows = tuple((backend, self._segments_for(backend)) for backend in by_rows)

    def shared_with(self, *by_rows: Fp4GemmBackend) -> NvFp4Linear:
        """The same tensors, multiplied by other backends of the same layout.

        Raises:
            ValueError: a backend reads another layout.
        """
        other = copy(self)
        other.backend = by_rows[0]
        other.segments = self._segments_for(by_rows[0])
        other._by_rows = tuple((backend, self._segments_for(backend)) for backend in by_rows)
        return other

    def _segments_for(self, backend: Fp4GemmBackend) -> list[Segment]:
        if backend.name == self.backend.name:
            return self.segments
        segments = []
        for segment in self.segments:
            prepared = segment.prepared.shared_with(backend)
            if prepared is None or backend.per_column_scale != self.backend.per_column_scale:
                raise ValueError(f"FP4 GEMM backends {self.backend.name} and {backend.name} have different layouts")
            segments.append(replace(segment, prepared=prepared))
        return segments

    @property
    def choices(self) -> dict[str, str]:
        """What multiplies how many rows: {"1-64": "w4a16", "65-": "cutlass"}."""
        result: dict[str, str] = {}
        first, labels = 1, [backend.label for backend, _ in self._by_rows]
        for index, label in enumerate(labels):
            if index + 1 == len(labels):
                result[f"{first}-"] = label
            elif labels[index + 1] != label:
                result[f"{first}-{1 << index}"] = label
                first = (1 << index) + 1
        return result

    @property
    def nbytes(self) -> int:
        return sum(segment.prepared.nbytes for segment in self.segments)

    @property
    def rows_share_a_scale(self) -> bool:
        """Whether what a row of the input gets depends on the other rows."""
        return self.activation is Activation.DYNAMIC and not self.backend.keeps_activations

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """``x`` [..., K] of the layer's dtype, any strides, M from 0 up, to [..., N].

        Raises:
            ValueError: K or dtype of ``x``, or N of ``bias``, are not the layer's.
        """
        if x.shape[-1] != self.in_features or x.dtype != self.dtype:
            raise ValueError(f"x: expected [..., {self.in_features}] {self.dtype}, got {list(x.shape)} {x.dtype}")
        if bias is not None and bias.shape != (self.out_features,):
            raise ValueError(f"bias: expected [{self.out_features}], got {list(bias.shape)}")
        rows = x if x.dim() == 2 else x.reshape(-1, self.in_features)
        shape = (*x.shape[:-1], self.out_features)
        if rows.shape[0] == 0:
            return x.new_empty(shape)
        backend, segments = self._choice(rows.shape[0])
        outputs, start = [], 0
        for segment in segments:
            size = segment.out_features
            out_padding = -size % backend.out_multiple
            part = None if bias is None else bias[start : start + size]
            if part is not None and out_padding:
                part = F.pad(part, (0, out_padding))
            y = backend.apply(self._input_of(segment, rows), segment.prepared, part)
            outputs.append(y[:, :size] if out_padding else y)
            start += size
        return (outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)).reshape(shape)

    def fuses(self, step: Step, rows: int) -> bool:
        """Whether :meth:`fused` takes ``step`` together with a product of ``rows`` rows."""
        if step is not SiluAndMul and self.dtype != torch.bfloat16:
            return False  # without the division, sums times weights may be too large for float16
        backend, segments = self._choice(rows)
        whole = len(segments) == 1 and segments[0].pre_quant_scale is None
        padded = self.in_padding or self.out_features % backend.out_multiple
        return whole and not padded and backend.fuses(segments[0].prepared, step, rows)

    def fused(self, x: Rows, bias: torch.Tensor | None, then: Then = None) -> Rows:
        """See :meth:`LinearMethodBase.apply_fused`."""
        backend, segments = self._choice(count_of(x))
        return backend.apply_fused(x, segments[0].prepared, bias, then)

    def _choice(self, rows: int) -> tuple[Fp4GemmBackend, list[Segment]]:
        if len(self._by_rows) == 1:
            return self._by_rows[0]
        # By the shape alone: a captured graph or compiled code holds one choice.
        return self._by_rows[min((rows - 1).bit_length(), len(self._by_rows) - 1)]

    def _input_of(self, segment: Segment, rows: torch.Tensor) -> torch.Tensor:
        if segment.pre_quant_scale is not None:
            rows = (rows.float() * segment.pre_quant_scale).to(self.dtype)
        return F.pad(rows, (0, self.in_padding)) if self.in_padding else rows


# ------------------------------------------------------------------------------------------------ of a loaded model
def linears_of(model: nn.Module) -> list[NvFp4Linear]:
    """The NVFP4 products of a loaded model, in the order of its layers."""
    found = (getattr(module, "nvfp4", None) for module in model.modules())
    return [linear for linear in found if isinstance(linear, NvFp4Linear)]


def warm_up_fp4_gemm(linears: Iterable[NvFp4Linear], rows: Sequence[int], *, show_progress: bool = True) -> int:
    """Multiply once with every distinct product for every number of rows, so that no kernel is compiled, loaded or
    planned later: to be called with the sizes of all CUDA graphs before the first is captured, on every rank.

    Returns:
        The number of distinct products.
    """
    distinct = {(linear.product, str(linear.choices)): linear for linear in linears}
    with torch.no_grad():
        for linear in progress_of(distinct.values(), "Warming up NVFP4 products", show=show_progress):
            for count in sorted(set(rows), reverse=True):
                linear(torch.ones(count, linear.in_features, dtype=linear.dtype, device=linear.device))
    return len(distinct)
