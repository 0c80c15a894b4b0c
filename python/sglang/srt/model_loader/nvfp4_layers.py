"""Single NVFP4 layers of a checkpoint with their weights, without loading the rest of the model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.errors import CheckpointError
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.quantization import get_quantization
from sglang.srt.layers.quantization.nvfp4 import NvFp4LinearMethod, NvFp4Weight
from sglang.srt.model_loader.checkpoint_reader import CheckpointReader
from sglang.srt.model_loader.loader import (
    canonical_name,
    checkpoint_slots,
    load_weights,
    module_names,
    named_checkpoint_modules,
    text_model_name,
)
from sglang.srt.models.registry import get_model_class
from sglang.srt.server_args import ServerArgs


@dataclass(frozen=True)
class CheckpointLayer:
    """A layer as the server would load it: its name in the checkpoint, weight, and bias [N] if it has one."""

    name: str
    weight: NvFp4Weight
    bias: torch.Tensor | None


def distinct_layers(server_args: ServerArgs, device: torch.device) -> Iterator[CheckpointLayer]:
    """The first NVFP4 layer of each shape (K, N of each fused part, activation, bias) in the model of ``server_args``,
    on ``device``.

    Raises:
        CheckpointError: the checkpoint can't be read, is not served, or has no NVFP4 layer.
        ArgumentError: an argument contradicts the checkpoint.
    """
    config = ModelConfig.from_server_args(server_args)
    quant_config = get_quantization(config, server_args)
    with torch.device("meta"):
        model = get_model_class(config.architecture)(config.hf_config, quant_config)
    if quant_config is not None:
        quant_config.check_names(module_names(model))
    chosen: dict[tuple[object, ...], str] = {}
    for path, module in model.named_modules():
        if isinstance(module, LinearBase) and isinstance(module.quant_method, NvFp4LinearMethod):
            sizes, has_bias = tuple(module.output_partition_sizes), module.bias is not None
            key = (module.input_size, sizes, module.quant_method.activation, has_bias)
            chosen.setdefault(key, path)
    if not chosen:
        raise CheckpointError(f"{config.model_path}: the checkpoint has no NVFP4 layer")
    reader = CheckpointReader(Path(config.model_path))
    for path in chosen.values():
        layer = model.get_submodule(path)
        assert isinstance(layer, LinearBase)
        yield _load(model, path, layer, reader, config.dtype, device)


def _load(
    model: nn.Module,
    path: str,
    like: LinearBase,
    reader: CheckpointReader,
    dtype: torch.dtype,
    device: torch.device,
) -> CheckpointLayer:
    """The layer ``like`` at ``path`` of ``model``, made anew on ``device`` and filled."""
    with device:
        layer = LinearBase(
            like.input_size,
            like.parts,
            input_is_sharded=like.input_is_sharded,
            bias=like.bias is not None,
            params_dtype=dtype,
            quant_config=like.quant_config,
            prefix=like.prefix,
            tp=like.tp,
        )
    # A model of this layer alone, so that the loader has nothing else to ask for.
    alone = nn.Module()
    alone.packed_modules_mapping = model.packed_modules_mapping
    parent = alone
    *above, leaf = path.split(".")
    for name in above:
        parent.add_module(name, nn.Module())
        parent = parent.get_submodule(name)
    parent.add_module(leaf, layer)
    slots, fused = checkpoint_slots(alone)
    wanted = {*slots, *fused}
    names = [name for name in reader.tensors if canonical_name(text_model_name(name)) in wanted]
    load_weights(alone, reader.read(names))
    name = next(name for name, module in named_checkpoint_modules(alone) if module is layer)
    method = layer.quant_method
    assert isinstance(method, NvFp4LinearMethod)
    return CheckpointLayer(name, method.stored_weight(layer), None if layer.bias is None else layer.bias.data)
