"""A stand-in for FlashInfer's two calls that decodes the documented buffers byte by byte and multiplies exactly."""

import types

import torch

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)


def decode_128x4(scale: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Element (r, c) from its documented offset in the flat buffer."""
    c4 = scale.shape[1]
    r, c = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    offset = (r // 128) * 128 * c4 + (c // 4) * 512 + (r % 32) * 16 + ((r % 128) // 32) * 4 + c % 4
    return scale.contiguous().flatten()[offset].view(torch.float8_e4m3fn).double()


def old_row(new: torch.Tensor) -> torch.Tensor:
    lane = new % 32
    return new - lane + (lane % 8) * 4 + lane // 8


def values(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    rows, columns = packed.shape[0], packed.shape[1] * 2
    codes = torch.empty(rows, columns, dtype=torch.long)
    codes[:, 0::2], codes[:, 1::2] = (packed & 15).long(), (packed >> 4).long()
    return E2M1[codes] * decode_128x4(scale, rows, columns // 16).repeat_interleave(16, dim=1)


class Emulator(types.ModuleType):
    """``calls`` records (backend, m, n, k) of every product."""

    def __init__(self) -> None:
        super().__init__("flashinfer")
        self.calls: list[tuple[str, int, int, int]] = []

    def fp4_quantize(self, x: torch.Tensor, global_scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert x.is_contiguous() and global_scale.dtype == torch.float32
        from sglang.srt.layers.quantization.nvfp4_utils import quantize_nvfp4, swizzle_scale

        packed, scale = quantize_nvfp4(x, global_scale)
        return packed, swizzle_scale(scale.view(torch.uint8))

    def mm_fp4(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        a_descale: torch.Tensor,
        b_descale: torch.Tensor,
        alpha: torch.Tensor,
        out_dtype: torch.dtype,
        backend: str,
    ) -> torch.Tensor:
        m, n, k = a.shape[0], b.shape[1], a.shape[1] * 2
        multiples = {"cutlass": (32, 32), "cudnn": (32, 32), "cute-dsl": (8, 32), "trtllm": (128, 64)}[backend]
        assert n % multiples[0] == 0 and k % multiples[1] == 0, (backend, n, k)
        assert m > 0 and b.shape[0] == k // 2 and b.T.is_contiguous()
        padded_columns = -(-k // 64) * 4
        assert a_descale.shape == (-(-m // 128) * 128, padded_columns)
        assert b_descale.T.shape == (-(-n // 128) * 128, padded_columns)
        assert alpha.dtype == torch.float32 and alpha.numel() == 1
        assert out_dtype in ((torch.bfloat16,) if backend == "trtllm" else (torch.bfloat16, torch.float16))
        self.calls.append((backend, m, n, k))
        weight = values(b.T, b_descale.T)
        if backend == "trtllm":
            restored = torch.empty_like(weight)
            restored[old_row(torch.arange(n))] = weight
            weight = restored
        return (values(a, a_descale) @ weight.T * alpha.double()).to(out_dtype)
