"""Group E: shapes, padding, tensor-parallel shards. Backends but torch are emulated from the bytes of their buffers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import Shape, base, distinct_scales, nvfp4_layer, quantize_head
from harness import (
    assert_layers_match,
    forward,
    load,
    load_linear,
    load_ranks,
    prompt_batch,
)
from oracle import TOLERANCE, Array, Oracle, relative_error

from sglang.srt.errors import CheckpointError
from sglang.srt.layers.quantization.modelopt_quant import ModelOptFp4Config

Written = Callable[..., Path]
Blackwell = Callable[[str], Any]
BACKENDS = ["torch", "cpu", "cudnn", "cutlass", "cutedsl", "trtllm"]


def make_parts(sizes: dict[str, int], k: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Tensors of parts with unequal global scales."""
    g = torch.Generator().manual_seed(seed)
    tensors = {}
    for index, (name, n) in enumerate(sizes.items()):
        layer = nvfp4_layer(n, k, k**-0.5 / 40 * 3.0**index, 4.0 / 2688, g)
        tensors.update({f"model.{name}.{key}": value for key, value in layer.items()})
    return tensors


def check_linear(
    folder: Path, sizes: dict[str, int], k: int, dtype: torch.dtype, rows: int = 5, bias: bool = False
) -> None:
    """A fused layer with these parts, against the oracle, part by part."""
    tensors = make_parts(sizes, k)
    if bias:
        g = torch.Generator().manual_seed(7)
        tensors.update({f"model.{name}.bias": torch.randn(n, generator=g).to(dtype) for name, n in sizes.items()})
    layer = load_linear(folder, tensors, sizes, k, dtype)
    x = torch.randn(rows, k, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = Oracle(folder / "model.safetensors").outputs([f"model.{name}" for name in sizes], x)
    for y, part in zip(layer(x).split(list(sizes.values()), dim=-1), expected, strict=True):
        assert error_of_all(y, part) < TOLERANCE[dtype]


def error_of_all(y: torch.Tensor, expected: Array) -> float:
    """Relative Frobenius error: with few columns, single rows may cancel."""
    return relative_error(y.reshape(1, -1), expected.reshape(1, -1))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "shape",
    [
        Shape(hidden=80, intermediate=48, heads=5, kv_heads=1, head_dim=16, layers=1),
        Shape(hidden=464, intermediate=464, heads=29, kv_heads=1, head_dim=16, layers=1),
        Shape(hidden=64, intermediate=160, heads=1, kv_heads=1, layers=1),
    ],
    ids=["48x80", "464x464", "e7-160x64"],
)
def test_e1_odd_shapes_are_padded(shape: Shape, backend: str, written: Written, blackwell: Blackwell) -> None:
    blackwell(backend)
    assert_layers_match(written(base(shape)), dtypes=["bfloat16"])


@pytest.mark.parametrize("backend", BACKENDS)
def test_e1_bias_is_padded_too(backend: str, tmp_path: Path, blackwell: Blackwell) -> None:
    blackwell(backend)
    check_linear(tmp_path, {"q_proj": 48, "k_proj": 24, "v_proj": 40}, 80, torch.bfloat16, bias=True)


@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_e3_padded_regions_are_zero(backend: str, tmp_path: Path, blackwell: Blackwell) -> None:
    """Poisoned allocations, 29 blocks of K."""
    blackwell(backend)
    for rows in (1, 127):
        check_linear(tmp_path / str(rows), {"down_proj": 48}, 464, torch.bfloat16, rows)


@pytest.mark.parametrize("backend", ["torch", "cpu", "cudnn", "trtllm"])
@pytest.mark.parametrize(("n", "k"), [(40, 4096), (4096, 48)])
def test_e5_very_oblong_layers(n: int, k: int, backend: str, tmp_path: Path, blackwell: Blackwell) -> None:
    blackwell(backend)
    check_linear(tmp_path, {"down_proj": n}, k, torch.bfloat16)


@pytest.mark.parametrize("n", [32, 33])
def test_e8_k_that_is_no_multiple_of_16(n: int, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"layer model.down_proj: NVFP4 needs K .* of 16, it is 588"):
        check_linear(tmp_path, {"down_proj": n}, 588, torch.bfloat16)


def test_e9_a_block_that_would_straddle_two_ranks(written: Written) -> None:
    folder = written(base(Shape(hidden=64, intermediate=48, heads=2, kv_heads=2, head_dim=32)))
    assert_layers_match(folder)
    words = ("mlp.down_proj", "it is 24 per rank (K=48 in all)", "use a smaller --tp-size")
    with pytest.raises(CheckpointError) as caught:
        load_ranks(folder, 2, fp4_gemm_autotune="off")
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize("backend", BACKENDS)
def test_e10_gate_and_up_are_padded_each_by_itself(
    backend: str, tmp_path: Path, written: Written, blackwell: Blackwell
) -> None:
    blackwell(backend)
    check_linear(tmp_path, {"gate_proj": 40, "up_proj": 40}, 64, torch.bfloat16)
    shape = Shape(hidden=64, intermediate=704, heads=2, kv_heads=2, head_dim=32, layers=1)
    checkpoint = base(shape)
    up = "model.layers.0.mlp.up_proj.weight_scale_2"
    checkpoint.tensors[up] = checkpoint.tensors[up] * 7
    assert_layers_match(written(checkpoint), dtypes=["bfloat16"], tp_size=2)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("n", [160, 2880])
def test_e11_the_second_of_two_stacked_parts(n: int, backend: str, tmp_path: Path, blackwell: Blackwell) -> None:
    blackwell(backend)
    check_linear(tmp_path, {"gate_proj": n, "up_proj": n}, 64, torch.bfloat16)


@pytest.mark.parametrize("backend", BACKENDS)
def test_e12_scales_of_which_no_two_rows_are_equal(backend: str, tmp_path: Path, blackwell: Blackwell) -> None:
    blackwell(backend)
    tensors = make_parts({"down_proj": 352}, 128)
    scale = tensors["model.down_proj.weight_scale"] = distinct_scales(352, 128)
    assert len(scale.view(torch.uint8).unique(dim=0)) == 352
    layer = load_linear(tmp_path, tensors, {"down_proj": 352}, 128, torch.bfloat16)
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
    expected = Oracle(tmp_path / "model.safetensors").outputs(["model.down_proj"], x)[0]
    y = layer(x)
    assert relative_error(y, expected) < 0.003
    # column by column: a few swapped rows would hide in the norm of all
    assert relative_error(y.T, expected.T) < 0.02


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rows", [1, 2, 4, 8, 16, 31, 112, 127, 128, 129, 144])
def test_e13_f18_any_number_of_rows(rows: int, backend: str, tmp_path: Path, blackwell: Blackwell) -> None:
    blackwell(backend)
    check_linear(tmp_path, {"q_proj": 64, "k_proj": 32, "v_proj": 32}, 96, torch.bfloat16, rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("n", [1, 33])
def test_e14_one_block(n: int, dtype: torch.dtype, tmp_path: Path) -> None:
    check_linear(tmp_path, {"down_proj": n}, 16, dtype)


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("quantised", [False, True], ids=["bf16-head", "fp4-head"])
def test_e15_odd_vocabulary(quantised: bool, tp_size: int, written: Written) -> None:
    checkpoint = base(Shape(vocab=321))
    if quantised:
        quantize_head(checkpoint)
        checkpoint.section["exclude_modules"] = []
    folder = written(checkpoint)
    logits = assert_layers_match(folder, tp_size=tp_size)
    assert logits.shape == (1, 321)
    if tp_size == 1:
        runner = load(folder)
        batch = prompt_batch(runner, temperature=2.0**30)
        output = runner.forward(batch)
        drawn = {int(runner.sample(output, batch)) for _ in range(400)}
        assert max(drawn) <= 320 and len(drawn) > 100


def test_e16_integer_parameters_need_no_gradient(written: Written) -> None:
    with torch.enable_grad():
        runner = load(written(base()))
        assert not any(parameter.requires_grad for parameter in runner.model.parameters())
        assert not forward(runner).requires_grad


@pytest.mark.parametrize("tp_size", [2, 4])
def test_dynamic_scales_are_shared_by_the_ranks(tp_size: int, written: Written) -> None:
    """Not a public row: each rank sees a part of the input of a row-parallel layer."""
    checkpoint = base(Shape(vocab=449))
    checkpoint.section["activation_scheme"] = "dynamic"
    assert_layers_match(written(checkpoint), lambda name: "dynamic", tp_size=tp_size)


def test_i3_a_packed_parameter_takes_half_a_byte_a_value(blackwell: Blackwell, tmp_path: Path) -> None:
    n, k = 256, 512
    layer = torch.nn.Module()
    method = ModelOptFp4Config().get_quant_method(layer, "model.down_proj")
    method.create_weights(layer, k, [n], k, n, torch.bfloat16)
    assert method.weight_bytes(layer) == n * k // 2 + n * k // 16 + 2 * 4
    blackwell("cutlass")
    loaded = load_linear(tmp_path, make_parts({"down_proj": n}, k), {"down_proj": n}, k, torch.bfloat16)
    assert 0 <= loaded.quant_method.weight_bytes(loaded) - (n * k // 2 + n * k // 16) <= 64
