"""The kernels between products without a GPU: they compile for every device without spills, and who uses them."""

import re

import pytest
import torch

from sglang.kernels import layers, nvrtc
from sglang.srt.errors import StartupError
from sglang.srt.layers.attention import decode_kernel
from sglang.srt.layers.cuda_operators import CudaOperators
from sglang.srt.layers.operators import TORCH_OPERATORS, operators_for

CAPABILITIES = [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)]
# 1024 threads leave 64 registers each, and the compiler for 12.0 wants more: slower there, not wrong.
SPILLS = {("draw_token", (12, 0))}


@pytest.mark.skipif(not nvrtc.available(), reason="needs NVRTC: pip install nvidia-cuda-nvrtc")
@pytest.mark.parametrize(
    ("capability", "name", "dtype"),
    [
        *(
            (capability, name, torch.bfloat16)
            for capability in CAPABILITIES
            for name in ("rms_norm_1", *layers.UNTYPED)
            if (name, capability) not in SPILLS
        ),
        *((capability, "rms_norm_1", torch.float16) for capability in CAPABILITIES[::3]),
        *((capability, "rms_norm_1", torch.float32) for capability in CAPABILITIES[::3]),
    ],
    ids=str,
)
def test_every_kernel_compiles_without_spills(name: str, dtype: torch.dtype, capability: tuple[int, int]) -> None:
    """A name stands for all kernels of its source."""
    assert_no_spills(layers.program(name, dtype, capability))


@pytest.mark.skipif(not nvrtc.available(), reason="needs NVRTC: pip install nvidia-cuda-nvrtc")
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize(("dim", "group"), [(64, 4), (128, 1), (128, 4), (128, 7), (256, 8)])
@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
def test_decode_attention_compiles_without_spills(capability: tuple[int, int], dim: int, group: int, fp8: bool) -> None:
    options = decode_kernel.options_of(dim, group, fp8)
    assert_no_spills(layers.program("decode_attention", torch.bfloat16, capability, options))


def assert_no_spills(program: layers.Program) -> None:
    log = nvrtc.compile_source(*program).log
    spills = [int(size) for size in re.findall(r"(\d+) bytes spill", log)]
    assert re.findall(r"Used (\d+) registers", log) and spills
    assert not any(spills), log


# Kernels that write what decode_attention reads before it waits, and so let nothing begin before they end: pdl.cuh.
READ_EARLY = ("decode_inputs", "cos_sin")
# Blocks of a request that have no share of it end at once; others have one, and wait.
WITHOUT_A_SHARE = "if (begin >= end) return;"


def test_every_kernel_waits_for_the_previous_one_and_lets_the_next_one_begin() -> None:
    """Else a kernel could end before one that it does not know of, and what comes after it would read too early."""
    quiet = 0
    for file in ("layers.cu", *layers.TYPED.values(), *layers.UNTYPED.values()):
        text = layers.source(file).partition("struct")[2]
        bodies = re.findall(r"begin_next_kernel\(\);(.*?)\n}", text, re.DOTALL)
        for body in re.findall(rf" (?:{'|'.join(READ_EARLY)})\(const __grid_constant__(.*?)\n}}", text, re.DOTALL):
            assert "begin_next_kernel" not in body and body.endswith("write_through();")
            bodies.append(body)
            quiet += 1
        calls = len(re.findall(r"__global__", text)) - text.count("{ rotate_rows<") - text.count("{ gate<")
        calls -= text.count("{ look_up<") + text.count("{ norm_row<")
        templates = len(re.findall(r"void (?:rotate_rows|gate|look_up|norm_row)\(", text))
        assert len(bodies) == calls + templates and bodies
        for body in bodies:
            before, wait, _ = body.partition("wait_for_previous_kernel();")
            assert wait and "return;" not in before.replace(WITHOUT_A_SHARE, "")
    assert quiet == len(READ_EARLY)


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    operators_for.cache_clear()
    layers.unavailable.cache_clear()


@pytest.mark.usefixtures("on_a_gpu")
def test_who_computes_on_a_gpu(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(*item: object) -> tuple[bytes, bool]:
        raise StartupError("NVRTC is not here: pip install nvidia-cuda-nvrtc")

    try:
        monkeypatch.setattr(nvrtc, "load_cubin", lambda *item: (b"", False))
        assert isinstance(operators_for("cuda"), CudaOperators) and operators_for("cuda") is operators_for("cuda")
        monkeypatch.setattr(nvrtc, "load_cubin", refuse)
        operators_for.cache_clear()
        layers.unavailable.cache_clear()
        assert not caplog.records
        assert operators_for("cuda") is operators_for("cuda") is TORCH_OPERATORS
        assert [record.getMessage() for record in caplog.records] == [
            "torch computes norms, gates and rotations on this GPU, slower than our kernels: "
            "NVRTC is not here: pip install nvidia-cuda-nvrtc"
        ]
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 5))
        layers.unavailable.cache_clear()
        assert layers.unavailable(0) == "needs compute capability 8.0 or newer; this device has 7.5"
    finally:
        operators_for.cache_clear()
        layers.unavailable.cache_clear()


def test_blocks_that_share_a_row_have_room() -> None:
    for processors in (1, 8, 132, 148):
        plan = layers.GreedyPlan(processors, torch.empty(4 * processors), torch.empty(2 * processors))
        for rows in range(1, 4 * processors):
            for n in (1, 5000, 128256, 1 << 20):
                splits = plan.splits(rows, n)
                assert 1 <= splits <= 32
                assert splits == 1 or (rows <= len(plan.arrived) and rows * splits <= len(plan.partial))
