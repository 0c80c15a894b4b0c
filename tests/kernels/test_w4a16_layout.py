"""The byte layout of w4a16 weights: the way back, and what the kernel's expressions make of every code and scale."""

import re
from pathlib import Path

import pytest
import torch

from sglang.kernels import w4a16_layout
from sglang.srt.layers.quantization.nvfp4_utils import E2M1_VALUES

DTYPES = [torch.bfloat16, torch.float16]
SOURCE = Path(w4a16_layout.__file__).with_name("w4a16_common.cuh").read_text()


def random_weight(rows: int, columns: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    packed = torch.randint(0, 256, (rows, columns // 2), generator=g, dtype=torch.uint8)
    scale = torch.randint(0, 0x7F, (rows, columns // 16), generator=g, dtype=torch.uint8)
    return packed, scale.view(torch.float8_e4m3fn)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns"), [(16, 128), (1, 16), (17, 144), (100, 576), (64, 1040)])
@pytest.mark.parametrize("slab", [1 << 26, 1])
def test_round_trip(rows: int, columns: int, dtype: torch.dtype, slab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(w4a16_layout, "_SLAB", slab)
    packed, scale = random_weight(rows, columns)
    weight = w4a16_layout.pack(packed, scale, dtype)
    assert weight.shape == w4a16_layout.packed_shape(rows, columns)
    again, scale_again = w4a16_layout.unpack(weight, rows, columns, dtype)
    assert torch.equal(again, packed)
    assert torch.equal(scale_again.view(torch.uint8), scale.view(torch.uint8))


class Kernel:
    """Expressions of the CUDA source, evaluated on int64 tensors that hold 32 bits."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def _halves(self, bits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        signed = torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32)
        pair = signed[..., None].view(torch.int16).view(self.dtype)
        return pair[..., 0], pair[..., 1]

    def mul2(self, a: torch.Tensor, b: torch.Tensor | int) -> torch.Tensor:
        products = [x * y for x, y in zip(self._halves(a), self._halves(torch.as_tensor(b)), strict=True)]
        low, high = (product.view(torch.int16).long() & 0xFFFF for product in products)
        return low | high << 16

    @staticmethod
    def funnelshift_r(low: torch.Tensor, high: torch.Tensor, shift: int) -> torch.Tensor:
        return (low >> shift | high << (32 - shift)) & 0xFFFFFFFF

    def _body(self, function: str) -> str:
        half, rest = SOURCE[SOURCE.index(f" {function}(") :].split("#if TYPE")[1].split("#endif")[0].split("#else")
        return half if self.dtype == torch.float16 else rest

    def _evaluate(self, expression: str, **names: torch.Tensor | int) -> torch.Tensor:
        python = re.sub(r"\(half \? (.*?) : (.*?)\)", r"((\1) if half else (\2))", expression)
        python = re.sub(r"0x([0-9A-F]+)u", r"0x\1", python)
        result: torch.Tensor = eval(python, {"mul2": self.mul2, "__funnelshift_r": self.funnelshift_r}, names)
        return result

    def dequantize(self, q: torch.Tensor, s0: torch.Tensor, s1: torch.Tensor) -> list[torch.Tensor]:
        spread = re.findall(r"w\[\d\] = (.*);", self._body("spread"))
        w = [self._evaluate(line, q=q) for line in spread]
        factors = re.findall(r"w\[(\d)\] = mul2\(w\[(\d)\], (s\d)\);", SOURCE)
        assert [(int(to), int(of)) for to, of, _ in factors] == [(i, i) for i in range(len(w))] and len(w) == 4
        return [self.mul2(value, {"s0": s0, "s1": s1}[name]) for value, (_, _, name) in zip(w, factors, strict=True)]

    def decode_scales(self, bytes_: torch.Tensor, half: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Of rows g and g + 8, each twice in 32 bits."""
        (line,) = re.findall(r"return (.*);", self._body("decode_scales"))
        pair = self._evaluate(line, bytes=bytes_, half=half)
        low, high = pair & 0xFFFF, pair >> 16
        return low | low << 16, high | high << 16


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernels_expressions_give_every_value_exactly(dtype: torch.dtype) -> None:
    """A unit as the 32 lanes of a warp see it: right code, right scale, right place, times 2^-7, to the last bit."""
    rows, columns = 16, 128 * 64
    packed, scale = random_weight(rows, columns)
    scale.view(torch.uint8)[:, :127] = torch.arange(127, dtype=torch.uint8)  # every legal scale, subnormal ones too
    weight = w4a16_layout.pack(packed, scale, dtype)[0]  # unit, byte
    kernel = Kernel(dtype)
    words = weight[:, : w4a16_layout.CODE_BYTES].contiguous().view(torch.int32).long() & 0xFFFFFFFF
    words = words.view(-1, 2, 32, 4)  # unit, step, piece, word
    g, t = torch.arange(8)[:, None], torch.arange(4)
    (place,) = re.findall(r"#define PIECE\(g, t\) (.*) //", SOURCE)  # in bytes
    words = words[:, :, eval(place, {"g": g, "t": t}) // 16]  # unit, step, g, t, word
    scales = weight[:, w4a16_layout.CODE_BYTES :].contiguous().view(torch.int32).long().view(-1, 8, 4) & 0xFFFFFFFF
    found = torch.empty(len(weight), 2, 4, 2, 4, 2, 2, 8, dtype=dtype)  # unit, step, t, k half, word, code, row half, g
    for step in range(2):
        s0, s1 = kernel.decode_scales(scales, step)
        for word in range(4):
            for index, value in enumerate(kernel.dequantize(words[:, step, :, :, word], s0, s1)):
                for code, number in enumerate(kernel._halves(value)):
                    found[:, step, :, index // 2, word, code, index % 2] = number.transpose(1, 2)
    matrix = found.permute(6, 7, 0, 1, 2, 3, 4, 5).reshape(rows, columns).double()
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1).long()
    expected = torch.tensor(E2M1_VALUES, dtype=torch.float64)[codes] * scale.double().repeat_interleave(16, dim=1)
    assert torch.equal(matrix, expected * 2.0**-7)
