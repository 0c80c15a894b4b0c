"""ModelOpt checkpoints: where their quantisation config lies, what it may say, and which method each layer gets."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from sglang.srt.errors import CheckpointError
from sglang.srt.layers.quantization.base_config import PACKED_MODULES, LinearMethodBase, QuantizationConfig
from sglang.srt.layers.quantization.fp8 import Fp8LinearMethod
from sglang.srt.layers.quantization.nvfp4 import MODELOPT_AWQ_NAMES, MODELOPT_NAMES, Activation, NvFp4LinearMethod
from sglang.srt.layers.quantization.nvfp4_utils import BLOCK_SIZE
from sglang.srt.layers.quantization.patterns import ModulePatterns, may_be_absent, spellings
from sglang.srt.layers.quantization.split import SplitLinearMethod
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

logger = logging.getLogger(__name__)

LAYER_ALGORITHMS = ("NVFP4", "W4A16_NVFP4", "NVFP4_AWQ", "FP8")
MODEL_ALGORITHMS = ("NVFP4", "W4A16_NVFP4", "NVFP4_AWQ", "MIXED_PRECISION")
EXCLUDE_KEYS = ("exclude_modules", "ignore", "ignored_layers", "modules_to_not_convert")


class ModelOptFp4LinearMethod(NvFp4LinearMethod):
    """An NVFP4 layer as ModelOpt stores it: weight, weight_scale, weight_scale_2, for W4A4 input_scale, and for
    NVFP4_AWQ pre_quant_scale."""

    def __init__(self, quant_config: ModelOptFp4Config, algorithm: str = "NVFP4") -> None:
        names = MODELOPT_AWQ_NAMES if algorithm == "NVFP4_AWQ" else MODELOPT_NAMES
        super().__init__(names, quant_config.activation_of(algorithm))


class ModelOptFp4Config(QuantizationConfig):
    """What a ModelOpt checkpoint says about its layers.

    Args:
        quant_algo: NVFP4, W4A16_NVFP4, NVFP4_AWQ or MIXED_PRECISION (then ``quantized_layers`` decides).
        exclude_modules: names, globs and ``re:`` expressions of layers that are not quantised.
        quantized_layers: layer name to algorithm; other layers are not quantised. None where the whole model is.
        kv_cache_quant_algo: "FP8" or None.
        dynamic_activations: compute the activation scale from each call's input.
        weight_only: leave activations alone whatever the checkpoint says.

    Raises:
        CheckpointError: an algorithm that is not served, named with its layer.
    """

    packed_modules_mapping = PACKED_MODULES

    def __init__(
        self,
        quant_algo: str = "NVFP4",
        exclude_modules: list[str] | None = None,
        quantized_layers: Mapping[str, str] | None = None,
        kv_cache_quant_algo: str | None = None,
        dynamic_activations: bool = False,
        weight_only: bool = False,
    ) -> None:
        if quant_algo not in MODEL_ALGORITHMS:
            raise CheckpointError(
                f"ModelOpt quant_algo {quant_algo!r} is not served; served are {', '.join(MODEL_ALGORITHMS)}"
            )
        for layer, algorithm in (quantized_layers or {}).items():
            if algorithm not in LAYER_ALGORITHMS:
                raise CheckpointError(
                    f"layer {layer}: ModelOpt quant_algo {algorithm!r} is not served; served are "
                    f"{', '.join(LAYER_ALGORITHMS)}"
                )
        if kv_cache_quant_algo not in (None, "FP8"):
            raise CheckpointError(f"kv_cache_quant_algo {kv_cache_quant_algo!r} is not served; served is FP8")
        self.quant_algo = quant_algo
        self.exclude = ModulePatterns(exclude_modules or [])
        self.quantized_layers = quantized_layers
        self.kv_cache_quant_algo = kv_cache_quant_algo
        self.dynamic_activations = dynamic_activations
        self.weight_only = weight_only

    @classmethod
    def get_name(cls) -> str:
        return "modelopt_fp4"

    @classmethod
    def from_config(cls, config: Mapping[str, Any], weight_only: bool = False) -> ModelOptFp4Config:
        """From the contents of ``hf_quant_config.json`` or of ``config.json``'s ``quantization_config``, flat or nested
        under ``quantization``.

        Raises:
            CheckpointError: a value that is unknown or has another type than ModelOpt writes.
        """
        section = _require(config.get("quantization", config), dict, "quantization")
        algorithm = section.get("quant_algo")
        if not isinstance(algorithm, str):
            raise CheckpointError(f"the ModelOpt quantisation config has no quant_algo (found {algorithm!r})")
        _check_group_size(section, "quantization")
        table = section.get("quantized_layers")
        if isinstance(table, dict) and isinstance(table.get("quantized_layers"), dict):
            table = table["quantized_layers"]
        layers: dict[str, str] | None = None
        if algorithm.upper() == "MIXED_PRECISION":
            if not table:
                raise CheckpointError("quant_algo MIXED_PRECISION needs a table quantized_layers; it is missing")
            layers = {}
            for name, entry in _require(table, dict, "quantized_layers").items():
                entry = _require(entry, dict, f"quantized_layers.{name}")
                _check_group_size(entry, f"quantized_layers.{name}")
                layers[name] = str(entry.get("quant_algo")).upper()
        exclude = [
            _require(pattern, str, key)
            for key in EXCLUDE_KEYS
            for pattern in _require(section.get(key) or [], list, key)
        ]
        scheme = section.get("activation_scheme", "static")
        if scheme not in ("static", "dynamic"):
            raise CheckpointError(f"activation_scheme {scheme!r} is not served; served are static and dynamic")
        return cls(
            quant_algo=algorithm.upper(),
            exclude_modules=list(dict.fromkeys(exclude)),
            quantized_layers=layers,
            kv_cache_quant_algo=_kv_cache_algorithm(section),
            dynamic_activations=scheme == "dynamic",
            weight_only=weight_only,
        )

    @property
    def kv_cache_dtype(self) -> torch.dtype | None:
        return torch.float8_e4m3fn if self.kv_cache_quant_algo == "FP8" else None

    def activation_of(self, algorithm: str) -> Activation:
        """How a layer of this NVFP4 algorithm treats its input."""
        if algorithm == "W4A16_NVFP4" or self.weight_only:
            return Activation.NONE
        return Activation.DYNAMIC if self.dynamic_activations else Activation.STATIC

    def get_quant_method(self, layer: nn.Module, prefix: str) -> LinearMethodBase:
        """A table's entry counts more than the exclusion list, which may only mean "not NVFP4"."""
        parent, _, leaf = prefix.rpartition(".")
        names = [f"{parent}.{part}".lstrip(".") for part in self.packed_modules_mapping.get(leaf, [])] or [prefix]
        algorithms: dict[str, str | None] = {}
        if self.quantized_layers is not None:
            for name in names:
                found = (self.quantized_layers.get(spelling) for spelling in spellings(name))
                algorithms[name] = next((algorithm for algorithm in found if algorithm), None)
        else:
            excluded = self.exclude.match_parts(prefix, names)
            algorithms = {name: None if name in excluded else self.quant_algo for name in names}
        if len(set(algorithms.values())) > 1:
            return SplitLinearMethod({name: algorithm or "not quantised" for name, algorithm in algorithms.items()})
        algorithm = algorithms[names[0]]
        if algorithm is None:
            return UnquantizedLinearMethod()
        if algorithm == "FP8":
            return Fp8LinearMethod()
        return ModelOptFp4LinearMethod(self, algorithm)

    def check_names(self, names: Collection[str]) -> None:
        self.exclude.check_names(names)
        known = {spelling for name in names for spelling in spellings(name)}
        for name in self.quantized_layers or {}:
            if name not in known and not may_be_absent(name):
                raise CheckpointError(f"the quantisation config's quantized_layers names {name}, which does not exist")


def find_modelopt_config(
    hf_quant_config: Mapping[str, Any] | None, quantization_config: Mapping[str, Any] | None, weight_only: bool = False
) -> ModelOptFp4Config | None:
    """The checkpoint's config from either place; None if neither is ModelOpt's.

    ``hf_quant_config.json`` wins over ``config.json``: it is the exporter's own file, the other a converted copy. A
    disagreement is logged.
    """
    found: list[ModelOptFp4Config] = []
    if hf_quant_config is not None:
        found.append(ModelOptFp4Config.from_config(hf_quant_config, weight_only))
    if quantization_config is not None and str(quantization_config.get("quant_method", "")).startswith("modelopt"):
        found.append(ModelOptFp4Config.from_config(quantization_config, weight_only))
    if len(found) == 2 and _summary(found[0]) != _summary(found[1]):
        logger.warning(
            "hf_quant_config.json and config.json's quantization_config disagree (%s, %s); the former is used",
            _summary(found[0]),
            _summary(found[1]),
        )
    return found[0] if found else None


def _summary(config: ModelOptFp4Config) -> tuple[object, ...]:
    return (config.quant_algo, sorted(config.exclude.patterns), config.quantized_layers, config.kv_cache_quant_algo)


def _require(value: Any, kind: type, where: str) -> Any:
    if not isinstance(value, kind):
        raise CheckpointError(f"quantisation config: {where} must be a {kind.__name__}, found {value!r}")
    return value


def _check_group_size(section: Mapping[str, Any], where: str) -> None:
    size = section.get("group_size", BLOCK_SIZE)
    if size not in (BLOCK_SIZE, None):
        raise CheckpointError(
            f"quantisation config: {where}.group_size is {size!r}; NVFP4 blocks are {BLOCK_SIZE} wide"
        )


def _kv_cache_algorithm(section: Mapping[str, Any]) -> str | None:
    algorithm = section.get("kv_cache_quant_algo")
    scheme = section.get("kv_cache_scheme")
    if algorithm is None and scheme is not None:
        scheme = _require(scheme, dict, "kv_cache_scheme")
        if scheme.get("num_bits") == 8 and scheme.get("type") == "float" and not scheme.get("dynamic"):
            return "FP8"
        raise CheckpointError(f"kv_cache_scheme {scheme} is not served; served is static FP8")
    return None if algorithm is None else str(algorithm).upper()
