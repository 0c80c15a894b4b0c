"""ModelOpt checkpoints: where their quantisation config lies, what it may say, and which method each layer gets."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from sglang.srt.errors import CheckpointError
from sglang.srt.layers.quantization.base_config import PACKED_MODULES, LinearMethodBase, QuantizationConfig
from sglang.srt.layers.quantization.compressed_tensors.schemes import require
from sglang.srt.layers.quantization.fp8 import Fp8LinearMethod
from sglang.srt.layers.quantization.modelopt_checks import (
    EXCLUDE_KEYS,
    check_entry,
    check_groups,
    check_keys_beside,
    check_layout,
    kv_cache_algorithm,
)
from sglang.srt.layers.quantization.nvfp4 import MODELOPT_AWQ_NAMES, MODELOPT_NAMES, Activation, NvFp4LinearMethod
from sglang.srt.layers.quantization.patterns import ModulePatterns, may_be_absent, spellings
from sglang.srt.layers.quantization.split import SplitLinearMethod
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

logger = logging.getLogger(__name__)

LAYER_ALGORITHMS = ("NVFP4", "W4A16_NVFP4", "NVFP4_AWQ", "FP8")
MODEL_ALGORITHMS = ("NVFP4", "W4A16_NVFP4", "NVFP4_AWQ", "MIXED_PRECISION")

_OWN_FILE = "hf_quant_config.json"
_IN_CONFIG = "config.json's quantization_config"


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
        quantized_layers: layer name (of a fused layer, too) to algorithm; other layers are not quantised. None where
            the whole model is.
        kv_cache_quant_algo: "FP8" or None.
        dynamic_activations: compute the activation scale from each call's input (in FP8 layers from each row of it).
        weight_only: leave activations alone whatever the checkpoint says, in FP8 layers too.

    Attributes:
        algorithms: those of the layers.

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
        self.algorithms = frozenset([quant_algo] if quantized_layers is None else quantized_layers.values())
        self._names_read: set[str] = set()

    @classmethod
    def get_name(cls) -> str:
        return "modelopt_fp4"

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], weight_only: bool = False, source: str = "ModelOpt quantisation config"
    ) -> ModelOptFp4Config:
        """From the contents of ``hf_quant_config.json`` or of ``config.json``'s ``quantization_config``, flat or nested
        under ``quantization``.

        Args:
            source: what messages call the config.

        Raises:
            CheckpointError: a value that is unknown, contradicts another, or has another type than ModelOpt writes.
        """
        section = require(config.get("quantization", config), dict, "quantization", source)
        algorithm = section.get("quant_algo")
        if not isinstance(algorithm, str):
            raise CheckpointError(f"{source}: it has no quant_algo (found {algorithm!r})")
        algorithm = algorithm.upper()
        check_keys_beside(config, section, source)
        table = section.get("quantized_layers")
        if isinstance(table, dict) and isinstance(table.get("quantized_layers"), dict):
            table = table["quantized_layers"]
        layers: dict[str, str] | None = None
        if algorithm == "MIXED_PRECISION":
            if not table:
                raise CheckpointError(
                    f"{source}: quant_algo MIXED_PRECISION needs a table quantized_layers; it is missing"
                )
            layers = {}
            for name, entry in require(table, dict, "quantized_layers", source).items():
                entry = require(entry, dict, f"quantized_layers.{name}", source)
                layers[name] = str(entry.get("quant_algo")).upper()
        elif table:
            raise CheckpointError(
                f"{source}: quantized_layers names layers, but quant_algo {algorithm} means all of them; remove the "
                "table or set quant_algo to MIXED_PRECISION"
            )
        exclude = [
            require(pattern, str, key, source)
            for key in EXCLUDE_KEYS
            for pattern in require(section.get(key) or [], list, key, source)
        ]
        scheme = section.get("activation_scheme", "static")
        if scheme not in ("static", "dynamic"):
            raise CheckpointError(
                f"{source}: activation_scheme {scheme!r} is not served; served are static and dynamic"
            )
        result = cls(
            quant_algo=algorithm,
            exclude_modules=list(dict.fromkeys(exclude)),
            quantized_layers=layers,
            kv_cache_quant_algo=kv_cache_algorithm(section, source),
            dynamic_activations=scheme == "dynamic",
            weight_only=weight_only,
        )
        check_layout(section, algorithm, "", source)
        for name, one in (layers or {}).items():
            check_entry(table[name], one, name, source)
        check_groups(section, algorithm, layers, scheme == "dynamic", source)
        return result

    @property
    def kv_cache_dtype(self) -> torch.dtype | None:
        return torch.float8_e4m3fn if self.kv_cache_quant_algo == "FP8" else None

    def activation_of(self, algorithm: str) -> Activation:
        """How a layer of this algorithm treats its input."""
        if algorithm == "W4A16_NVFP4" or self.weight_only:
            return Activation.NONE
        return Activation.DYNAMIC if self.dynamic_activations else Activation.STATIC

    def get_quant_method(self, layer: nn.Module, prefix: str) -> LinearMethodBase:
        """A table's entry counts more than the exclusion list, which may only mean "not NVFP4"."""
        parent, _, leaf = prefix.rpartition(".")
        names = [f"{parent}.{part}".lstrip(".") for part in self.packed_modules_mapping.get(leaf, [])] or [prefix]
        algorithms: dict[str, str | None] = {}
        if self.quantized_layers is not None:
            algorithms = {name: self._in_table(name, self.quantized_layers) for name in names}
        else:
            excluded = self.exclude.match_parts(prefix, names)
            algorithms = {name: None if name in excluded else self.quant_algo for name in names}
        if len(set(algorithms.values())) > 1:
            return SplitLinearMethod({name: algorithm or "not quantised" for name, algorithm in algorithms.items()})
        algorithm = algorithms[names[0]]
        if algorithm is None:
            return UnquantizedLinearMethod()
        if algorithm == "FP8":
            return Fp8LinearMethod(self.activation_of(algorithm))
        return ModelOptFp4LinearMethod(self, algorithm)

    def _in_table(self, name: str, table: Mapping[str, str]) -> str | None:
        """The algorithm of a layer by its own name, or of a part of a fused layer by that of the fused layer."""
        parent, _, leaf = name.rpartition(".")
        fused = [f"{parent}.{f}".lstrip(".") for f, parts in self.packed_modules_mapping.items() if leaf in parts]
        for spelling in (spelling for one in (name, *fused) for spelling in spellings(one)):
            if spelling in table:
                self._names_read.add(spelling)
                return table[spelling]
        return None

    def check_names(self, names: Collection[str]) -> None:
        """Called when every layer has its method: an entry of the table that no layer has read by then is an error."""
        self.exclude.check_names(names)
        known = {spelling for name in names for spelling in spellings(name)}
        for name in self.quantized_layers or {}:
            if name in self._names_read:
                continue
            if name in known:
                raise CheckpointError(
                    f"the quantisation config's quantized_layers names {name}, which is no linear layer, or one that "
                    "the table names otherwise too; name each linear layer once"
                )
            if not may_be_absent(name):
                raise CheckpointError(f"the quantisation config's quantized_layers names {name}, which does not exist")


def find_modelopt_config(
    hf_quant_config: Mapping[str, Any] | None, quantization_config: Mapping[str, Any] | None, weight_only: bool = False
) -> ModelOptFp4Config | None:
    """The checkpoint's config from either place; None if ``config.json`` has one that is not ModelOpt's, or if neither
    place has one.

    ``config.json`` says which tool's config counts. If it is ModelOpt's, ``hf_quant_config.json`` wins: it is the
    exporter's own file, the other a converted copy. A disagreement is logged.

    Raises:
        CheckpointError: see :meth:`ModelOptFp4Config.from_config`; or ``config.json`` asks for dynamic activation
            scales and ``hf_quant_config.json`` says nothing of them.
    """
    if quantization_config and not _is_modelopt(quantization_config):
        if hf_quant_config is not None:
            logger.warning(
                "%s is not read: the quant_method in %s is %r, not ModelOpt's.",
                _OWN_FILE,
                _IN_CONFIG,
                quantization_config.get("quant_method"),
            )
        return None
    own = None if hf_quant_config is None else ModelOptFp4Config.from_config(hf_quant_config, weight_only, _OWN_FILE)
    if not quantization_config:
        return own
    if hf_quant_config is not None and _activation_scheme(hf_quant_config) is None:
        scheme = _activation_scheme(quantization_config)
        if scheme not in ("static", None):
            raise CheckpointError(
                f"{_IN_CONFIG}: activation_scheme is {scheme!r}, which {_OWN_FILE} does not say; write it there, as "
                "that file is the one that counts"
            )
    copy = ModelOptFp4Config.from_config(quantization_config, weight_only, _IN_CONFIG)
    if own is None:
        return copy
    if _summary(own) != _summary(copy):
        logger.warning(
            "%s and %s disagree (%s, %s); the former is used", _OWN_FILE, _IN_CONFIG, _summary(own), _summary(copy)
        )
    return own


def _activation_scheme(config: Mapping[str, Any]) -> object:
    section = config.get("quantization", config)
    return section.get("activation_scheme") if isinstance(section, dict) else None


def _is_modelopt(quantization_config: Mapping[str, Any]) -> bool:
    method = quantization_config.get("quant_method")
    if method is None:
        section = quantization_config.get("quantization", quantization_config)
        return isinstance(section, dict) and "quant_algo" in section
    return str(method).startswith("modelopt")


def _summary(config: ModelOptFp4Config) -> tuple[object, ...]:
    return (
        config.quant_algo,
        sorted(config.exclude.patterns),
        config.quantized_layers,
        config.kv_cache_quant_algo,
        "dynamic activation scales" if config.dynamic_activations else "static activation scales",
    )
