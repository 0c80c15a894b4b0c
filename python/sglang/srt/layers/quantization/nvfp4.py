"""NVFP4 layers loaded from checkpoints: parameters, what their values may be, and the product that replaces them.

Checkpoint dialects are adapters of names (:class:`TensorNames`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from sglang.srt.errors import CheckpointError
from sglang.srt.layers.fusion import Rows, Step, Then
from sglang.srt.layers.quantization.base_config import PACKED_MODULES, LinearMethodBase, register_weight
from sglang.srt.layers.quantization.fp4_autotune import backends_for
from sglang.srt.layers.quantization.fp4_utils import Target
from sglang.srt.layers.quantization.nvfp4_linear import Activation as Activation  # importers take them from here
from sglang.srt.layers.quantization.nvfp4_linear import NvFp4Linear as NvFp4Linear
from sglang.srt.layers.quantization.nvfp4_linear import NvFp4Weight as NvFp4Weight
from sglang.srt.layers.quantization.nvfp4_utils import BLOCK_SIZE

logger = logging.getLogger(__name__)

_FLOAT32 = torch.finfo(torch.float32)


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


def _pre_quant_scale(layer: str, key: str, stored: dict[str, torch.Tensor]) -> torch.Tensor | None:
    """Factors on the input [parts, K]; None where they change nothing.

    Raises:
        CheckpointError: only some parts of the layer have them.
    """
    pre = stored[key]
    absent = pre.isnan().any(dim=1).tolist()
    if all(absent) or bool((pre == 1).all()):
        return None
    if any(absent):
        parent, _, leaf = layer.rpartition(".")
        parts = PACKED_MODULES.get(leaf, [])
        named = [f"{parent}.{part}.{key}".lstrip(".") for part in parts]
        named = named if len(named) == len(absent) else [f"{layer}.{key} of part {i}" for i in range(len(absent))]
        missing = [name for name, lacks in zip(named, absent, strict=True) if lacks]
        raise CheckpointError(
            f"layer {layer}: the checkpoint lacks {', '.join(missing)}, while other parts of the layer have {key}; "
            "store it for all of them or for none"
        )
    return pre


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
    """Choose the backends for ``weight`` and make it what ``layer`` multiplies with."""
    name = str(getattr(layer, "prefix", "") or type(layer).__name__)
    if getattr(layer, "input_is_sharded", False):
        weight = replace(weight, input_ranks=layer.tp)  # type: ignore[arg-type]
    target = Target.current(weight.packed.device).for_layer(
        weight.in_features, weight.out_features, weight.activation is Activation.NONE, weight.dtype
    )
    linear = NvFp4Linear(weight, *backends_for(weight, target, name))
    logger.debug("layer %s (%s): %s", name, linear.product, linear.choices)
    layer.nvfp4 = linear  # type: ignore[assignment]


class NvFp4LinearMethodBase(LinearMethodBase):
    """A layer that multiplies with what :func:`install` put into it."""

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        linear: NvFp4Linear = layer.nvfp4  # type: ignore[assignment]
        return linear(x, bias)

    def fuses(self, layer: nn.Module, step: Step, rows: int) -> bool:
        linear: NvFp4Linear = layer.nvfp4  # type: ignore[assignment]
        return linear.fuses(step, rows)

    def apply_fused(self, layer: nn.Module, x: Rows, bias: torch.Tensor | None = None, then: Then = None) -> Rows:
        linear: NvFp4Linear = layer.nvfp4  # type: ignore[assignment]
        return linear.fused(x, bias, then)

    def weight_bytes(self, layer: nn.Module) -> int:
        linear: NvFp4Linear | None = getattr(layer, "nvfp4", None)
        return (linear.nbytes if linear else 0) + super().weight_bytes(layer)


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
            # NaN is what an absent one keeps: a stored one of all 1 is not the same, where other parts have none.
            unset = torch.full((parts, input_size_per_partition), float("nan"), dtype=torch.float32)
            check_pre = check_pre_quant_scale
            register_weight(
                layer, self.names.pre_quant_scale, unset, input_dim=1, optional=True, check=check_pre, **attrs
            )
        layer.nvfp4_part_sizes = tuple(output_partition_sizes)  # type: ignore[assignment]
        layer.nvfp4_dtype = params_dtype  # type: ignore[assignment]

    def stored_weight(self, layer: nn.Module) -> NvFp4Weight:
        """What the filled parameters say, in the multiply convention; the layer keeps them.

        Raises:
            CheckpointError: a scale was not written (of the optional one: for some parts only) or has an illegal value.
        """
        names = self.names
        name = str(getattr(layer, "prefix", "") or type(layer).__name__)
        stored = {key: param.data for key, param in layer.named_parameters(recurse=False)}
        checks: dict[str, Callable[[torch.Tensor], str | None]] = {
            names.scale: check_block_scales,
            names.global_scale: check_global_scale,
        }
        if self.activation is Activation.STATIC:
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
            weight = replace(weight, pre_quant_scale=_pre_quant_scale(name, names.pre_quant_scale, stored))
        return weight

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Replaces the parameters by the backend's layout.

        Raises:
            CheckpointError: see :meth:`stored_weight`.
            StartupError: the requested backend can't take the layer.
        """
        weight, names = self.stored_weight(layer), self.names
        mine = {names.packed, names.scale, names.global_scale, names.input_scale, names.pre_quant_scale}
        for key, _ in list(layer.named_parameters(recurse=False)):
            if key in mine:
                delattr(layer, key)
        install(layer, weight)
