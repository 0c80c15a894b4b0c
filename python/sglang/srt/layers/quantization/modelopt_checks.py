"""What a ModelOpt config says beside its algorithm: whatever contradicts it is refused, with the file and the key."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from sglang.srt.errors import CheckpointError
from sglang.srt.layers.quantization.compressed_tensors.schemes import (
    Section,
    Served,
    check_keys,
    check_kv_cache_scheme,
    check_values,
    refused,
    require,
)
from sglang.srt.layers.quantization.compressed_tensors.targets import LINEAR
from sglang.srt.layers.quantization.nvfp4_utils import BLOCK_SIZE

logger = logging.getLogger(__name__)

EXCLUDE_KEYS = ("exclude_modules", "ignore", "ignored_layers", "modules_to_not_convert")

# Keys that say something about layers; the others say where the config comes from.
_SAYING = {
    "quant_algo", "kv_cache_quant_algo", "kv_cache_scheme", "group_size", "quantized_layers", "config_groups",
    "activation_scheme", "has_zero_point", "pre_quant_scale", *EXCLUDE_KEYS,
}  # fmt: skip
_KNOWN = {*_SAYING, "quantization", "producer", "quant_method"}
_ENTRY_KEYS = ("quant_algo", "group_size", "has_zero_point", "pre_quant_scale")
_GROUP_KEYS = ("targets", "weights", "input_activations", "output_activations", "quant_algo")

# Field -> values that are served (None: null or absent). Exporters leave out the strategy.
_VALUES: Served = {"type": ("float",), "symmetric": (True, None), "block_structure": (None,), "actorder": (None, False)}
_NVFP4: Served = {"num_bits": (4,), "group_size": (BLOCK_SIZE, None), "strategy": ("tensor_group", None)}
_FP8: Served = {"num_bits": (8,), "group_size": (None,), "strategy": ("tensor", None)}


def check_keys_beside(config: Section, section: Section, source: str) -> None:
    """Keys outside of ``section``, which lies in ``config`` as its ``quantization`` (or is it), and unknown ones.

    Raises:
        CheckpointError: a key beside ``quantization`` says something that ``quantization`` does not say.
    """
    for key in sorted((config.keys() | section.keys()) - _KNOWN):
        logger.warning("%s: the field %s is not known and not read.", source, key)
    for key in sorted(config.keys() & _SAYING):
        if config[key] != section.get(key):
            raise CheckpointError(
                f"{source}: {key} is {config[key]!r} beside quantization and {section.get(key)!r} in it; write it into "
                "quantization only"
            )


def check_layout(section: Section, algorithm: str, where: str, source: str) -> None:
    """How the layers of this algorithm are stored, in the whole config (``where`` is empty) or a table's entry.

    Raises:
        CheckpointError: not as ``algorithm`` stores them.
    """
    size = section.get("group_size", BLOCK_SIZE)
    if size not in (BLOCK_SIZE, None):
        raise CheckpointError(f"{source}: {where}group_size is {size!r}; NVFP4 blocks are {BLOCK_SIZE} wide")
    if section.get("has_zero_point") not in (False, None):
        raise refused(f"{where}has_zero_point", section["has_zero_point"], "false, null or absent", source)
    if section.get("pre_quant_scale") not in (False, None) and algorithm != "NVFP4_AWQ":
        served = f"false, null or absent for {algorithm}"
        raise refused(f"{where}pre_quant_scale", section["pre_quant_scale"], served, source)


def check_entry(entry: Section, algorithm: str, layer: str, source: str) -> None:
    """An entry of ``quantized_layers``.

    Raises:
        CheckpointError: it says what does not belong to ``algorithm``, or what is not known.
    """
    check_keys(entry, _ENTRY_KEYS, f"quantized_layers.{layer}", source)
    check_layout(entry, algorithm, f"quantized_layers.{layer}.", source)


def check_groups(section: Section, algorithm: str, table: Mapping[str, str] | None, dynamic: bool, source: str) -> None:
    """``config_groups``, which ModelOpt's converter derives from the algorithm or from the table of layers.

    Args:
        algorithm: the whole model's, if ``table`` is None.
        table: layer name to algorithm.
        dynamic: activation scales come from each call's input.

    Raises:
        CheckpointError: a group says something else.
    """
    groups = require(section.get("config_groups") or {}, dict, "config_groups", source)
    grouped: set[str] = set()
    for name, group in groups.items():
        where = f"config_groups.{name}"
        group = require(group, dict, where, source)
        check_keys(group, _GROUP_KEYS, where, source)
        targets = require(group.get("targets", [LINEAR]), list, f"{where}.targets", source)
        if table is None:
            if targets != [LINEAR]:
                served = f"[{LINEAR!r}], as quant_algo {algorithm} means all layers"
                raise refused(f"{where}.targets", targets, served, source)
            algorithms = {algorithm}
        else:
            for target in targets:
                if target not in table:
                    raise refused(f"{where}.targets", target, "layers that quantized_layers names", source)
            grouped.update(targets)
            algorithms = {table[target] for target in targets}
        for one in sorted(algorithms):
            _check_group(group, one, dynamic, where, source)
    for layer in table or {}:
        if groups and layer not in grouped:
            raise CheckpointError(
                f"{source}: quantized_layers names {layer}, which no entry of config_groups has among its targets; add "
                "it there or remove config_groups"
            )


def _check_group(group: Section, algorithm: str, dynamic: bool, where: str, source: str) -> None:
    stated = str(group.get("quant_algo", algorithm)).upper()
    if stated != algorithm:
        raise refused(f"{where}.quant_algo", stated, f"{algorithm}, which its layers have elsewhere", source)
    if group.get("output_activations") is not None:
        raise refused(f"{where}.output_activations", group["output_activations"], "null or absent", source)
    if "quant_algo" in group and "weights" not in group:
        return  # the converter's answer to an algorithm that it does not know
    kind = _FP8 if algorithm == "FP8" else _NVFP4
    scales = {"dynamic": (False, None)}
    _check_scheme(group, "weights", {**_VALUES, **kind, **scales}, algorithm, where, source)
    if algorithm == "W4A16_NVFP4":
        if group.get("input_activations") is not None:
            served = f"null or absent for {algorithm}"
            raise refused(f"{where}.input_activations", group["input_activations"], served, source)
        return
    inputs = {**_VALUES, **kind, "dynamic": (False, None, True)}
    if algorithm == "NVFP4_AWQ":
        inputs["num_bits"] = (4, 8)  # the converter writes 8, as for W4A8_AWQ; the layers have 4
    scheme = _check_scheme(group, "input_activations", inputs, algorithm, where, source)
    if scheme.get("dynamic") not in (dynamic, None):
        raise CheckpointError(
            f"{source}: {where}.input_activations.dynamic is {scheme['dynamic']}, but activation_scheme is "
            f"{'dynamic' if dynamic else 'static or absent'}; make them say the same"
        )


def _check_scheme(group: Section, key: str, served: Served, algorithm: str, where: str, source: str) -> Section:
    if group.get(key) is None:
        raise refused(f"{where}.{key}", None, f"a scheme, as {algorithm} has one", source)
    scheme: dict[str, Any] = require(group[key], dict, f"{where}.{key}", source)
    check_values(scheme, served, f"{where}.{key}", source)
    check_keys(scheme, served, f"{where}.{key}", source)
    return scheme


def kv_cache_algorithm(section: Section, source: str) -> str | None:
    """The KV cache's algorithm, which either of two keys may say.

    Raises:
        CheckpointError: ``kv_cache_scheme`` is not static FP8.
    """
    algorithm, scheme = section.get("kv_cache_quant_algo"), section.get("kv_cache_scheme")
    if scheme is not None:
        check_kv_cache_scheme(require(scheme, dict, "kv_cache_scheme", source), source)
        algorithm = "FP8" if algorithm is None else algorithm
    return None if algorithm is None else str(algorithm).upper()
