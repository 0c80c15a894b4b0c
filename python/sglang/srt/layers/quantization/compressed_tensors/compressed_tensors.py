"""compressed-tensors checkpoints: what their config may say, and which method each layer gets."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from sglang.srt.errors import CheckpointError
from sglang.srt.layers.quantization.base_config import PACKED_MODULES, LinearMethodBase, QuantizationConfig
from sglang.srt.layers.quantization.compressed_tensors.schemes import (
    FORMATS,
    NOT_QUANTISED,
    LayerScheme,
    check_kv_cache_scheme,
    parse_scheme,
    refused,
    require,
)
from sglang.srt.layers.quantization.compressed_tensors.targets import LINEAR, Target
from sglang.srt.layers.quantization.nvfp4 import Activation
from sglang.srt.layers.quantization.patterns import ModulePatterns, may_be_absent
from sglang.srt.layers.quantization.split import SplitLinearMethod

logger = logging.getLogger(__name__)

QUANT_METHOD = "compressed-tensors"

_STORED_FORMATS = (*(name for names in FORMATS.values() for name in names), "mixed-precision")
_KEYS = {
    "quant_method", "config_groups", "format", "ignore", "kv_cache_scheme", "quantization_status", "sparsity_config",
    "transform_config", "global_compression_ratio", "version",
}  # fmt: skip


@dataclass(frozen=True)
class Group:
    """A config group: layers that ``targets`` name are stored as ``scheme`` says."""

    name: str
    targets: tuple[Target, ...]
    scheme: LayerScheme


class CompressedTensorsConfig(QuantizationConfig):
    """What a compressed-tensors checkpoint says about its layers.

    A layer that an entry of ``ignore`` names is not quantised. Any other belongs to the group that names it most
    specifically (see :meth:`Target.rank`), in whatever order the groups are given; fused layers by their parts.

    Args:
        groups: the config groups.
        ignore: names, globs and ``re:`` expressions of layers that are not quantised.
        fp8_kv_cache: the checkpoint asks for an FP8 KV cache.
        weight_only: leave activations alone whatever the checkpoint says, in FP8 layers too.

    Attributes:
        algorithms: the groups' kinds in ModelOpt's words (see ``quant_algo``).
        quant_algo: the groups' common kind, in ModelOpt's words: NVFP4, W4A16_NVFP4, FP8 or MIXED_PRECISION; None if
            nothing is quantised.
    """

    packed_modules_mapping = PACKED_MODULES

    def __init__(
        self,
        groups: Sequence[Group],
        ignore: Sequence[str] = (),
        fp8_kv_cache: bool = False,
        weight_only: bool = False,
    ) -> None:
        kinds = {_algorithm(group.scheme) for group in groups}
        self.algorithms = frozenset(kind for kind in kinds if kind is not None)
        common = next(iter(self.algorithms)) if len(self.algorithms) == 1 else "MIXED_PRECISION"
        self.quant_algo = common if self.algorithms else None
        if weight_only:
            groups = [replace(group, scheme=replace(group.scheme, activation=Activation.NONE)) for group in groups]
        self.groups = tuple(groups)
        self.ignore = tuple(Target(entry) for entry in ignore)
        self.fp8_kv_cache = fp8_kv_cache
        self._asked: set[str] = set()

    @classmethod
    def get_name(cls) -> str:
        return QUANT_METHOD

    @classmethod
    def from_config(cls, config: Mapping[str, Any], weight_only: bool = False) -> CompressedTensorsConfig:
        """From ``config.json``'s ``quantization_config``.

        Raises:
            CheckpointError: a value that is not served or has another type than compressed-tensors writes; the text
                has the group, the field and the value.
        """
        for key in config.keys() - _KEYS:
            logger.warning("The compressed-tensors config's field %s is not known and not read.", key)
        status = config.get("quantization_status")
        if status not in ("compressed", None):
            raise refused("quantization_status", status, "compressed")
        sparsity = require(config.get("sparsity_config") or {}, dict, "sparsity_config")
        if sparsity and sparsity.get("format") != "dense":
            raise refused("sparsity_config.format", sparsity.get("format"), "dense, or no sparsity_config")
        transform = require(config.get("transform_config") or {}, dict, "transform_config")
        if transform and transform != {"config_groups": {}}:
            raise refused("transform_config", transform, "none")
        groups = []
        for name, section in require(config.get("config_groups"), dict, "config_groups").items():
            where = f"config_groups.{name}"
            section = require(section, dict, where)
            entries = require(section.get("targets"), list, f"{where}.targets")
            targets = tuple(Target(require(entry, str, f"{where}.targets")) for entry in entries)
            groups.append(Group(name, targets, parse_scheme(section, where)))
        served = _STORED_FORMATS
        if all(group.scheme == NOT_QUANTISED for group in groups):
            served = (*served, "dense")
        stored = config.get("format")
        if stored is not None and stored not in served:
            raise refused("format", stored, ", ".join(served))
        kv_cache = config.get("kv_cache_scheme")
        if kv_cache is not None:
            check_kv_cache_scheme(require(kv_cache, dict, "kv_cache_scheme"))
        ignore = [require(entry, str, "ignore") for entry in require(config.get("ignore") or [], list, "ignore")]
        return cls(groups, ignore, kv_cache is not None, weight_only)

    @property
    def kv_cache_dtype(self) -> torch.dtype | None:
        return torch.float8_e4m3fn if self.fp8_kv_cache else None

    def scheme_of(self, name: str) -> LayerScheme:
        """How the layer ``name`` (a part of a fused layer by its own name) is quantised.

        Raises:
            CheckpointError: two groups that differ name it equally specifically.
        """
        packed = self.packed_modules_mapping
        if any(entry.rank(name, packed) is not None for entry in self.ignore):
            return NOT_QUANTISED
        ranked = [(t.rank(name, packed), t.text, group) for group in self.groups for t in group.targets]
        found = [(rank, text, group) for rank, text, group in ranked if rank is not None]
        if not found:
            return NOT_QUANTISED
        most = max(rank for rank, _, _ in found)
        (_, text, group), *others = [entry for entry in found if entry[0] == most]
        for _, other_text, other in others:
            if other.scheme != group.scheme:
                raise CheckpointError(
                    f"layer {name}: the config groups {group.name} (target {text!r}: {group.scheme}) and {other.name} "
                    f"(target {other_text!r}: {other.scheme}) name it equally specifically; name it in one of them"
                )
        return group.scheme

    def get_quant_method(self, layer: nn.Module, prefix: str) -> LinearMethodBase:
        parent, _, leaf = prefix.rpartition(".")
        names = [f"{parent}.{part}".lstrip(".") for part in self.packed_modules_mapping.get(leaf, [])] or [prefix]
        self._asked.update(names)
        schemes = {name: self.scheme_of(name) for name in names}
        if len(set(schemes.values())) > 1:
            return SplitLinearMethod({name: str(scheme) for name, scheme in schemes.items()})
        return schemes[names[0]].method()

    def check_names(self, names: Collection[str]) -> None:
        """Called when every layer has its method: only linear layers have asked for one, others can't be targets."""
        ModulePatterns(entry.text for entry in self.ignore if entry.text != LINEAR).check_names(names)
        linears = self._asked or names
        for group in self.groups:
            for target in group.targets:
                ranks = (target.rank(name, self.packed_modules_mapping) for name in linears)
                if all(rank is None for rank in ranks) and (target.text in names or not may_be_absent(target.text)):
                    raise CheckpointError(
                        f"the config group {group.name} targets {target.text!r}, which matches no layer of this model "
                        "that can be quantised; correct or remove the target"
                    )


def _algorithm(scheme: LayerScheme) -> str | None:
    if scheme == NOT_QUANTISED:
        return None
    return "W4A16_NVFP4" if scheme.kind == "NVFP4" and scheme.activation is Activation.NONE else scheme.kind
