"""What every linear layer must compute: float64 from the bytes of the file, and nothing of the product's code."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from checkpoints import FIXTURES


def import_file(path: Path) -> ModuleType:
    """A module by its file, once a process."""
    if path.stem not in sys.modules:
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
    return sys.modules[path.stem]


ref = import_file(FIXTURES / "scripts" / "reference_model.py")
Array = np.ndarray[Any, np.dtype[Any]]
# Relative error of a bf16 or fp16 output (its rounding is 0.0017) and of a float32 one.
TOLERANCE = {torch.bfloat16: 0.003, torch.float16: 0.002, torch.float32: 1e-5}


def array(x: torch.Tensor) -> Array:
    return x.detach().float().numpy()


class Oracle:
    """The layers of one safetensors file.

    Args:
        activation: how NVFP4 and FP8 layers treat their input, by name: "static", "dynamic" or "none". Default:
            static where the file has an input scale.
    """

    def __init__(self, file: Path, activation: Callable[[str], str] | None = None) -> None:
        self.tensors: dict[str, tuple[str, Array]] = ref.read_safetensors(file)
        self.activation = activation or (lambda name: "static" if self.has_input_scale(name) else "none")

    def scalar(self, name: str) -> np.float32:
        value: np.float32 = np.float32(self.tensors[name][1].reshape(-1)[0])
        return value

    def has_input_scale(self, name: str) -> bool:
        return name + ".input_scale" in self.tensors or name + ".input_global_scale" in self.tensors

    def kind(self, name: str) -> str:
        if name + ".weight_packed" in self.tensors:
            return "nvfp4"
        return {"U8": "nvfp4", "F8_E4M3": "fp8"}.get(self.tensors[name + ".weight"][0], "plain")

    def weight(self, name: str) -> Array:
        """float64 [N, K]."""
        kind, t = self.kind(name), self.tensors
        if kind == "plain":
            return t[name + ".weight"][1].astype(np.float64)
        if kind == "fp8":
            scale: Array = ref.E4M3[t[name + ".weight"][1]] * np.float64(self.scalar(name + ".weight_scale"))
            return scale
        if name + ".weight_packed" in t:
            packed, scale_2 = (
                t[name + ".weight_packed"][1],
                1.0 / np.float64(self.scalar(name + ".weight_global_scale")),
            )
        else:
            packed, scale_2 = t[name + ".weight"][1], np.float64(self.scalar(name + ".weight_scale_2"))
        weight: Array = ref.dequant(ref.unpack(packed), t[name + ".weight_scale"][1], scale_2)
        return weight

    def scales(self, name: str) -> tuple[np.float32, np.float64]:
        """What the quantiser of the input takes, and the multiplier."""
        if name + ".input_global_scale" in self.tensors:
            inverse = self.scalar(name + ".input_global_scale")
            return inverse, 1.0 / np.float64(inverse)
        scale = self.scalar(name + ".input_scale")
        return np.float32(1) / scale, np.float64(scale)

    def inputs(self, names: Sequence[str], x: Array, dtype: torch.dtype) -> list[Array]:
        """What each part multiplies its weight with. Parts of one kind share the largest input scale."""
        kinds = {(self.kind(name), self.activation(name)) for name in names}
        result = []
        for name in names:
            sharing = names if len(kinds) == 1 else [name]
            kind, a = self.kind(name), x
            if name + ".pre_quant_scale" in self.tensors:
                a = rounded(x.astype(np.float32) * self.tensors[name + ".pre_quant_scale"][1].astype(np.float32), dtype)
            if kind == "fp8" and self.activation(name) != "none":
                if self.activation(name) == "dynamic":
                    scale = np.maximum(np.abs(a).max(-1, keepdims=True) / np.float32(448), np.finfo(np.float32).tiny)
                else:
                    scale = np.float32(max(self.scalar(part + ".input_scale") for part in sharing))
                a = ref.E4M3[ref.e4m3_byte(a.astype(np.float32) / scale)] * np.float64(scale)
            elif kind == "nvfp4" and self.activation(name) == "static":
                inverse, scale_64 = min(self.scales(part) for part in sharing)
                a = ref.dequant(*ref.quantize(a, inverse), scale_64)
            elif kind == "nvfp4" and self.activation(name) == "dynamic":
                amax = np.float32(np.abs(a).max())
                dynamic = np.maximum(amax / np.float32(2688), np.finfo(np.float32).tiny)
                a = ref.dequant(*ref.quantize(a, np.float32(1) / dynamic), np.float64(dynamic))
            result.append(a.astype(np.float64))
        return result

    def outputs(self, names: Sequence[str], x: torch.Tensor) -> list[Array]:
        """float64 [..., N] of each part, for the input that the fused layer gets."""
        rows = array(x).reshape(-1, x.shape[-1])
        result = []
        for name, a in zip(names, self.inputs(names, rows, x.dtype), strict=True):
            y = a @ self.weight(name).T
            if name + ".bias" in self.tensors:
                y = y + self.tensors[name + ".bias"][1].astype(np.float64)
            result.append(y.reshape(*x.shape[:-1], -1))
        return result


def rounded(x: Array, dtype: torch.dtype) -> Array:
    if dtype == torch.float32:
        return x
    result: Array = ref.bf16(x) if dtype == torch.bfloat16 else x.astype(np.float16)
    return result


def relative_error(y: torch.Tensor | Array, expected: Array) -> float:
    """The largest of the rows' errors, each relative to the norm of the row. NaN anywhere gives infinity."""
    actual = array(y).astype(np.float64) if isinstance(y, torch.Tensor) else y
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    if not np.isfinite(actual).all():
        return float("inf")
    norms = np.linalg.norm(expected, axis=-1)
    floor = 1e-3 * max(float(norms.max(initial=0.0)), 1e-30)
    errors = np.linalg.norm(actual - expected, axis=-1) / np.maximum(norms, floor)
    return float(errors.max(initial=0.0))
