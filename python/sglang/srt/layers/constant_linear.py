"""Products with constant weights on a CPU.

:class:`ConstantLinear`: oneDNN with the weight laid out for it once, instead of on every call. ``F.linear`` reads a
row-major weight. The packed product takes a third to two thirds of its time for few rows of x, in float32 and in
bfloat16, and is not slower for many. The operators are those of torch's own inductor for frozen weights.

:class:`Bf16Linear`: a float32 product whose weight is kept in bfloat16, where that loses nothing: half the bytes.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F

from sglang.srt.layers.operators import TORCH_OPERATORS, operators_for


class ConstantLinear:
    """``x W^T`` for a weight that never changes, kept in the layout that is fastest where it lies.

    Args:
        weight: [N, K], floating point. Where packing works (a CPU, and a build of torch that has it for the dtype) only
            the packed copy is kept.
        float32_output: do not round the sums to the weight's dtype. On a CPU this keeps a float32 weight.
    """

    def __init__(self, weight: torch.Tensor, float32_output: bool = False) -> None:
        self._float32 = float32_output and weight.dtype != torch.float32
        if self._float32 and weight.device.type == "cpu":
            weight = weight.float()
        self._packed = weight.device.type == "cpu" and weight.numel() > 0 and _works(weight.dtype)
        self._weight = _pack(weight) if self._packed else weight

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """``x`` [..., K] in the weight's dtype to [..., N], plus ``bias`` [N]."""
        if self._float32:
            if self._weight.device.type != "cpu":
                y = torch.mm(x.reshape(-1, x.shape[-1]), self._weight.T, out_dtype=torch.float32)
                y = y.reshape(*x.shape[:-1], y.shape[-1])
                return y if bias is None else y + bias
            x, bias = x.float(), None if bias is None else bias.float()
        return _packed_linear(x, self._weight, bias) if self._packed else F.linear(x, self._weight, bias)

    @property
    def nbytes(self) -> int:
        return self._weight.numel() * self._weight.element_size()


class Bf16Linear:
    """``x W^T + bias`` in float32, for a weight that never changes. A row of the result has the same bits whatever the
    other rows and the number of threads are.

    Args:
        weight: bfloat16 [N, K] on a CPU, kept as it is.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight.contiguous()
        self._multiply = operators_for("cpu").bf16_linear

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """``x`` [..., K] floating point to float32 [..., N], plus ``bias`` [N]."""
        rows = x.reshape(-1, x.shape[-1])
        rows = rows if rows.dtype in (torch.float32, torch.bfloat16) else rows.float()
        y = self._multiply(rows, self.weight, None if bias is None else bias.float())
        return y.view(*x.shape[:-1], y.shape[-1])

    @property
    def nbytes(self) -> int:
        return self.weight.numel() * self.weight.element_size()


def constant_linear(weight: torch.Tensor, float32_output: bool = False) -> ConstantLinear | Bf16Linear:
    """The product for a checkpoint's weight: :class:`Bf16Linear` where the result is float32, our kernels run and every
    value is a bfloat16, as where a bfloat16 checkpoint was loaded in float32; else :class:`ConstantLinear`."""
    exact = as_bf16(weight) if float32_output or weight.dtype == torch.float32 else None
    return ConstantLinear(weight, float32_output) if exact is None else Bf16Linear(exact)


def as_bf16(weight: torch.Tensor) -> torch.Tensor | None:
    """``weight`` in bfloat16 if :class:`Bf16Linear` can multiply with it and every value stays what it is."""
    if weight.device.type != "cpu" or weight.dtype not in (torch.float32, torch.bfloat16) or weight.numel() == 0:
        return None
    if operators_for("cpu") is TORCH_OPERATORS:
        return None
    stored = weight.to(torch.bfloat16)
    return stored if weight.dtype == torch.bfloat16 or torch.equal(stored.float(), weight) else None


def _packed_linear(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return out


def _pack(weight: torch.Tensor) -> torch.Tensor:
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)
    return packed


@cache
def _works(dtype: torch.dtype) -> bool:
    """Whether a small product comes out right."""
    if not torch.backends.mkldnn.is_available():
        return False
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(rows, 48, generator=generator).to(dtype) for rows in (3, 32))
    try:
        with torch.inference_mode():
            result = _packed_linear(x, _pack(weight))
    except (RuntimeError, AttributeError):  # no such operator, or none for this dtype on this CPU
        return False
    return torch.allclose(result.float(), F.linear(x.float(), weight.float()), rtol=0.02, atol=0.1)
