"""What ``verify_fp4`` takes for the truth: held against float64 from the bytes, and against the fixtures."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from flashinfer_emulator import Emulator
from safetensors.torch import load_file

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.quantization import fp4_verify, get_quantization
from sglang.srt.layers.quantization.fp4_backends import flashinfer as flashinfer_backends
from sglang.srt.layers.quantization.fp4_backends.flashinfer import FlashInferBackend
from sglang.srt.layers.quantization.fp4_utils import Target, backends
from sglang.srt.layers.quantization.fp4_verify import (
    Layer,
    check_layer,
    exact_product,
    make_batch,
    random_input,
    random_layers,
    random_weight,
)
from sglang.srt.layers.quantization.fp4_verify_run import Verification
from sglang.srt.layers.quantization.nvfp4 import Activation, NvFp4Linear
from sglang.srt.layers.quantization.nvfp4_utils import dequantize_nvfp4, quantize_nvfp4
from sglang.srt.model_loader.loader import load_model
from sglang.srt.model_loader.nvfp4_layers import distinct_layers
from sglang.srt.models.registry import get_model_class
from sglang.srt.server_args import ServerArgs

FIXTURES = Path(__file__).parents[3] / "fixtures"
LINEAR_IO = load_file(FIXTURES / "linear_io.safetensors")
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
CPU = torch.device("cpu")


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def values_of(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2).long()
    return E2M1[codes] * scale.double().repeat_interleave(16, dim=1)


@pytest.mark.parametrize("chunk", [1 << 24, 500], ids=["whole", "in pieces"])
@pytest.mark.parametrize("pre_quant", [False, True], ids=["", "pre_quant"])
@pytest.mark.parametrize("activation", list(Activation))
def test_the_exact_product(
    activation: Activation, pre_quant: bool, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fp4_verify, "_CHUNK", chunk)
    parts = (40, 24, 7)
    weight = random_weight(parts, 96, activation, torch.bfloat16, generator())
    if pre_quant:
        weight = replace(weight, pre_quant_scale=torch.rand(3, 96, generator=generator(1)) + 0.5)
    bias = torch.randn(71, generator=generator(2)).bfloat16()
    layer = Layer("", weight, bias, on_grid=False)
    x = (torch.randn(5, 96, generator=generator(3)) * 3).bfloat16()
    w = values_of(weight.packed, weight.scale)
    row = 0
    exact = exact_product(layer, x)
    for part, size in enumerate(parts):
        a = x
        if weight.pre_quant_scale is not None:
            a = (x.float() * weight.pre_quant_scale[part]).bfloat16()
        if activation is Activation.NONE:
            multiplied = a.double()
        else:
            scale = weight.input_scale
            inverse = weight.input_scale_inv
            if activation is Activation.DYNAMIC:
                scale = a.float().abs().max() / 2688
                inverse = 1 / scale
            multiplied = values_of(*quantize_nvfp4(a, inverse)) * scale.double()
        rows = slice(row, row + size)
        expected = multiplied @ w[rows].T * weight.global_scales[part].double() + bias[rows].double()
        assert torch.allclose(exact.y[:, rows], expected, rtol=1e-12, atol=1e-300)
        row += size
    finding = check_layer(NvFp4Linear(weight, backends()["torch"]()), layer, x, exact)
    assert finding.ok, finding


def test_the_limits_of_few_and_of_many_elements() -> None:
    """What the module's text says of the bounds."""
    for dtype, floor in zip(DTYPES, (2.25e-3, 2.82e-4, 3.44e-8), strict=True):
        weight = random_weight((512,), 64, Activation.STATIC, dtype, generator())
        _, exact = make_batch(Layer("", weight, None, on_grid=True), 64, 0)
        sums = 2.0**-23 * 8 * 1.3
        assert floor < exact.bound < floor * 1.15 + sums
        few = make_batch(Layer("", weight, None, on_grid=True), 1, 0)[1]
        assert exact.bound < few.bound <= torch.finfo(dtype).eps / 2 + sums
        free = make_batch(Layer("", weight, None, on_grid=False), 64, 0)[1]
        assert 0.02 < free.bound < 0.045
        # An element that is off by a unit in the last place, or by what is typical, is wrong.
        large = exact.y.abs() > 2 * exact.size
        assert int(large.sum()) > 500
        unit = torch.finfo(dtype).eps * exact.y.abs() + sums * exact.size * 4
        assert bool((exact.limit < unit)[large].all())
        assert bool((exact.limit < 0.1 * exact.size + 0.01 * exact.y.abs() + 1e-30).all())


def test_errors_that_each_element_may_have_but_not_all() -> None:
    weight = random_weight((64,), 96, Activation.DYNAMIC, torch.float32, generator())
    layer = Layer("", weight, None, on_grid=True)
    x, exact = make_batch(layer, 16, 0)
    y = (exact.y + 0.8 * exact.limit).float()
    assert bool(((y.double() - exact.y).abs() <= exact.limit).all())
    assert check_layer(lambda x, bias: y, layer, x, exact).verdict.startswith("error")
    y = exact.y.float()
    assert check_layer(lambda x, bias: y, layer, x, exact).ok


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", [Activation.STATIC, Activation.DYNAMIC])
@pytest.mark.parametrize("halvings", [0, 5])
def test_inputs_on_the_grid_leave_a_quantiser_no_choice(
    activation: Activation, dtype: torch.dtype, halvings: int
) -> None:
    weight = random_weight((16,), 1600, activation, dtype, generator())
    layer = Layer("", weight, None, on_grid=True)
    x = random_input(layer, 33, generator(1), halvings)
    _, inverse = weight.activation_scales(x)
    packed, scale = quantize_nvfp4(x, inverse)
    for off in (0.99, 0.9999, 1.0001, 1.01):
        other = quantize_nvfp4(x, inverse * off)
        assert torch.equal(other[0], packed) and torch.equal(other[1].view(torch.uint8), scale.view(torch.uint8))
    bytes_used = scale.view(torch.uint8).unique().tolist()
    assert bytes_used[0] == 0 and bytes_used[-1] == 0x7E - (8 * halvings if activation is Activation.STATIC else 0)
    if not halvings:
        assert bytes_used[1] == 1  # the smallest subnormal
    assert set((packed & 15).unique().tolist()) >= set(range(16)) - {8}


def test_inputs_off_the_grid_reach_beyond_a_static_scale() -> None:
    weight = random_weight((16,), 1600, Activation.STATIC, torch.bfloat16, generator())
    x = random_input(Layer("", weight, None, on_grid=False), 33, generator(1))
    assert float(x.abs().max()) > 1.3 * 2688 * float(weight.input_scale)
    sizes = x.float().norm(dim=1)
    assert float(sizes.max() / sizes.min()) > 300


def test_layers_have_what_finds_faults() -> None:
    layers = list(random_layers(1000, 480, torch.bfloat16, generator()))
    assert [layer.kind for layer in layers] == [
        "W4A4 static, 3 parts",
        "W4A4 dynamic, bias",
        "W4A4 static, bias, any input",
        "W4A16, 2 parts, bias",
    ]
    for layer in layers:
        layer.weight.check()
        assert set(layer.weight.scale.view(torch.uint8).unique().tolist()) == set(range(0x7F))
        raw = layer.weight.scale.view(torch.uint8)
        assert bool(((raw > 0) & (raw < 8)).all(dim=1).any()) and bool((raw == 0).all(dim=1).any())
    scales = layers[0].weight.global_scales
    assert float(scales.min()) < 1.01e-9 and len(set(scales.tolist())) == 3
    for dtype in (torch.bfloat16, torch.float16):  # as far from a value of the dtype as can be
        off = (scales.to(dtype).double() / scales.double() - 1).abs()
        if dtype is torch.bfloat16:
            assert float(off.max()) > 3e-3


@pytest.mark.parametrize("activation", list(Activation))
def test_a_batch_fits_into_float16(activation: Activation) -> None:
    """Scales of a real layer may be anything; the result must stay comparable."""
    weight = random_weight((64,), 512, activation, torch.float16, generator())
    weight = replace(weight, global_scales=torch.tensor([30.0]))
    layer = Layer("", weight, None, on_grid=activation is not Activation.NONE)
    x, exact = make_batch(layer, 9, 0)
    assert 1.0 < float(exact.y.abs().max()) <= torch.finfo(torch.float16).max / 4
    assert bool(x.any())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("capability", [(10, 0), (12, 0)], ids=str)
def test_right_flashinfer_kernels_pass(
    capability: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a Blackwell GPU would answer, kernels being the emulator's: no row may be wrong for another reason."""
    emulator = Emulator()
    monkeypatch.setattr(flashinfer_backends, "_flashinfer", lambda: emulator)
    target = Target("cuda", capability, "13.0", "0.7.4", "9.23.1", "1.32.0", "4.8.0", nvcc="13.0")
    monkeypatch.setattr(Target, "current", staticmethod(lambda *_: target))
    names = [name for name in backends() if issubclass(backends()[name], FlashInferBackend)]
    verification = Verification(CPU, names, seed=0)
    for layer in random_layers(300, 144, dtype, generator()):
        verification.run(layer, [0, 1, 129], lambda text: None)
    assert [row for row in verification.rows if not row.ok] == []
    ran = {row.backend for row in verification.rows}
    assert ran == {name for name in names if not backends()[name].unsupported_reason(replace(target, dtype=dtype))}
    assert ("W4A16, 2 parts, bias" in {row.kind for row in verification.rows}) == (dtype is torch.bfloat16)


# ----------------------------------------------------------------------------------------------- layers of a model
def server_args(checkpoint: str) -> ServerArgs:
    return ServerArgs(model_path=str(FIXTURES / f"tiny-llama-{checkpoint}"), device="cpu")


@pytest.mark.parametrize(
    "checkpoint, case",
    [
        (checkpoint, case)
        for checkpoint in ("modelopt-nvfp4", "ct-nvfp4")
        for case in ("layers.0.mlp.down_proj", "layers.0.self_attn.o_proj", "layers.0.self_attn.k_proj")
        if f"{checkpoint}.{case}.x" in LINEAR_IO
    ],
)
def test_layers_of_a_checkpoint_multiply_as_the_fixtures_say(checkpoint: str, case: str) -> None:
    parent, _, leaf = case.rpartition(".")
    fused = {"k_proj": "qkv_proj"}.get(leaf, leaf)
    found = {layer.name: layer for layer in distinct_layers(server_args(checkpoint), CPU)}
    layer = found[f"model.{parent}.{fused}"]
    rows = slice(256, 384) if leaf == "k_proj" else slice(None)
    x = LINEAR_IO[f"{checkpoint}.{case}.x"]
    exact = exact_product(Layer("", layer.weight, layer.bias, on_grid=False), x)
    expected = LINEAR_IO[f"{checkpoint}.{case}.y_w4a4"].double()
    assert float((exact.y[:, rows] - expected).norm() / expected.norm()) < 1e-7


@pytest.mark.parametrize(
    "checkpoint", ["modelopt-nvfp4", "modelopt-w4a16", "modelopt-mixed", "ct-nvfp4", "ct-nvfp4a16"]
)
def test_layers_of_a_checkpoint_are_those_of_the_loaded_model(checkpoint: str) -> None:
    args = server_args(checkpoint)
    config = ModelConfig.from_server_args(args)
    default = torch.get_default_dtype()
    torch.set_default_dtype(config.dtype)
    try:
        model = get_model_class(config.architecture)(config.hf_config, get_quantization(config, args))
    finally:
        torch.set_default_dtype(default)
    load_model(model, config.model_path, progress=False)
    layers = list(distinct_layers(args, CPU))
    assert layers
    for layer in layers:
        module = model.get_submodule(layer.name)
        x = torch.randn(5, layer.weight.in_features, generator=generator())
        own = NvFp4Linear(layer.weight, type(module.nvfp4.backend)())
        assert torch.equal(own(x, layer.bias), module.nvfp4(x, module.bias))
        assert (own.product, own.dtype) == (module.nvfp4.product, module.nvfp4.dtype)
    shapes = {(layer.weight.part_sizes, layer.weight.in_features, layer.weight.activation) for layer in layers}
    assert len(shapes) == len(layers)
    others = {(m.nvfp4.product) for m in model.modules() if hasattr(m, "nvfp4")}
    assert others == {layer.weight.product for layer in layers}


def test_dense_weight_is_the_dequantised_one() -> None:
    weight = random_weight((40, 24), 96, Activation.NONE, torch.float32, generator())
    dense = fp4_verify.dense_weight(Layer("", weight, None, on_grid=False))
    expected = dequantize_nvfp4(weight.packed, weight.scale, 1.0) * weight.column_scale().unsqueeze(1)
    assert torch.equal(dense, expected) and dense.dtype == torch.float32
