"""Rotary position embedding: the frequencies of each ``rope_type`` as transformers computes them, and the rotation.

Cosines and sines are computed once per step, in fp32, for the step's positions; there is no table, hence no limit on
positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from sglang.srt.errors import CheckpointError
from sglang.srt.layers.operators import operators_for

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Parameters = Mapping[str, Any]


def _number(parameters: Parameters, key: str, default: float | None = None) -> float:
    value = parameters.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int | float):
        rope_type = parameters.get("rope_type")
        raise CheckpointError(
            f"config.json: rope_parameters.{key} of rope_type {rope_type!r} is {value!r}, not a number"
        )
    return value


def _base_frequencies(base: float, dim: int) -> torch.Tensor:
    exponents = torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim
    return 1.0 / (base**exponents)


def _default(parameters: Parameters, dim: int, max_position: int) -> tuple[torch.Tensor, float]:
    return _base_frequencies(_number(parameters, "rope_theta"), dim), 1.0


def _linear(parameters: Parameters, dim: int, max_position: int) -> tuple[torch.Tensor, float]:
    return _base_frequencies(_number(parameters, "rope_theta"), dim) / _number(parameters, "factor"), 1.0


def _llama3(parameters: Parameters, dim: int, max_position: int) -> tuple[torch.Tensor, float]:
    inv_freq = _base_frequencies(_number(parameters, "rope_theta"), dim)
    factor = _number(parameters, "factor")
    low, high = _number(parameters, "low_freq_factor"), _number(parameters, "high_freq_factor")
    original = _number(parameters, "original_max_position_embeddings", max_position)
    wavelength = 2 * math.pi / inv_freq
    smooth = (original / wavelength - low) / (high - low)
    blended = (1 - smooth) * inv_freq / factor + smooth * inv_freq
    scaled = torch.where(wavelength > original / low, inv_freq / factor, blended)
    return torch.where(wavelength < original / high, inv_freq, scaled), 1.0


def _yarn(parameters: Parameters, dim: int, max_position: int) -> tuple[torch.Tensor, float]:
    base = _number(parameters, "rope_theta")
    original = _number(parameters, "original_max_position_embeddings", max_position)
    factor = _number(parameters, "factor", max_position / original)

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    attention_factor = parameters.get("attention_factor")
    if attention_factor is None:
        numerator, denominator = parameters.get("mscale"), parameters.get("mscale_all_dim")
        attention_factor = mscale(numerator) / mscale(denominator) if numerator and denominator else mscale(1.0)

    def dimension_of(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low = dimension_of(parameters.get("beta_fast") or 32)
    high = dimension_of(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32, device="cpu") - low) / (high - low)).clamp(0, 1)
    powers = base ** (torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim)
    return 1.0 / (factor * powers) * ramp + 1.0 / powers * (1 - ramp), float(attention_factor)


# rope_type to a function of (rope parameters, head dimension, max_position_embeddings) that returns the inverse
# frequencies [dim / 2] and the factor on cosines and sines.
ROPE_TYPES: dict[str, Callable[[Parameters, int, int], tuple[torch.Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _default,
    "llama3": _llama3,
    "yarn": _yarn,
}


class RotaryEmbedding(nn.Module):
    """Cosines and sines of positions.

    ``rope_type`` "dynamic" stretches the frequencies once a sequence outgrows ``max_position_embeddings``. Here the
    rule is one per position: position p rotates by the frequencies of a sequence of p + 1 tokens. A cached key thus
    never depends on what came after it. This is what transformers computes where a sequence grows token by token; a
    longer prompt given to transformers as a whole rotates every token by the frequencies of the prompt's length.

    Args:
        head_dim: size of a head; all of it is rotated.
        max_position_embeddings: the model's own context length.
        parameters: ``rope_parameters`` of a transformers config.

    Raises:
        CheckpointError: unsupported type, or a parameter is missing or not a number.
    """

    inv_freq: torch.Tensor

    def __init__(self, head_dim: int, max_position_embeddings: int, parameters: Parameters) -> None:
        super().__init__()
        rope_type = parameters.get("rope_type", "default")
        if rope_type not in ROPE_TYPES:
            raise CheckpointError(
                f"config.json: rope_type {rope_type!r} is not supported; supported: {', '.join(ROPE_TYPES)}"
            )
        if parameters.get("partial_rotary_factor") not in (None, 1.0):
            raise CheckpointError(
                f"config.json: partial_rotary_factor {parameters['partial_rotary_factor']} is not supported, only 1.0"
            )
        inv_freq, self.attention_factor = ROPE_TYPES[rope_type](parameters, head_dim, max_position_embeddings)
        self.register_buffer("inv_freq", inv_freq.to(torch.get_default_device()), persistent=False)
        self.head_dim = head_dim
        self.max_position_embeddings = max_position_embeddings
        self.base = _number(parameters, "rope_theta")
        self.dynamic_factor = _number(parameters, "factor") if rope_type == "dynamic" else None

    def forward(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """What :func:`apply_rotary` needs for ``positions`` [T]: two tensors [T, 1, head_dim] of ``dtype``."""
        inv_freq = self.inv_freq if self.dynamic_factor is None else self._dynamic_frequencies(positions)
        return operators_for(positions.device.type).cos_sin(positions, inv_freq, self.attention_factor, dtype)

    def _dynamic_frequencies(self, positions: torch.Tensor) -> torch.Tensor:
        factor, limit, dim = self.dynamic_factor, self.max_position_embeddings, self.head_dim
        assert factor is not None
        length = (positions + 1).clamp(min=limit).unsqueeze(-1)
        base = self.base * (factor * length / limit - (factor - 1)) ** (dim / (dim - 2))
        exponents = torch.arange(0, dim, 2, dtype=torch.float32, device=positions.device) / dim
        return 1.0 / (base**exponents)


def get_rope(config: PretrainedConfig, head_dim: int) -> RotaryEmbedding:
    """The rotary embedding that a transformers config describes."""
    return RotaryEmbedding(head_dim, config.max_position_embeddings, config.rope_parameters)


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    """Rotate ``x`` [T, heads, head_dim]: the first half of a head is paired with its second half.

    ``signed_sin`` is negative in the first half. The result may be written into ``x``, which the caller must not use
    again.
    """
    return operators_for(x.device.type).rotate(x, cos, signed_sin)
