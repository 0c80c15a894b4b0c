"""NVFP4 layers with random bytes, and inputs for them."""

import torch

from sglang.srt.layers.quantization.nvfp4 import Activation, NvFp4Weight

# N as the parts of a fused layer, and K: aligned; N no multiple of 32; K below one tile; K no multiple of 32 * 4.
SHAPES: dict[str, tuple[tuple[int, ...], int]] = {
    "256x512": ((128, 64, 64), 512),
    "1000x96": ((500, 300, 200), 96),
    "96x48": ((40, 32, 24), 48),
    "200x3696": ((120, 80), 3696),
}
ROWS = (0, 1, 7, 129)


def random_input(rows: int, columns: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Rows of very different magnitudes, so that a scale applied to another row shows."""
    generator = torch.Generator().manual_seed(seed)
    magnitude = torch.exp2(torch.randint(-3, 3, (rows, 1), generator=generator).float())
    return (torch.randn(rows, columns, generator=generator) * magnitude).to(dtype)


def random_weight(
    shape: str,
    dtype: torch.dtype = torch.bfloat16,
    activation: Activation = Activation.STATIC,
    equal_scales: bool = True,
    seed: int = 0,
) -> NvFp4Weight:
    """Every code, block scales over a factor of 60; global scales of the parts equal, or 1 : 3 : 9."""
    part_sizes, columns = SHAPES[shape]
    rows = sum(part_sizes)
    generator = torch.Generator().manual_seed(seed)
    scale = torch.randint(0x28, 0x58, (rows, columns // 16), dtype=torch.uint8, generator=generator)
    static = activation is Activation.STATIC
    # Smaller than amax / 2688, so that some values saturate.
    input_scale = torch.tensor(5.0 / 2688) if static else None
    factors = torch.ones(len(part_sizes)) if equal_scales else 3.0 ** torch.arange(len(part_sizes))
    weight = NvFp4Weight(
        packed=torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, generator=generator),
        scale=scale.view(torch.float8_e4m3fn),
        global_scales=0.0031 * factors,
        part_sizes=part_sizes,
        activation=activation,
        dtype=dtype,
        input_scale=input_scale,
        input_scale_inv=None if input_scale is None else 1.0 / input_scale,
    )
    weight.check()
    return weight
