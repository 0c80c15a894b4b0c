"""A stand-in for FlashInfer's calls that decodes the documented buffers byte by byte and multiplies exactly.

It refuses what the kernels can't take, and leaves NaN in the padding of block scales, about which nothing is promised.
With it, random weights and inputs, and the exact product of them.
"""

import contextlib
import types

import torch

from sglang.srt.layers.quantization.fp4_backends.flashinfer import FlashInferBackend
from sglang.srt.layers.quantization.fp4_utils import Target, backends
from sglang.srt.layers.quantization.nvfp4 import Activation, NvFp4Weight
from sglang.srt.layers.quantization.nvfp4_utils import dequantize_nvfp4, quantize_nvfp4

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
NAN_BYTE = 0x7F

# N and K in multiples of these (mm_fp4), as its requirement checks and C++ checks say.
MULTIPLES = {"cutlass": (32, 32), "cudnn": (32, 32), "cute-dsl": (8, 32), "trtllm": (128, 64), "b12x": (8, 32)}
BFLOAT16_ONLY = {"trtllm"}


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def offsets_128x4(rows: int, columns: int, padded_columns: int) -> torch.Tensor:
    """Where element (r, c) lies in the flat buffer."""
    r, c = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    return (r // 128) * 128 * padded_columns + (c // 4) * 512 + (r % 32) * 16 + ((r % 128) // 32) * 4 + c % 4


def decode_128x4(scale: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    flat = scale.contiguous().flatten()
    return flat[offsets_128x4(rows, columns, scale.shape[1])].view(torch.float8_e4m3fn).double()


def old_row(new: torch.Tensor) -> torch.Tensor:
    lane = new % 32
    return new - lane + (lane % 8) * 4 + lane // 8


def codes(packed: torch.Tensor) -> torch.Tensor:
    result = torch.empty(packed.shape[0], packed.shape[1] * 2, dtype=torch.long)
    result[:, 0::2], result[:, 1::2] = (packed & 15).long(), (packed >> 4).long()
    return E2M1[result]


def values(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """float64 [rows, K]. The last tile of K is read with all its scales: NaN there makes the row NaN."""
    rows, blocks = packed.shape[0], packed.shape[1] // 8
    scales = decode_128x4(scale, rows, round_up(blocks, 4))
    exact = codes(packed) * scales[:, :blocks].repeat_interleave(16, dim=1)
    return exact + 0.0 * scales[:, blocks:].sum(dim=1, keepdim=True)


class Emulator(types.ModuleType):
    """``calls`` records (kernel, m, n, k) of every product, ``tuned`` the arguments of ``autotune``."""

    def __init__(self) -> None:
        super().__init__("flashinfer")
        self.calls: list[tuple[str, int, int, int]] = []
        self.tuned: list[tuple[bool, str | None]] = []

    def autotune(self, tune_mode: bool = True, cache: str | None = None) -> contextlib.AbstractContextManager[None]:
        self.tuned.append((tune_mode, cache))
        return contextlib.nullcontext()

    def fp4_quantize(self, input: torch.Tensor, global_scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert input.stride() == (input.shape[1], 1) and input.data_ptr() % 16 == 0 and input.shape[0] > 0
        assert input.dtype in (torch.bfloat16, torch.float16) and input.shape[1] % 16 == 0
        assert global_scale.dtype == torch.float32 and global_scale.shape == (1,)
        packed, scale = quantize_nvfp4(input, global_scale[0])
        rows, blocks = scale.shape
        padded = torch.full((round_up(rows, 128), round_up(blocks, 4)), NAN_BYTE, dtype=torch.uint8)
        padded.view(-1)[offsets_128x4(rows, blocks, padded.shape[1])] = scale.view(torch.uint8)
        return packed, padded

    def mm_fp4(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        a_descale: torch.Tensor,
        b_descale: torch.Tensor,
        alpha: torch.Tensor,
        out_dtype: torch.dtype,
        *,
        backend: str,
    ) -> torch.Tensor:
        m, n, k = a.shape[0], b.shape[1], a.shape[1] * 2
        assert n % MULTIPLES[backend][0] == 0 and k % MULTIPLES[backend][1] == 0, (backend, n, k)
        assert m > 0 and b.shape[0] == k // 2 and b.T.is_contiguous() and a.is_contiguous()
        assert a.dtype == b.dtype == a_descale.dtype == b_descale.dtype == torch.uint8
        padded_columns = round_up(k // 16, 4)
        assert a_descale.shape == (round_up(m, 128), padded_columns)
        assert b_descale.T.shape == (round_up(n, 128), padded_columns) and b_descale.T.is_contiguous()
        assert alpha.dtype == torch.float32 and alpha.shape == (1,)
        assert out_dtype == torch.bfloat16 or (out_dtype == torch.float16 and backend not in BFLOAT16_ONLY)
        self.calls.append((backend, m, n, k))
        weight = values(b.T, b_descale.T)
        if backend == "trtllm":
            restored = torch.empty_like(weight)
            restored[old_row(torch.arange(n))] = weight
            weight = restored
        return (values(a, a_descale) @ weight.T * alpha.double()).to(out_dtype)

    def prepare_bf16_fp4_weights(
        self, b: torch.Tensor, b_descale: torch.Tensor, alpha: torch.Tensor, *, backend: str
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        (n, half), blocks = b.shape, b.shape[1] // 8
        assert b.dtype == b_descale.dtype == torch.uint8 and b.is_contiguous() and b_descale.is_contiguous()
        assert b_descale.shape == (round_up(n, 128), round_up(blocks, 4)) and half % 8 == 0
        assert alpha.dtype == torch.float32 and alpha.shape == (1,)
        if backend == "cudnn":
            return b, decode_128x4(b_descale, n, blocks).to(torch.float8_e4m3fn), alpha
        if backend == "cute-dsl":
            tiles, quads = b_descale.shape[0] // 128, b_descale.shape[1] // 4
            return b, b_descale.view(tiles, quads, 32, 4, 4, 1).permute(2, 3, 0, 4, 1, 5), alpha
        assert backend == "cute-dsl-native"
        return b, b_descale, alpha

    def mm_bf16_fp4(
        self, a: torch.Tensor, b: torch.Tensor, b_descale: torch.Tensor, alpha: torch.Tensor, *, backend: str
    ) -> torch.Tensor:
        (m, k), n = a.shape, b.shape[0]
        assert m > 0 and a.dtype == torch.bfloat16 and a.is_contiguous() and b.shape == (n, k // 2)
        assert alpha.dtype == torch.float32 and alpha.shape == (1,)
        if backend == "cudnn":
            assert b_descale.dtype == torch.float8_e4m3fn and b_descale.shape == (n, k // 16)
            weight = codes(b) * b_descale.double().repeat_interleave(16, dim=1)
        else:
            assert n % 64 == 0 and k % 64 == 0
            assert all(t.data_ptr() % align == 0 for t, align in ((a, 32), (b, 32), (b_descale, 16), (alpha, 16)))
            if backend == "cute-dsl":
                b_descale = b_descale.permute(2, 4, 0, 1, 3, 5).reshape(round_up(n, 128), k // 16)
            weight = values(b, b_descale)
        self.calls.append((backend, m, n, k))
        return (a.double() @ weight.T * alpha.double()).bfloat16()


def make_weight(
    parts: list[int],
    k: int,
    scales: list[float],
    activation: Activation = Activation.STATIC,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
) -> NvFp4Weight:
    g = torch.Generator().manual_seed(0)
    n = sum(parts)
    input_scale = torch.tensor(3.0 / 2688, device=device) if activation is Activation.STATIC else None
    scale = torch.randint(0, 0x7F, (n, k // 16), generator=g, dtype=torch.uint8).view(torch.float8_e4m3fn)
    return NvFp4Weight(
        packed=torch.randint(0, 256, (n, k // 2), generator=g, dtype=torch.uint8).to(device),
        scale=scale.to(device),
        global_scales=torch.tensor(scales, device=device),
        part_sizes=tuple(parts),
        activation=activation,
        dtype=dtype,
        input_scale=input_scale,
        input_scale_inv=None if input_scale is None else 1.0 / input_scale,
    )


def make_input(m: int, k: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(m, k, generator=torch.Generator().manual_seed(m)).to(dtype)


def exact(weight: NvFp4Weight, x: torch.Tensor) -> torch.Tensor:
    """float64 from the bytes; the activation codes are the quantiser's, which has golden vectors of its own."""
    w = codes(weight.packed) * weight.scale.double().repeat_interleave(16, dim=1)
    w *= torch.repeat_interleave(weight.global_scales.double(), torch.tensor(weight.part_sizes))[:, None]
    a = x.double()
    if weight.activation is not Activation.NONE:
        scale, inverse = weight.activation_scales(x)
        a = dequantize_nvfp4(*quantize_nvfp4(x, inverse), 1.0).double() * scale.double()
    return a @ w.T


def assert_close(y: torch.Tensor, expected: torch.Tensor, parts: list[int]) -> None:
    """By part: a wrong small one would hide behind a large one."""
    for found, wanted in zip(y.double().split(parts, dim=1), expected.split(parts, dim=1), strict=True):
        assert float((found - wanted).norm() / wanted.norm()) < 0.004


NAMES = ["cudnn", "cutlass", "cutedsl", "trtllm", "b12x"]
SHARING = ["cudnn", "cutlass", "cutedsl", "b12x"]
B200 = Target("cuda", (10, 0), "13.0", "0.7.4", "9.23.1", "1.32.0", "4.8.0")


def backend(name: str) -> FlashInferBackend:
    chosen = backends()[name]()
    assert isinstance(chosen, FlashInferBackend)
    return chosen
