"""The base fixture, and that its comparison sees what it must see."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoints import Shape, base
from harness import assert_layers_match, layer_errors, load
from oracle import Oracle

Written = Callable[..., Path]


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_base_matches(tp_size: int, written: Written) -> None:
    assert_layers_match(written(base(Shape(vocab=449))), tp_size=tp_size)


@pytest.mark.parametrize("tensor", ["weight", "weight_scale", "weight_scale_2", "input_scale"])
def test_a_small_change_of_any_tensor_shows(tensor: str, written: Written) -> None:
    """The model is loaded from a file that differs from the oracle's in one row, or in one scale by 1 %."""
    honest, changed = base(), base()
    name = f"model.layers.0.self_attn.k_proj.{tensor}"
    value = changed.tensors[name]
    if value.dim() == 0:
        changed.tensors[name] = value * 1.01
    else:
        rows = value.view(torch.uint8).clone()
        rows[0] = rows[1]
        changed.tensors[name] = rows.view(value.dtype)
    oracle = Oracle(written(honest) / "model.safetensors")
    errors, _ = layer_errors([load(written(changed), dtype="bfloat16")], oracle)
    wrong = {name for name, error in errors.items() if error > 0.003}
    shared = {"q", "k", "v"} if tensor == "input_scale" else {"k"}
    assert wrong == {f"model.layers.0.self_attn.{part}_proj" for part in shared}
