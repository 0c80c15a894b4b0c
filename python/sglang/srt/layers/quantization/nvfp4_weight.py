"""Quantising weights to NVFP4 exactly as NVIDIA's ModelOpt exporter does.

ModelOpt divides where FlashInfer's activation quantiser (``nvfp4_utils.quantize_nvfp4``) multiplies by reciprocals,
never writes a block scale below the smallest E4M3 subnormal, and drops the sign of -0. Its files can only be
reproduced byte for byte by the same steps, all in fp32:

    global = amax(W) / (6 * 448)                                   the largest among the parts of a fused layer
    scale  = e4m3(clamp(amax(block) / (6 * global), 2^-9, 448))    1 for a block of zeros
    code   = e2m1(w / (value(scale) * global))
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from sglang.srt.layers.quantization.nvfp4_utils import BLOCK_SIZE, E2M1_MAX, E4M3_MAX, nvfp4_global_scale, pack

_E4M3_SMALLEST = 2.0**-9
# Rows are quantised in pieces of about this many elements: fp32 copies take 16 MB each. Larger pieces are slower (page
# faults); smaller ones gain nothing on idle cores and are many times slower on busy ones (a barrier per operation).
_PIECE = 1 << 22


def global_scale_from_amax(amax: float) -> torch.Tensor:
    """``weight_scale_2`` or ``input_scale``, a float32 scalar, for a tensor whose largest magnitude is ``amax``.

    It is amax / 2688, and 1 for a tensor of zeros: ModelOpt writes 0 there and NaN block scales, which no loader can
    use, and with 1 an input that was zero only during calibration still passes.
    """
    return nvfp4_global_scale(torch.tensor(amax, dtype=torch.float32)) if amax else torch.ones(())


def unify_fused_amax(amax: Mapping[str, float], fused: Iterable[Sequence[str]]) -> dict[str, float]:
    """Give the parts of each fused layer the largest amax among them.

    Args:
        amax: largest magnitude by module name (``model.layers.0.self_attn.q_proj``). Only the modules present are
            unified: a part that is not quantised has no say.
        fused: the projections of each fused layer (``["q_proj", "k_proj", "v_proj"]``).
    """
    unified = dict(amax)
    layer_of = {projection: index for index, projections in enumerate(fused) for projection in projections}
    layers: dict[tuple[str, int], list[str]] = {}
    for name in amax:
        parent, _, projection = name.rpartition(".")
        if projection in layer_of:
            layers.setdefault((parent, layer_of[projection]), []).append(name)
    for parts in layers.values():
        unified.update(dict.fromkeys(parts, max(amax[part] for part in parts)))
    return unified


def quantize_nvfp4_weight(weight: torch.Tensor, global_scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round a weight to NVFP4, bit for bit as ModelOpt does.

    Args:
        weight: [N, K], any floating dtype, finite, K a multiple of 16.
        global_scale: float32 scalar multiplier, from :func:`global_scale_from_amax`.

    Returns:
        packed codes uint8 [N, K / 2] and block scales float8_e4m3fn [N, K / 16], on the device of ``weight``.

    Raises:
        ValueError: ``weight`` is not 2-D or K is not a multiple of 16.
    """
    if weight.dim() != 2 or weight.shape[1] % BLOCK_SIZE:
        raise ValueError(f"weight must be [N, K] with K a multiple of {BLOCK_SIZE}, got {list(weight.shape)}")
    rows, columns = weight.shape
    packed = torch.empty(rows, columns // 2, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(rows, columns // BLOCK_SIZE, dtype=torch.float8_e4m3fn, device=weight.device)
    global_scale = global_scale.to(weight.device)
    step = max(1, _PIECE // columns)
    for start in range(0, rows, step):
        piece = slice(start, start + step)
        packed[piece], scales[piece] = _quantize_piece(weight[piece], global_scale)
    return packed, scales


def _quantize_piece(weight: torch.Tensor, global_scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = weight.float().unflatten(-1, (-1, BLOCK_SIZE))
    wanted = blocks.abs().amax(-1) / (E2M1_MAX * global_scale)
    wanted = wanted.masked_fill_(wanted == 0, 1.0).clamp_(_E4M3_SMALLEST, E4M3_MAX)
    scale = wanted.to(torch.float8_e4m3fn)
    scaled = blocks / (scale.float() * global_scale).unsqueeze(-1)
    return pack(_to_e2m1(scaled.flatten(-2))), scale


def _to_e2m1(x: torch.Tensor) -> torch.Tensor:
    """``nvfp4_utils.to_e2m1`` without the sign of -0; for large tensors three times as fast on CPU."""
    magnitude = x.abs()
    code = (x < 0).to(torch.uint8) << 3
    # Strictly above a midpoint, except where the code above it is the even one.
    for midpoint in (0.25, 1.25, 2.5, 5.0):
        code += magnitude > midpoint
    for midpoint in (0.75, 1.75, 3.5):
        code += magnitude >= midpoint
    return code
