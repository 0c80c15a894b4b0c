"""FlashInfer's products as operators of torch: what torch asks of one, compiled graphs, CUDA graphs."""

import subprocess
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from flashinfer_emulator import B200, NAMES, Emulator, backend, make_input, make_weight, round_up

from sglang.srt.layers.quantization.fp4_backends import flashinfer as flashinfer_backends
from sglang.srt.layers.quantization.fp4_utils import Target, backends
from sglang.srt.layers.quantization.nvfp4 import Activation, NvFp4Linear


def test_registering_the_operators_imports_no_flashinfer() -> None:
    code = (
        "import sys; sys.modules['flashinfer'] = None\n"
        "import torch\n"
        "from sglang.srt.layers.quantization.fp4_backends import flashinfer\n"
        "torch.ops.sglang.flashinfer_mm_fp4.default, torch.ops.sglang.flashinfer_mm_bf16_fp4.default"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_opcheck(rows: int, emulator: Emulator, machine: Callable[[Target], None]) -> None:
    machine(B200)
    weight = make_weight([128], 64, [0.1])
    prepared = backend("cutlass").prepare(weight)
    inverse = weight.input_scale_inv
    arguments = (make_input(rows, 64), prepared.packed, prepared.scale, inverse, prepared.alpha, "cutlass", "cutlass")
    torch.library.opcheck(torch.ops.sglang.flashinfer_mm_fp4.default, arguments)
    bf16 = backend("cutedsl").prepare(make_weight([128], 64, [0.1], Activation.NONE))
    arguments16 = (make_input(rows, 64), bf16.packed, bf16.scale, bf16.alpha, "cutedsl", bf16.bf16_kernel)
    torch.library.opcheck(torch.ops.sglang.flashinfer_mm_bf16_fp4.default, arguments16)


# aot_eager captures as eager does, and then takes the graph apart. Backend torch is a hundred small operators to it:
# once is enough of what takes it many seconds.
COMPILED = [
    (compiler, name, activation)
    for compiler in ("eager", "aot_eager")
    for name in (*NAMES, "torch")
    for activation in Activation
    if activation is not Activation.NONE or name in ("cudnn", "cutedsl", "torch")
    if (compiler == "eager") == (name == "torch") or (name in ("cutlass", "torch") and activation is Activation.STATIC)
]


@pytest.mark.parametrize(("compiler", "name", "activation"), COMPILED)
def test_compiled_whole(
    compiler: str, name: str, activation: Activation, emulator: Emulator, machine: Callable[[Target], None]
) -> None:
    machine(B200)
    slow = (compiler, name) == ("aot_eager", "torch")
    parts, scales = ([64], [0.1]) if name == "torch" else ([40, 24], [0.1, 0.2])
    linear = NvFp4Linear(make_weight(parts, 80, scales, activation), backends()[name]())
    bias = torch.randn(64).bfloat16()
    torch._dynamo.reset()
    with torch.inference_mode():
        compiled = torch.compile(lambda x: linear(x, bias), fullgraph=True, dynamic=True, backend=compiler)
        compiled(make_input(5, 80))
        with torch.compiler.set_stance("fail_on_recompile"):  # no M is built into the graph
            for m in (5, 3, 130, 64):
                assert torch.equal(compiled(make_input(m, 80)), linear(make_input(m, 80), bias))
        for m in () if slow else (1, 0):
            assert torch.equal(compiled(make_input(m, 80)), linear(make_input(m, 80), bias))
    torch._dynamo.reset()


class GpuStandIn(types.ModuleType):
    """Neither call computes what FlashInfer's does, but each depends on all of its arguments and runs in a graph."""

    def fp4_quantize(self, input: torch.Tensor, global_scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (rows, columns), factor = input.shape, global_scale / 2688
        codes = (input.float().abs() * factor * 255).to(torch.uint8)
        scale = input.new_ones((round_up(rows, 128), round_up(columns // 16, 4)), dtype=torch.uint8)
        return codes[:, ::2] // 2 + codes[:, 1::2] // 2, scale

    def mm_fp4(self, a: torch.Tensor, b: torch.Tensor, *arguments: torch.Tensor, **names: Any) -> torch.Tensor:
        y = (a.float() @ b.float()) * arguments[2] * arguments[0].float().mean() * arguments[1].float().mean()
        return y.to(names["out_dtype"])


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("activation", [Activation.STATIC, Activation.DYNAMIC], ids=lambda a: a.value)
def test_captured_in_a_cuda_graph(activation: Activation, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing syncs, and a replay reads the new input, its new scale too."""
    module = GpuStandIn("flashinfer")
    monkeypatch.setattr(flashinfer_backends, "_flashinfer", lambda: module)
    weight = make_weight([40, 24], 80, [0.1, 0.2], activation, device="cuda")
    linear = NvFp4Linear(weight, backend("cutlass"))
    x, bias = make_input(5, 80).cuda(), torch.randn(64).bfloat16().cuda()
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode():
        linear(x, bias)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            y = linear(x, bias)
        results = []
        for factor in (1.0, 3.0, 0.25):
            x.copy_(make_input(5, 80) * factor)
            graph.replay()
            assert torch.equal(y, NvFp4Linear(weight, backend("cutlass"))(x, bias))
            results.append(y.clone())
    assert not torch.equal(results[0], results[1]) and not torch.equal(results[0], results[2])
