"""What one config group says about its layers: NVFP4, FP8 or not quantised. Everything else is refused by name."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from sglang.srt.errors import CheckpointError
from sglang.srt.layers.quantization.base_config import LinearMethodBase
from sglang.srt.layers.quantization.fp8 import Fp8LinearMethod
from sglang.srt.layers.quantization.nvfp4 import Activation, NvFp4LinearMethod, TensorNames
from sglang.srt.layers.quantization.nvfp4_utils import BLOCK_SIZE
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

Section = Mapping[str, Any]
Served = Mapping[str, tuple[object, ...]]

# What messages call the config.
SOURCE = "compressed-tensors config"

CT_NAMES = TensorNames("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale", reciprocal=True)

FORMATS = {"NVFP4": ("nvfp4-pack-quantized",), "FP8": ("float-quantized", "naive-quantized")}

_GROUP_KEYS = {"targets", "weights", "input_activations", "output_activations", "format"}
# How the values were found: it says nothing about how they are stored.
_CALIBRATION_KEYS = {"observer", "observer_kwargs", "zp_dtype"}
_FLOATS = ("torch.float32", "torch.bfloat16", "torch.float16")

# Field -> values that are served (None: null or absent). ``type`` comes first: 4 bits of float are not INT4.
_COMMON: Served = {
    "type": ("float",),
    "num_bits": (4, 8),
    "symmetric": (True, None),
    "block_structure": (None,),
    # "weight" and "static" order the columns during calibration only; "group" stores them permuted.
    "actorder": (None, False, "weight", "static"),
}
_NVFP4: Served = {
    "num_bits": (4,),
    "strategy": ("tensor_group",),
    "group_size": (BLOCK_SIZE, None),
    "scale_dtype": ("torch.float8_e4m3fn", None),
}
_FP8: Served = {"num_bits": (8,), "group_size": (None, -1), "scale_dtype": (*_FLOATS, None)}
_STATIC: Served = {"dynamic": (False, None)}
_KEYS = {*_COMMON, *_NVFP4, *_STATIC, *_CALIBRATION_KEYS}


@dataclass(frozen=True)
class LayerScheme:
    """How a layer's weight is stored and what happens to its input.

    Attributes:
        per_channel: an FP8 weight has one scale per output row, not one per tensor.
    """

    kind: Literal["NVFP4", "FP8", "not quantised"]
    activation: Activation = Activation.NONE
    per_channel: bool = False

    def __str__(self) -> str:
        if self.kind == "not quantised":
            return self.kind
        scales = " with a scale per channel" if self.per_channel else ""
        return f"{self.kind}{scales} (activation scales: {self.activation.value})"

    def method(self) -> LinearMethodBase:
        if self.kind == "NVFP4":
            return NvFp4LinearMethod(CT_NAMES, self.activation)
        if self.kind == "FP8":
            return Fp8LinearMethod(self.activation, self.per_channel)
        return UnquantizedLinearMethod()


NOT_QUANTISED = LayerScheme("not quantised")


def require(value: Any, kind: type, where: str, source: str = SOURCE) -> Any:
    if not isinstance(value, kind):
        raise CheckpointError(f"{source}: {where} must be a {kind.__name__}, found {value!r}")
    return value


def refused(where: str, found: object, served: str, source: str = SOURCE) -> CheckpointError:
    return CheckpointError(f"{source}: {where} is {found!r}, which is not served; served: {served}")


def check_values(section: Section, served: Served, where: str, source: str = SOURCE) -> None:
    """Raises:
    CheckpointError: a field has a value that ``served`` does not list; fields that it does not name are not looked at.
    """
    for key, values in served.items():
        # compressed-tensors' own default of ``type`` is int.
        found = section.get(key, "int" if key == "type" else None)
        if found not in values:
            listed = ", ".join("null or absent" if value is None else repr(value) for value in values)
            raise refused(f"{where}.{key}", found, listed, source)


def check_keys(section: Section, known: Collection[str], where: str, source: str = SOURCE) -> None:
    """Raises:
    CheckpointError: a field that is not ``known``.
    """
    for key in section:
        if key not in known:
            raise refused(f"{where}.{key}", section[key], ", ".join(sorted(known)), source)


def _arguments(group: Section, key: str, where: str) -> Section | None:
    """The quantisation of weights or of activations, with what holds for any kind checked; None: not quantised."""
    if group.get(key) is None:
        return None
    where = f"{where}.{key}"
    section: Section = require(group[key], dict, where)
    check_values(section, _COMMON, where)
    check_keys(section, _KEYS, where)
    return section


def _nvfp4(weights: Section, inputs: Section | None, where: str) -> LayerScheme:
    check_values(weights, {**_NVFP4, **_STATIC}, f"{where}.weights")
    if inputs is None:
        return LayerScheme("NVFP4")
    # The string "local" is a static global scale with block scales from the input; true is both from the input.
    check_values(inputs, {**_NVFP4, "dynamic": ("local", True)}, f"{where}.input_activations")
    return LayerScheme("NVFP4", Activation.STATIC if inputs["dynamic"] == "local" else Activation.DYNAMIC)


def _fp8(weights: Section, inputs: Section | None, where: str) -> LayerScheme:
    check_values(weights, {**_FP8, **_STATIC, "strategy": ("tensor", "channel", None)}, f"{where}.weights")
    per_channel = weights.get("strategy") == "channel" or weights.get("group_size") == -1
    if inputs is None:
        return LayerScheme("FP8", Activation.NONE, per_channel)
    where = f"{where}.input_activations"
    check_values(inputs, {**_FP8, "strategy": ("tensor", "token", None), "dynamic": (False, None, True)}, where)
    dynamic = bool(inputs.get("dynamic"))
    check_values(inputs, {"strategy": ("token",) if dynamic else ("tensor", None)}, where)
    return LayerScheme("FP8", Activation.DYNAMIC if dynamic else Activation.STATIC, per_channel)


def parse_scheme(group: Section, where: str) -> LayerScheme:
    """The scheme of a config group.

    Args:
        where: the group's place in the config, for messages.

    Raises:
        CheckpointError: something that is not served; the text has the group, the field and its value.
    """
    check_keys(group, _GROUP_KEYS, where)
    if group.get("output_activations") is not None:
        raise refused(f"{where}.output_activations", group["output_activations"], "null or absent")
    weights, inputs = _arguments(group, "weights", where), _arguments(group, "input_activations", where)
    if weights is None:
        if inputs is not None:
            raise refused(f"{where}.weights", None, "quantised weights where activations are quantised")
        return NOT_QUANTISED
    scheme = (_nvfp4 if weights["num_bits"] == 4 else _fp8)(weights, inputs, where)
    stored = group.get("format")
    if stored is not None and stored not in FORMATS[scheme.kind]:
        raise refused(f"{where}.format", stored, f"{', '.join(FORMATS[scheme.kind])} for {scheme.kind} weights")
    return scheme


def check_kv_cache_scheme(section: Section, source: str = SOURCE) -> None:
    """Raises:
    CheckpointError: the KV cache is to be anything but FP8 with one static scale for keys and one for values.
    """
    where = "kv_cache_scheme"
    check_values(section, {**_COMMON, **_FP8, **_STATIC, "strategy": ("tensor", None)}, where, source)
    check_keys(section, _KEYS, where, source)
