"""Checkpoints of the fixtures' shape with other weights, and copies of a checkpoint with something wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from sglang.quantize import quantize_checkpoint

FIXTURES = Path(__file__).parent / "fixtures"
NVFP4 = FIXTURES / "tiny-llama-modelopt-nvfp4"

Tensors = dict[str, torch.Tensor]


def make_second_checkpoint(folder: Path) -> Path:
    """A ModelOpt NVFP4 checkpoint of other weights, in ``folder``/second; made from the fixture's bf16 source."""
    source = folder / "second-bf16"
    shutil.copytree(FIXTURES / "tiny-llama-bf16", source)
    generator = torch.Generator().manual_seed(0)

    def disturb(value: torch.Tensor) -> torch.Tensor:
        return (value * (1 + 0.2 * torch.randn(value.shape, generator=generator))).to(value.dtype)

    tensors = load_file(source / "model.safetensors")
    save_file({name: disturb(value) for name, value in tensors.items()}, source / "model.safetensors")
    text = str(FIXTURES / "README.md")
    quantize_checkpoint(str(source), str(folder / "second"), "nvfp4", calibration_text=text, show_progress=False)
    return folder / "second"


def copy_with(
    source: Path,
    folder: Path,
    tensors: Callable[[Tensors], Any] | None = None,
    cut: int = 0,
    **config: Any,
) -> Path:
    """``source`` in ``folder``, its tensors edited by ``tensors``, ``cut`` bytes shorter, with changes to config.json
    (None deletes a key)."""
    shutil.copytree(source, folder)
    file = folder / "model.safetensors"
    if tensors is not None:
        values = load_file(file)
        tensors(values)
        save_file(values, file)
    if cut:
        file.write_bytes(file.read_bytes()[:-cut])
    if config:
        changed = {**json.loads((folder / "config.json").read_text()), **config}
        (folder / "config.json").write_text(json.dumps({k: v for k, v in changed.items() if v is not None}))
    return folder


DOWN = "model.layers.1.mlp.down_proj"


def _fill_byte(tensors: Tensors) -> None:
    tensors[f"{DOWN}.weight_scale"].view(torch.uint8)[3, 5] = 0x7F


def _drop_layer(tensors: Tensors) -> None:
    for name in [name for name in tensors if name.startswith("model.layers.1.")]:
        del tensors[name]


# What is wrong: how to make it, and words of the refusal.
BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "missing": ({"tensors": lambda t: t.pop(f"{DOWN}.weight_scale_2")}, f"lacks {DOWN}.weight_scale_2"),
    "extra": ({"tensors": lambda t: t.update({f"{DOWN}.extra": torch.ones(1)})}, f"{DOWN}.extra"),
    "layer": ({"tensors": _drop_layer}, "lacks model.layers.1."),
    "shape": (
        {"tensors": lambda t: t.update({f"{DOWN}.weight": t[f"{DOWN}.weight"][16:]})},
        f"{DOWN}.weight: expected",
    ),
    "nan-scale": ({"tensors": _fill_byte}, f"{DOWN}.weight_scale: block scale [3, 5] is 0x7F"),
    "zero-global": ({"tensors": lambda t: t[f"{DOWN}.weight_scale_2"].zero_()}, f"{DOWN}.weight_scale_2"),
    "truncated": ({"cut": 4096}, "model.safetensors can't be read"),
    "vocabulary": ({"vocab_size": 384}, "vocab_size 384 instead of 320"),
    "layers": ({"num_hidden_layers": 1}, "num_hidden_layers 1 instead of 2"),
    "hidden": ({"hidden_size": 128}, "hidden_size 128 instead of 256"),
    "eos": ({"eos_token_id": 7}, "eos_token_ids"),
    "architecture": ({"architectures": ["MistralForCausalLM"]}, "MistralForCausalLM instead of LlamaForCausalLM"),
    "config": ({"hidden_size": None}, "hidden_size"),
}
