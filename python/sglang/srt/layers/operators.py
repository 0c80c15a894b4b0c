"""What a transformer computes between its products, behind one object per kind of device.

:class:`Operators` is torch's own: it runs anywhere, and every other implementation is held against it by one test.
"""

from __future__ import annotations

import logging
import math
from functools import cache

import torch
import torch.nn.functional as F

from sglang.kernels import cpu_extension
from sglang.srt.mem_cache.memory_pool import store_rows
from sglang.srt.sampling.sampling_batch_info import BROKEN_LOGITS, NOTHING_POSSIBLE

logger = logging.getLogger(__name__)


class Operators:
    """torch's operators. In bfloat16 and float16 every result is rounded once, except where a line says otherwise."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """``x / rms(x) * weight`` over the last dimension of x [..., n]; statistics in float32."""
        return F.rms_norm(x, weight.shape, weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(rms_norm(x + residual), x + residual); the sum is rounded, and may be written into x."""
        x.add_(residual)
        return self.rms_norm(x, weight, eps), x

    def norm_heads(
        self, q: torch.Tensor, k: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``rms_norm`` of every head of q [T, heads, dim] and k [T, kv_heads, dim]; may be written into q and k."""
        return self.rms_norm(q, q_weight, eps), self.rms_norm(k, k_weight, eps)

    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        """``silu(x[..., :n]) * x[..., n:]`` for x [..., 2n]; both steps are rounded."""
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
        """``x * cos`` (rounded) ``+ roll(x, dim / 2) * signed_sin`` for x [T, heads, dim]; the others are [T, 1, dim].

        May be written into x.
        """
        return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), signed_sin)

    def rotate_and_store(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cos: torch.Tensor,
        signed_sin: torch.Tensor,
        key_buffer: torch.Tensor,
        value_buffer: torch.Tensor,
        loc: torch.Tensor,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> None:
        """Rotate q [T, heads, dim] and k [T, kv_heads, dim] in place, as :meth:`rotate` does; then write k and v to
        rows ``loc`` [T] int64 of the buffers [slots, kv_heads, dim].

        A float8_e4m3fn buffer holds k / k_scale and v / v_scale, saturated at 448; others ignore the scales.
        """
        for x in (q, k):
            rotated = self.rotate(x, cos, signed_sin)
            if rotated is not x:
                x.copy_(rotated)
        store_rows(key_buffer, loc, k, k_scale)
        store_rows(value_buffer, loc, v, v_scale)

    def cos_sin(
        self, positions: torch.Tensor, inv_freq: torch.Tensor, factor: float, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What :meth:`rotate` takes, [T, 1, dim] of ``dtype``: cosines and sines of ``positions * inv_freq`` in
        float32, times ``factor``; the sines are negative in a head's first half.

        Args:
            positions: int64 [T].
            inv_freq: float32 [dim / 2], or [T, dim / 2] where they depend on the position.
        """
        angles = positions.unsqueeze(-1).float() * inv_freq
        cos, sin = angles.cos(), angles.sin()
        if factor != 1.0:
            cos, sin = cos * factor, sin * factor
        return (
            torch.cat((cos, cos), dim=-1).to(dtype).unsqueeze(1),
            torch.cat((-sin, sin), dim=-1).to(dtype).unsqueeze(1),
        )

    def embedding(
        self, ids: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype, first: int | None = None
    ) -> torch.Tensor:
        """Rows ``ids - first`` of weight [size, n] in ``dtype``, for ids [T] int64.

        With ``first`` other ranks hold the rows of other ids, for which the result is zero. Without, the weight is the
        whole vocabulary, and an id outside of it is an error of the device.
        """
        if first is None:
            return F.embedding(ids, weight).to(dtype)
        local = ids - first
        elsewhere = (local < 0) | (local >= weight.shape[0])
        rows = F.embedding(local.masked_fill_(elsewhere, 0), weight).to(dtype)
        return rows.masked_fill_(elsewhere.unsqueeze(-1), 0)

    def greedy(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The largest logit of each row of x [rows, n], NaN where there is one, and the first token that has it, int64:
        ``BROKEN_LOGITS`` where it is NaN or infinite, ``NOTHING_POSSIBLE`` where it is -infinity."""
        values, ids = x.max(dim=-1)
        ids = torch.where(values.abs() < math.inf, ids, BROKEN_LOGITS)  # False for a NaN, too
        return values, ids.masked_fill_(values == -math.inf, NOTHING_POSSIBLE)

    def bf16_linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """``x weight^T + bias`` in float32: x [M, K] float32 or bfloat16, weight [N, K] bfloat16, bias [N] float32."""
        return F.linear(x.float(), weight.float(), bias)


TORCH_OPERATORS = Operators()


@cache
def operators_for(device_type: str) -> Operators:
    """The operators for tensors on a "cpu", "cuda", ... device.

    The first call compiles ours for a CPU, or makes sure that they can be compiled for the current GPU; else the log
    says why torch's are used.
    """
    if device_type == "cuda" and torch.cuda.is_available():
        return _cuda_operators()
    if device_type != "cpu":
        return TORCH_OPERATORS
    if cpu_extension.unavailable() is not None:
        logger.warning(
            "torch computes everything on this CPU, our faster kernels can't be had: `python -m sglang.check_env` says "
            "why (backend cpu) and what would change it"
        )
        return TORCH_OPERATORS
    from sglang.srt.layers.cpu_operators import CpuOperators

    return CpuOperators()


def _cuda_operators() -> Operators:
    from sglang.kernels import layers
    from sglang.srt.layers.cuda_operators import CudaOperators

    reason = layers.unavailable(torch.cuda.current_device())
    if reason is None:
        return CudaOperators()
    logger.warning("torch computes norms, gates and rotations on this GPU, slower than our kernels: %s", reason)
    return TORCH_OPERATORS
