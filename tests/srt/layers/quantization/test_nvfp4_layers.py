"""Every backend against float64, over shapes, fused parts with unequal scales, strides, bias and dtypes."""

import dataclasses
import itertools

import flashinfer_emulator
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.srt.errors import CheckpointError, Fp4GemmError, StartupError
from sglang.srt.layers.quantization import fp4_utils, nvfp4
from sglang.srt.layers.quantization.fp4_backends import flashinfer as flashinfer_backends
from sglang.srt.layers.quantization.fp4_utils import Target, backends
from sglang.srt.layers.quantization.modelopt_quant import ModelOptFp4Config
from sglang.srt.layers.quantization.nvfp4 import Activation, NvFp4Linear, NvFp4Weight
from sglang.srt.layers.quantization.nvfp4_utils import dequantize_nvfp4, quantize_nvfp4

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)


@pytest.fixture
def emulator(monkeypatch: pytest.MonkeyPatch) -> flashinfer_emulator.Emulator:
    module = flashinfer_emulator.Emulator()
    monkeypatch.setattr(flashinfer_backends, "_flashinfer", lambda: module)
    return module


def make_weight(
    parts: list[int], k: int, scales: list[float], activation: Activation, dtype: torch.dtype, seed: int = 0
) -> NvFp4Weight:
    g = torch.Generator().manual_seed(seed)
    n = sum(parts)
    packed = torch.randint(0, 256, (n, k // 2), generator=g, dtype=torch.uint8)
    scale = torch.randint(0, 0x7F, (n, k // 16), generator=g, dtype=torch.uint8).view(torch.float8_e4m3fn)
    input_scale = torch.tensor(3.0 / 2688)
    static = activation is Activation.STATIC
    return NvFp4Weight(
        packed=packed,
        scale=scale,
        global_scales=torch.tensor(scales),
        part_sizes=tuple(parts),
        activation=activation,
        dtype=dtype,
        input_scale=input_scale if static else None,
        input_scale_inv=1.0 / input_scale if static else None,
    )


def exact(weight: NvFp4Weight, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """float64 from the bytes; the activation codes are the quantiser's, which has golden vectors of its own."""
    codes = torch.empty(weight.out_features, weight.in_features, dtype=torch.long)
    codes[:, 0::2], codes[:, 1::2] = (weight.packed & 15).long(), (weight.packed >> 4).long()
    w = E2M1[codes] * weight.scale.double().repeat_interleave(16, dim=1)
    w *= torch.repeat_interleave(weight.global_scales.double(), torch.tensor(weight.part_sizes))[:, None]
    a = x.double().reshape(-1, x.shape[-1])
    if weight.activation is not Activation.NONE:
        scale, inverse = weight.activation_scales(x)
        a = dequantize_nvfp4(*quantize_nvfp4(x.reshape(-1, x.shape[-1]), inverse), 1.0).double() * scale.double()
    y = a @ w.T
    return (y if bias is None else y + bias.double()).reshape(*x.shape[:-1], -1)


def relative_error(y: torch.Tensor, expected: torch.Tensor) -> float:
    return float((y.double() - expected).norm() / expected.norm().clamp(min=1e-30))


CASES = [
    ([256], 256, [0.01], 5),
    ([1000], 48, [1e-3], 7),
    ([40, 24, 24], 3696, [1e-4, 1e-2, 3e-3], 1),
    ([48, 48], 80, [2e-2, 1e-4], 129),
    ([1], 16, [1.0], 3),
    ([64, 32, 32], 464, [0.01, 0.01, 0.02], 33),
]
W4A4_BACKENDS = ["torch", "cpu", "cudnn", "cutlass", "cutedsl", "trtllm"]


def skip_unless_it_runs(backend: str, dtype: torch.dtype) -> None:
    """On an emulated B200, or for backend ``cpu`` on what runs this."""
    b200 = Target("cuda", (10, 0), "13.0", "0.6.13", "9.15.0", "1.15", "4.5.0", dtype)
    reason = backends()[backend].unsupported_reason(Target.current("cpu", dtype) if backend == "cpu" else b200)
    if reason is not None:
        pytest.skip(reason)


@pytest.mark.parametrize("activation", [Activation.STATIC, Activation.DYNAMIC], ids=["static", "dynamic"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}x{case[1]}-m{case[3]}")
@pytest.mark.parametrize("backend", W4A4_BACKENDS)
def test_w4a4(
    backend: str,
    case: tuple[list[int], int, list[float], int],
    dtype: torch.dtype,
    activation: Activation,
    emulator: flashinfer_emulator.Emulator,
) -> None:
    parts, k, scales, m = case
    chosen = backends()[backend]
    skip_unless_it_runs(backend, dtype)
    weight = make_weight(parts, k, scales, activation, dtype)
    if dtype == torch.float16:  # keep the result inside fp16
        weight = dataclasses.replace(weight, global_scales=weight.global_scales * 1e-3)
    linear = NvFp4Linear(weight, chosen())
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(1)).to(dtype)
    bias = torch.randn(sum(parts), generator=torch.Generator().manual_seed(2)).to(dtype)
    for b in (None, bias):
        y = linear(x, b)
        assert y.dtype == dtype and y.shape == (m, sum(parts))
        expected = exact(weight, x, b)
        row = 0
        for part in parts:  # by part: a wrong small part would hide behind a large one
            assert relative_error(y[:, row : row + part], expected[:, row : row + part]) < 0.005
            row += part
    assert linear(x[:0], bias).shape == (0, sum(parts))
    if backend not in ("torch", "cpu"):
        distinct = 1 + sum(a != b for a, b in itertools.pairwise(scales))
        assert len(emulator.calls) == 2 * distinct


def test_unswizzled_unshuffled_and_unpadded_weights_are_caught(
    emulator: flashinfer_emulator.Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = make_weight([256], 256, [0.01], Activation.STATIC, torch.bfloat16)
    x = torch.randn(5, 256).bfloat16()
    with monkeypatch.context() as patch:
        patch.setattr(flashinfer_backends, "swizzle_scale", lambda scale: scale)
        y = NvFp4Linear(weight, backends()["cutlass"]())(x)
        assert relative_error(y, exact(weight, x, None)) > 0.1
    with monkeypatch.context() as patch:
        patch.setattr(flashinfer_backends, "shuffle_rows", lambda rows: rows)
        y = NvFp4Linear(weight, backends()["trtllm"]())(x)
        assert relative_error(y, exact(weight, x, None)) > 0.1
    with monkeypatch.context() as patch, pytest.raises(Fp4GemmError):
        patch.setattr(backends()["cutlass"], "in_multiple", 16)
        narrow = make_weight([256], 48, [0.01], Activation.STATIC, torch.bfloat16)
        NvFp4Linear(narrow, backends()["cutlass"]())(x[:, :48])


def test_a_weight_prepared_for_another_backend_is_refused(emulator: flashinfer_emulator.Emulator) -> None:
    weight = make_weight([128], 128, [0.01], Activation.STATIC, torch.bfloat16)
    x = torch.randn(5, 128).bfloat16()
    prepared = {name: backends()[name]().prepare(weight) for name in W4A4_BACKENDS}
    for owner, of_owner in prepared.items():
        for name in W4A4_BACKENDS:
            if name != owner:
                with pytest.raises(ValueError, match=f"prepared for backend {owner}, not for {name}"):
                    backends()[name]().apply(x, of_owner, None)
    assert not emulator.calls


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(1, 70), min_size=1, max_size=3),
    st.integers(1, 12),
    st.integers(1, 9),
    st.sampled_from(list(Activation)),
    st.integers(0, 1000),
)
def test_torch_backend_in_float32(parts: list[int], blocks: int, m: int, activation: Activation, seed: int) -> None:
    scales = torch.rand(len(parts), generator=torch.Generator().manual_seed(seed)).add(1e-3).tolist()
    weight = make_weight(parts, blocks * 16, scales, activation, torch.float32, seed)
    x = torch.randn(m, blocks * 16, generator=torch.Generator().manual_seed(seed))
    y = NvFp4Linear(weight, backends()["torch"]())(x)
    assert relative_error(y, exact(weight, x, None)) < 1e-5


def test_strides_dimensions_and_refusals() -> None:
    weight = make_weight([48], 64, [0.1], Activation.NONE, torch.float32)
    linear = NvFp4Linear(weight, backends()["torch"]())
    base = torch.randn(4, 3, 128)
    strided = base[::2, :, 32:96]
    assert relative_error(linear(strided), exact(weight, strided, None)) < 1e-6
    assert linear(strided[0, 0]).shape == (48,)
    assert linear(strided[:0]).shape == (0, 3, 48)
    with pytest.raises(ValueError, match=r"x: expected \[..., 64\]"):
        linear(torch.randn(2, 32))
    with pytest.raises(ValueError, match="bfloat16"):
        linear(torch.randn(2, 64).bfloat16())
    with pytest.raises(ValueError, match=r"bias: expected \[48\]"):
        linear(strided, torch.randn(3))


def test_all_zero_input_gives_zero_and_bias() -> None:
    for activation in (Activation.STATIC, Activation.DYNAMIC):
        weight = make_weight([32], 64, [0.1], activation, torch.bfloat16)
        linear = NvFp4Linear(weight, backends()["torch"]())
        bias = torch.randn(32).bfloat16()
        assert torch.equal(linear(torch.zeros(3, 64).bfloat16(), bias), bias.expand(3, 32))


def load_layer(change: str) -> torch.nn.Module:
    config = ModelOptFp4Config()
    layer = torch.nn.Module()
    layer.prefix = "model.layers.7.mlp.down_proj"
    method = config.get_quant_method(layer, layer.prefix)
    method.create_weights(layer, 64, [32], 64, 32, torch.bfloat16)
    weight = make_weight([32], 64, [0.1], Activation.STATIC, torch.bfloat16)
    layer.weight.data.copy_(weight.packed)
    layer.weight_scale.data.copy_(weight.scale)
    layer.weight_scale_2.data.fill_(0.1)
    layer.input_scale.data.fill_(0.01)
    raw = layer.weight_scale.data.view(torch.uint8)
    changes = {
        "none": lambda: None,
        "nan scale": lambda: raw[3, 1].fill_(0x7F),
        "negative scale": lambda: raw[3, 1].fill_(0x81),
        "zero global": lambda: layer.weight_scale_2.data.fill_(0.0),
        "infinite input": lambda: layer.input_scale.data.fill_(float("inf")),
        "denormal input": lambda: layer.input_scale.data.fill_(1e-42),
        "unset global": lambda: layer.weight_scale_2.data.fill_(float("nan")),
    }
    changes[change]()
    method.process_weights_after_loading(layer)
    return layer


def test_legal_values_load() -> None:
    layer = load_layer("none")
    assert not dict(layer.named_parameters())  # nothing is kept twice


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("nan scale", r"weight_scale .*block scale \[3, 1\] is 0x7F, which is NaN"),
        ("negative scale", ".*0x81, which is negative"),
        ("zero global", "weight_scale_2 .*found 0.0"),
        ("infinite input", "input_scale .*found inf"),
        ("denormal input", "input_scale .*not denormal"),
        ("unset global", "weight_scale_2 was not loaded"),
    ],
)
def test_illegal_values_are_refused_by_name(change: str, words: str) -> None:
    with pytest.raises(CheckpointError, match="model.layers.7.mlp.down_proj: " + words):
        load_layer(change)


def test_k_must_be_a_multiple_of_16() -> None:
    layer = torch.nn.Module()
    method = ModelOptFp4Config().get_quant_method(layer, "a.down_proj")
    with pytest.raises(CheckpointError, match="multiple of 16, it is 588"):
        method.create_weights(layer, 588, [32], 588, 32, torch.bfloat16)
    with pytest.raises(CheckpointError, match=r"24 per rank \(K=48 in all\); use a smaller --tp-size"):
        method.create_weights(layer, 24, [32], 48, 32, torch.bfloat16)


def test_explicit_backend_that_cannot_take_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """W4A16 on a backend that only multiplies FP4 with FP4: an error if named, another backend for auto."""
    gpu = Target("cuda", (10, 0), "13.0", "0.6.13", "9.15.0", "1.15", "4.5.0")
    layer = gpu.for_layer(64, 32, weight_only=True, dtype=torch.bfloat16)
    monkeypatch.setattr(fp4_utils, "_resolution", fp4_utils.resolve_fp4_gemm_backend("cutlass", None, gpu))
    with pytest.raises(StartupError, match=r"layer a \(N=32, K=64\): --fp4-gemm-backend cutlass .*weight-only"):
        fp4_utils.backend_for_layer(layer, "a")
    monkeypatch.setattr(fp4_utils, "_resolution", fp4_utils.resolve_fp4_gemm_backend("auto", None, gpu))
    assert fp4_utils.get_fp4_gemm_resolution().name == "cutedsl"
    assert fp4_utils.backend_for_layer(layer, "a").name == "torch"


def test_equal_neighbours_share_a_segment() -> None:
    weight = make_weight([32, 16, 16], 32, [0.1, 0.1, 0.2], Activation.NONE, torch.float32)
    assert [segment.part_sizes for segment in weight.segments(False)] == [(48,), (16,)]
    assert [segment.part_sizes for segment in weight.segments(True)] == [(32, 16, 16)]
    assert nvfp4.check_global_scale(torch.tensor([0.1, 0.2])) is None


@pytest.mark.parametrize("unequal", [False, True])
@pytest.mark.parametrize("backend", W4A4_BACKENDS)
def test_pre_quant_scale(backend: str, unequal: bool, emulator: flashinfer_emulator.Emulator) -> None:
    """NVFP4_AWQ: the input is multiplied per column before it is quantised; fused parts may even differ."""
    skip_unless_it_runs(backend, torch.bfloat16)
    weight = make_weight([64, 32], 80, [0.01, 0.02], Activation.STATIC, torch.bfloat16)
    pre = torch.rand(2, 80).mul(4).add(0.25)
    if not unequal:
        pre[1] = pre[0]
    weight = dataclasses.replace(weight, pre_quant_scale=pre)
    x = torch.randn(5, 80).bfloat16()
    y = NvFp4Linear(weight, backends()[backend]())(x)
    row = 0
    for index, size in enumerate(weight.part_sizes):
        part = dataclasses.replace(
            weight,
            packed=weight.packed[row : row + size],
            scale=weight.scale[row : row + size],
            global_scales=weight.global_scales[index : index + 1],
            part_sizes=(size,),
        )
        scaled = (x.float() * pre[index]).bfloat16()
        assert relative_error(y[:, row : row + size], exact(part, scaled, None)) < 0.005
        row += size


def test_awq_layer_from_a_checkpoint() -> None:
    config = ModelOptFp4Config.from_config({"quant_algo": "NVFP4_AWQ"})
    layer = torch.nn.Module()
    method = config.get_quant_method(layer, "a.down_proj")
    method.create_weights(layer, 64, [32], 64, 32, torch.float32)
    weight = make_weight([32], 64, [0.1], Activation.STATIC, torch.float32)
    pre = torch.rand(64) + 0.5
    layer.weight.data.copy_(weight.packed)
    layer.weight_scale.data.copy_(weight.scale)
    layer.weight_scale_2.data.fill_(0.1)
    layer.input_scale.data.fill_(3.0 / 2688)
    layer.pre_quant_scale.data.copy_(pre)
    assert nvfp4.check_pre_quant_scale(torch.tensor([1.0, float("nan")])) is not None
    method.process_weights_after_loading(layer)
    x = torch.randn(3, 64)
    assert relative_error(method.apply(layer, x), exact(weight, x * pre, None)) < 1e-5
