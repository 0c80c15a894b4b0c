"""NVFP4 linear layers: the one place that knows parameters, fused parts, padding and tensor-parallel shards.

Checkpoint dialects are adapters of names (:class:`TensorNames`); backends see a padded :class:`NvFp4Weight`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from sglang.srt.distributed import SINGLE, TensorParallelGroup
from sglang.srt.errors import CheckpointError
from sglang.srt.layers.quantization.base_config import LinearMethodBase, register_weight
from sglang.srt.layers.quantization.fp4_utils import Fp4GemmBackend, PreparedWeight, Target, backend_for_layer
from sglang.srt.layers.quantization.nvfp4_utils import BLOCK_SIZE, nvfp4_global_scale

_FLOAT32 = torch.finfo(torch.float32)


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

    @property
    def out_features(self) -> int:
        return self.scale.shape[0]

    @property
    def in_features(self) -> int:
        return self.scale.shape[1] * BLOCK_SIZE

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
    """A weight ready to multiply: cut into what its backend takes, padded, in the backend's layout."""

    def __init__(self, weight: NvFp4Weight, backend: Fp4GemmBackend) -> None:
        weight.check()
        self.backend = backend
        self.in_features, self.out_features, self.dtype = weight.in_features, weight.out_features, weight.dtype
        self.segments: list[Segment] = []
        for part in weight.segments(backend.per_column_scale):
            prepared = backend.prepare(part.padded(backend.out_multiple, backend.in_multiple))
            self.segments.append(Segment(prepared, part.out_features, part.pre_quant_scale))
        self.in_padding = -self.in_features % backend.in_multiple

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """``x`` [..., K] of the layer's dtype, any strides, M from 0 up, to [..., N].

        Raises:
            ValueError: K or dtype of ``x``, or N of ``bias``, are not the layer's.
        """
        if x.shape[-1] != self.in_features or x.dtype != self.dtype:
            raise ValueError(f"x: expected [..., {self.in_features}] {self.dtype}, got {list(x.shape)} {x.dtype}")
        if bias is not None and bias.shape != (self.out_features,):
            raise ValueError(f"bias: expected [{self.out_features}], got {list(bias.shape)}")
        rows = x.reshape(-1, self.in_features)
        shape = (*x.shape[:-1], self.out_features)
        if rows.shape[0] == 0:
            return x.new_empty(shape)
        outputs, start = [], 0
        for segment in self.segments:
            size = segment.out_features
            out_padding = -size % self.backend.out_multiple
            part = None if bias is None else F.pad(bias[start : start + size], (0, out_padding))
            y = self.backend.apply(self._input_of(segment, rows), segment.prepared, part)
            outputs.append(y[:, :size] if out_padding else y)
            start += size
        return (outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)).reshape(shape)

    def _input_of(self, segment: Segment, rows: torch.Tensor) -> torch.Tensor:
        if segment.pre_quant_scale is not None:
            rows = (rows.float() * segment.pre_quant_scale).to(self.dtype)
        return F.pad(rows, (0, self.in_padding)) if self.in_padding else rows


# ----------------------------------------------------------------------------------------------- loading from files
def check_block_scales(loaded: torch.Tensor) -> str | None:
    """What is wrong with E4M3 block scales: NaN (0x7F, 0xFF) or negative bytes."""
    if loaded.element_size() != 1:
        return f"expected float8_e4m3fn block scales, found {loaded.dtype}"
    raw = loaded.view(torch.uint8)
    bad = raw >= 0x7F
    if not bool(bad.any()):
        return None
    index = bad.nonzero()[0].tolist()
    value = int(raw[tuple(index)])
    return f"block scale {index} is 0x{value:02X}, which is {'NaN' if value & 0x7F == 0x7F else 'negative'}"


def check_global_scale(loaded: torch.Tensor) -> str | None:
    """What is wrong with a global scale: it must be a positive, finite, normal float32 whose reciprocal is one too."""
    for value in loaded.float().flatten().tolist():
        if not (_FLOAT32.tiny <= value <= 1.0 / _FLOAT32.tiny):
            return f"a global scale must be positive, finite and not denormal, found {value}"
    return None


def check_pre_quant_scale(loaded: torch.Tensor) -> str | None:
    """What is wrong with the factors on a layer's input: they must be finite."""
    return None if bool(loaded.float().isfinite().all()) else "pre_quant_scale holds NaN or infinity"


@dataclass(frozen=True)
class TensorNames:
    """How a checkpoint dialect calls the tensors of an NVFP4 layer.

    ``reciprocal``: global scales are divisors. ``pre_quant_scale``: factors on the input, where layers may have them.
    """

    packed: str
    scale: str
    global_scale: str
    input_scale: str
    reciprocal: bool = False
    pre_quant_scale: str | None = None


MODELOPT_NAMES = TensorNames("weight", "weight_scale", "weight_scale_2", "input_scale")
MODELOPT_AWQ_NAMES = replace(MODELOPT_NAMES, pre_quant_scale="pre_quant_scale")


def check_columns(layer: nn.Module, input_size_per_partition: int, input_size: int) -> None:
    """Raise CheckpointError unless K, or this rank's piece of it, is a multiple of 16."""
    if input_size_per_partition % BLOCK_SIZE == 0:
        return
    name = str(getattr(layer, "prefix", "") or type(layer).__name__)
    rank = f" per rank (K={input_size} in all)" if input_size != input_size_per_partition else ""
    raise CheckpointError(
        f"layer {name}: NVFP4 needs K to be a multiple of {BLOCK_SIZE}, it is {input_size_per_partition}{rank}; "
        + ("use a smaller --tp-size" if rank else "exclude the layer from quantisation")
    )


def install(layer: nn.Module, weight: NvFp4Weight) -> None:
    """Choose the backend for ``weight`` and make it what ``layer`` multiplies with."""
    name = str(getattr(layer, "prefix", "") or type(layer).__name__)
    if getattr(layer, "input_is_sharded", False):
        weight = replace(weight, input_ranks=layer.tp)  # type: ignore[arg-type]
    target = Target.current(weight.packed.device).for_layer(
        weight.in_features, weight.out_features, weight.activation is Activation.NONE, weight.dtype
    )
    layer.nvfp4 = NvFp4Linear(weight, backend_for_layer(target, name))  # type: ignore[assignment]


class NvFp4LinearMethodBase(LinearMethodBase):
    """A layer that multiplies with what :func:`install` put into it."""

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        linear: NvFp4Linear = layer.nvfp4  # type: ignore[assignment]
        return linear(x, bias)

    def weight_bytes(self, layer: nn.Module) -> int:
        linear: NvFp4Linear | None = getattr(layer, "nvfp4", None)
        prepared = sum(segment.prepared.nbytes for segment in linear.segments) if linear else 0
        return prepared + super().weight_bytes(layer)


class NvFp4LinearMethod(NvFp4LinearMethodBase):
    """NVFP4 weights read from a checkpoint.

    Args:
        names: the dialect.
        activation: NONE for a weight-only layer, whose ``input_scale`` tensor, if stored, is not read.
    """

    def __init__(self, names: TensorNames = MODELOPT_NAMES, activation: Activation = Activation.STATIC) -> None:
        self.names = names
        self.activation = activation
        if activation is not Activation.STATIC:
            self.unused_tensors = frozenset({names.input_scale})

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Registers packed weight [N, K / 2], block scales [N, K / 16] and one global scale (and input scale) per part.

        Raises:
            CheckpointError: K, or this rank's piece of it, is not a multiple of 16.
        """
        check_columns(layer, input_size_per_partition, input_size)
        rows, parts = sum(output_partition_sizes), len(output_partition_sizes)
        # Fresh memory is poisoned: a scale that nobody writes is caught below, and would be NaN if it were not.
        packed = torch.empty(rows, input_size_per_partition // 2, dtype=torch.uint8)
        scale = torch.full((rows, input_size_per_partition // BLOCK_SIZE), 0x7F, dtype=torch.uint8)
        per_part = {self.names.global_scale: check_global_scale}
        if self.activation is Activation.STATIC:
            per_part[self.names.input_scale] = check_global_scale
        attrs = extra_weight_attrs
        register_weight(layer, self.names.packed, packed, output_dim=0, input_dim=1, **attrs)
        e4m3 = scale.view(torch.float8_e4m3fn)
        register_weight(layer, self.names.scale, e4m3, output_dim=0, input_dim=1, check=check_block_scales, **attrs)
        for key, check in per_part.items():
            register_weight(layer, key, torch.full((parts,), float("nan"), dtype=torch.float32), check=check, **attrs)
        if self.names.pre_quant_scale:  # exporters fold it into the layer before, where there is one
            ones = torch.ones(parts, input_size_per_partition, dtype=torch.float32)
            check_pre = check_pre_quant_scale
            register_weight(
                layer, self.names.pre_quant_scale, ones, input_dim=1, optional=True, check=check_pre, **attrs
            )
        layer.nvfp4_part_sizes = tuple(output_partition_sizes)  # type: ignore[assignment]
        layer.nvfp4_dtype = params_dtype  # type: ignore[assignment]

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Replaces the parameters by the backend's layout.

        Raises:
            CheckpointError: a scale was not written or has an illegal value.
            StartupError: the requested backend can't take the layer.
        """
        names = self.names
        name = str(getattr(layer, "prefix", "") or type(layer).__name__)
        stored = {key: getattr(layer, key).data for key in (names.packed, names.scale, names.global_scale)}
        checks: dict[str, Callable[[torch.Tensor], str | None]] = {
            names.scale: check_block_scales,
            names.global_scale: check_global_scale,
        }
        if self.activation is Activation.STATIC:
            stored[names.input_scale] = getattr(layer, names.input_scale).data
            checks[names.input_scale] = check_global_scale
        for key, check in checks.items():
            problem = check(stored[key])
            if problem:
                raise CheckpointError(f"layer {name}: {key} was not loaded or is illegal: {problem}")
        global_scales = stored[names.global_scale].float()
        weight = NvFp4Weight(
            packed=stored[names.packed],
            scale=stored[names.scale],
            global_scales=1.0 / global_scales if names.reciprocal else global_scales,
            part_sizes=layer.nvfp4_part_sizes,  # type: ignore[arg-type]
            activation=self.activation,
            dtype=layer.nvfp4_dtype,  # type: ignore[arg-type]
        )
        if self.activation is Activation.STATIC:
            # Parts share x, so they share its scale: the largest, which clips nothing that any part expects.
            values = stored[names.input_scale].float()
            value = values.amin() if names.reciprocal else values.amax()
            inverse = 1.0 / value
            pair = (inverse, value) if names.reciprocal else (value, inverse)
            weight = replace(weight, input_scale=pair[0], input_scale_inv=pair[1])
        if names.pre_quant_scale:
            pre = stored[names.pre_quant_scale] = getattr(layer, names.pre_quant_scale).data
            weight = replace(weight, pre_quant_scale=None if bool((pre == 1).all()) else pre)
        for key in stored:
            delattr(layer, key)
        install(layer, weight)
