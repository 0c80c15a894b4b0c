"""Filling a model from a checkpoint, exactly: every parameter written once, every tensor consumed or known unused."""

from __future__ import annotations

import fnmatch
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from sglang.srt.errors import CheckpointError
from sglang.srt.layers.linear import match_dtype
from sglang.srt.layers.quantization.base_config import LinearMethodBase
from sglang.srt.layers.quantization.nvfp4 import check_global_scale
from sglang.srt.layers.quantization.patterns import TEXT_MODEL
from sglang.srt.layers.radix_attention import check_all_or_no_scales, check_kv_scale
from sglang.srt.model_loader.weight_utils import iterate_tensors

logger = logging.getLogger(__name__)

# Tensors that exporters write and that no model here reads.
UNUSED_TENSORS = ("*.rotary_emb.inv_freq", "*.k_proj.k_scale", "*.v_proj.v_scale", "*.q_proj.q_scale")

# A checkpoint stores KV cache scales below the projections, the model holds them in its attention module.
RENAMED_TENSORS = {".attn.k_scale": ".k_proj.k_scale", ".attn.v_scale": ".v_proj.v_scale"}

# ... except by compressed-tensors, which stores them in the attention module itself.
KV_SCALE_ALIASES = {
    ".self_attn.k_scale": ".self_attn.k_proj.k_scale",
    ".self_attn.v_scale": ".self_attn.v_proj.v_scale",
}


@dataclass(frozen=True)
class Slot:
    """Where one checkpoint tensor goes."""

    module: nn.Module
    param: torch.Tensor
    shard_id: str | int | None

    def fill(self, loaded: torch.Tensor) -> None:
        loader = getattr(self.param, "weight_loader", None)
        if loader is None:  # loaders do this themselves
            loaded = match_dtype(self.param, loaded)
        check = getattr(self.param, "check", None)
        problem = check(loaded) if check else None
        if problem:
            raise CheckpointError(problem)
        if loader is None:
            if loaded.numel() == self.param.numel() == 1:  # a scalar may be stored as [] or as [1]
                loaded = loaded.reshape(self.param.shape)
            if loaded.shape != self.param.shape:
                raise CheckpointError(f"expected shape {list(self.param.shape)}, found {list(loaded.shape)}")
            self.param.data.copy_(loaded)
        elif self.shard_id is None:
            loader(self.param, loaded)
        else:
            loader(self.param, loaded, self.shard_id)


def named_checkpoint_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module under its checkpoint's name: a part that a fused layer was split into stands beside it there."""
    packed: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    for path, module in model.named_modules():
        parent, _, leaf = path.rpartition(".")
        above, _, fused = parent.rpartition(".")
        yield (f"{above}.{leaf}".lstrip(".") if leaf in packed.get(fused, ()) else path), module


def checkpoint_slots(model: nn.Module) -> tuple[dict[str, Slot], dict[str, list[str]]]:
    """What the model needs, by the names that a checkpoint uses.

    Returns:
        slots: tensor name to where it goes; a fused layer appears under its parts' names.
        fused: name of a tensor that holds a whole fused layer, to the names of its parts.
    """
    packed: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    slots: dict[str, Slot] = {}
    fused: dict[str, list[str]] = {}
    for path, module in named_checkpoint_modules(model):
        parent, _, leaf = path.rpartition(".")
        parts = packed.get(leaf)
        for name, param in module.named_parameters(recurse=False):
            full = f"{path}.{name}"
            for ours, theirs in RENAMED_TENSORS.items():
                if full.endswith(ours):
                    full = full.removesuffix(ours) + theirs
            if parts is None:
                slots[full] = Slot(module, param, None)
                continue
            fused[full] = [f"{parent}.{part}.{name}" if parent else f"{part}.{name}" for part in parts]
            shard_ids: tuple[str | int, ...] = module.shard_ids  # type: ignore[assignment]
            for part_name, shard_id in zip(fused[full], shard_ids, strict=True):
                slots[part_name] = Slot(module, param, shard_id)
    return slots, fused


def _unused_patterns(model: nn.Module) -> list[str]:
    """Names and globs of tensors that may be in the file and are not read, from the model and its methods."""
    packed: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    patterns = [*UNUSED_TENSORS, *getattr(model, "unused_checkpoint_tensors", ())]
    for path, module in named_checkpoint_modules(model):
        method = getattr(module, "quant_method", None)
        parent, _, leaf = path.rpartition(".")
        for tensor in getattr(method, "unused_tensors", ()):
            patterns += [f"{parent}.{part}.{tensor}".lstrip(".") for part in (leaf, *packed.get(leaf, ()))]
    return patterns


def text_model_name(name: str) -> str:
    """A tensor's name without the component under which a vision-language model keeps its text model."""
    return name.removeprefix(TEXT_MODEL).replace("model." + TEXT_MODEL, "model.", 1)


def canonical_name(name: str) -> str:
    """A tensor's name as :func:`checkpoint_slots` spells it, whichever exporter wrote it."""
    for theirs, ours in KV_SCALE_ALIASES.items():
        if name.endswith(theirs):
            return name.removesuffix(theirs) + ours
    return name


def module_names(model: nn.Module) -> set[str]:
    """Every module's name in the checkpoint, parts of fused layers and fused layers alike."""
    packed: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    names: set[str] = set()
    for path, _ in named_checkpoint_modules(model):
        parent, _, leaf = path.rpartition(".")
        names.update(f"{parent}.{part}".lstrip(".") for part in (leaf, *packed.get(leaf, ())))
    return names


def _fill(slots: list[Slot], tensor: torch.Tensor) -> nn.Module:
    """Fill one slot, or the whole fused layer of several; returns the module."""
    slot = slots[0] if len(slots) == 1 else Slot(slots[0].module, slots[0].param, None)
    slot.fill(tensor)
    return slot.module


def _shown(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def load_weights(
    model: nn.Module,
    tensors: Iterable[tuple[str, torch.Tensor]],
    when_filled: Callable[[nn.Module], None] | None = None,
) -> None:
    """Fill ``model``'s parameters from ``tensors`` (checkpoint name, value).

    Args:
        when_filled: called with a module when the last tensor of its parameters was written, while others still wait
            for theirs: large models are never held in two forms at once. A module that lacks an optional tensor, or has
            no parameter, is not given to it.

    Raises:
        CheckpointError: a tensor is missing, unknown, given twice, or has a shape, dtype or value that its parameter
            can't take; the text names it.
    """
    slots, fused = checkpoint_slots(model)
    patterns = _unused_patterns(model)
    literal = {pattern for pattern in patterns if "*" not in pattern}
    globs = [pattern for pattern in patterns if "*" in pattern]
    waiting = Counter(slot.module for slot in slots.values())
    written: set[str] = set()
    unknown: dict[str, str] = {}
    for stored_name, tensor in tensors:
        name = canonical_name(text_model_name(stored_name))
        names = [name] if name in slots or name in written else fused.get(name, [])
        if not names:
            if name in literal or any(fnmatch.fnmatchcase(name, glob) for glob in globs):
                if any(fnmatch.fnmatchcase(name, glob) for glob in getattr(model, "unused_checkpoint_tensors", ())):
                    logger.warning("Tensor %s is stored but not used by this model's configuration.", stored_name)
                continue
            # Not an error yet: a weight of the wrong dtype, further on, says more than the scale that comes with it.
            unknown[name] = f"{tensor.dtype}, {list(tensor.shape)}"
            continue
        if not written.isdisjoint(names):
            raise CheckpointError(f"tensor {name} was given twice (by itself and as part of a fused tensor)")
        try:
            # No slot is left here or in slots, so that the module is the only one that holds its parameters.
            module = _fill([slots.pop(part) for part in names], tensor)
        except CheckpointError as error:
            raise CheckpointError(f"tensor {name}: {error}") from error
        written.update(names)
        waiting[module] -= len(names)
        if when_filled is not None and not waiting[module]:
            when_filled(module)
    for name, description in unknown.items():
        raise CheckpointError(
            f"tensor {name} ({description}) is in the checkpoint but no layer reads it; "
            f"is {name.rpartition('.')[0]} quantised in another way than the checkpoint's config says?"
        )
    absent = [name for name, slot in slots.items() if getattr(slot.param, "optional", False)]
    if absent:
        logger.info("The checkpoint has no %s; their neutral value is used.", _shown(absent))
    missing = [name for name in slots if name not in absent]
    if missing:
        hint = ""
        if any("scale" in name for name in missing):
            hint = "; if these layers are not quantised, the checkpoint's quantisation config must exclude them"
        raise CheckpointError(f"the checkpoint lacks {_shown(missing)}{hint}")


def fill_with_dummy_weights(model: nn.Module) -> None:
    """Small random values (``--load-format dummy``), made where the parameters are: to measure speed without a
    checkpoint. They follow from torch's seed and the kind of device."""

    def is_scale(param: torch.Tensor) -> bool:  # of which only positive ones are legal
        return getattr(param, "check", None) in (check_global_scale, check_kv_scale)

    generators: dict[torch.device, torch.Generator] = {}
    for param in model.parameters():
        device = param.device
        if device not in generators:
            generators[device] = torch.Generator(device).manual_seed(torch.initial_seed())
        generator = generators[device]
        if param.dtype == torch.uint8:
            param.data.random_(0, 256, generator=generator)
        elif param.dtype == torch.float8_e4m3fn:
            param.data.copy_(torch.rand(param.shape, generator=generator, device=device))
        elif is_scale(param) or (param.dim() == 1 and not hasattr(param, "output_dim")):  # the latter are norms
            param.data.fill_(1e-2)
        else:
            param.data.uniform_(-1e-2, 1e-2, generator=generator)


def weight_bytes(model: nn.Module) -> int:
    """Memory that the model's weights take, in the form in which they are multiplied."""
    total = 0
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, LinearMethodBase):
            total += method.weight_bytes(module)
        else:
            own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
            total += sum(tensor.nbytes for tensor in own)
    return total


def load_model(model: nn.Module, model_path: str | Path, load_format: str = "auto", progress: bool = True) -> None:
    """Fill every parameter of ``model`` from the folder ``model_path`` and prepare its layers for use.

    Args:
        load_format: "auto" and "safetensors" read the folder's safetensors files, "dummy" invents values.

    Raises:
        CheckpointError: the checkpoint can't be loaded exactly; the text names the file or tensor.
    """
    processed: set[nn.Module] = set()

    def process(module: nn.Module) -> None:
        method = getattr(module, "quant_method", None)
        if method is not None and module not in processed:
            processed.add(module)
            method.process_weights_after_loading(module)

    if load_format == "dummy":
        fill_with_dummy_weights(model)
    else:
        load_weights(model, iterate_tensors(model_path, progress), process)
    for module in model.modules():
        process(module)
    check_all_or_no_scales(model)
