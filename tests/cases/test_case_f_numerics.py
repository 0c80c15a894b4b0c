"""Group F: inputs of every form, and numerics."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import base
from harness import assert_layers_match, layer_errors, linear_layers, load
from oracle import Oracle, relative_error
from test_case_e_shapes import BACKENDS, make_parts

from sglang.srt.errors import ArgumentError
from sglang.srt.layers.quantization.fp4_utils import Target, backends, resolve_fp4_gemm_backend
from sglang.srt.layers.quantization.nvfp4 import Activation, NvFp4Linear, NvFp4Weight
from sglang.srt.layers.quantization.nvfp4_utils import swizzle_scale, unswizzle_scale

Written = Callable[..., Path]
Blackwell = Callable[[str], Any]
QKV = "model.layers.0.self_attn.qkv_proj"
PARTS = [f"model.layers.0.self_attn.{part}_proj" for part in "qkv"]
DOWN = "model.layers.0.mlp.down_proj"


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3)).bfloat16()


@pytest.mark.parametrize("backend", BACKENDS)
def test_f1_rows_depend_neither_on_neighbours_nor_on_earlier_calls(
    backend: str, written: Written, blackwell: Blackwell
) -> None:
    blackwell(backend)
    folder = written(base())
    layer = linear_layers(load(folder))[DOWN]
    x = randn(33, 512)
    alone = {rows: layer(x[:rows]) for rows in (1, 7, 8, 9, 31, 32, 33)}
    assert relative_error(alone[33], Oracle(folder / "model.safetensors").outputs([DOWN], x)[0]) < 0.003
    layer(torch.full((33, 512), 1e4).bfloat16())  # every block scale of the input becomes 448
    loud = torch.full((33, 512), 1e4).bfloat16()
    for rows, expected in alone.items():
        assert torch.equal(layer(x[:rows]), expected)
        loud[:rows] = x[:rows]
        # not bit for bit: a product of other shape may sum in another order
        assert relative_error(layer(loud)[:rows], expected.double().numpy()) < 0.003


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(2, 3, 256), (1, 1, 256), (256,)], ids=str)
def test_f4_any_number_of_dimensions(
    shape: tuple[int, ...], backend: str, written: Written, blackwell: Blackwell
) -> None:
    blackwell(backend)
    layer = linear_layers(load(written(base())))[QKV]
    x = randn(*shape)
    y = layer(x)
    assert y.shape == (*shape[:-1], 512)
    assert torch.equal(y.reshape(-1, 512), layer(x.reshape(-1, 256)))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bias", [False, True])
def test_f5_zero_rows(bias: bool, backend: str, written: Written, blackwell: Blackwell) -> None:
    blackwell(backend)
    checkpoint = base(attention_bias=bias)
    for name, (n, _) in checkpoint.shape.linears().items():
        if bias and "self_attn" in name:
            checkpoint.tensors[name + ".bias"] = randn(n)
    layer = linear_layers(load(written(checkpoint)))[QKV]
    for shape in ((0, 256), (0, 3, 256), (3, 0, 256)):
        y = layer(torch.zeros(shape, dtype=torch.bfloat16))
        assert y.shape == (*shape[:-1], 512) and y.dtype == torch.bfloat16


@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_f7_sm120_takes_only_what_has_kernels_there(backend: str) -> None:
    """Selection only; that a product of zeros is caught needs the device."""
    consumer = Target("cuda", (12, 0), "13.0", "0.6.13", "9.15.0", "1.15", "4.5.0")
    assert resolve_fp4_gemm_backend("auto", None, consumer).name == "cutlass"
    if backend in ("cutlass", "cudnn"):
        assert resolve_fp4_gemm_backend(backend, None, consumer).name == backend
        return
    with pytest.raises(ArgumentError, match=rf"{backend} can't run on cuda with compute capability 12.0"):
        resolve_fp4_gemm_backend(backend, None, consumer)


@pytest.mark.parametrize("backend", BACKENDS)
def test_f12_values_beyond_the_static_range_are_clipped(backend: str, written: Written, blackwell: Blackwell) -> None:
    blackwell(backend)
    folder = written(base())
    layer = linear_layers(load(folder))[DOWN]
    x = randn(4, 512)
    calm = layer(x)
    x[2, 100] = 60 * 6.0
    y = layer(x)
    expected = Oracle(folder / "model.safetensors").outputs([DOWN], x)[0]
    assert relative_error(y, expected) < 0.003
    exact = Oracle(folder / "model.safetensors", lambda name: "none").outputs([DOWN], x)[0]
    assert relative_error(y, exact) > 0.5
    others = [0, 1, 3]
    assert torch.equal(y[others], calm[others])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_f13_outputs_have_the_dtype_of_the_model(dtype: str, written: Written) -> None:
    assert torch.get_default_dtype() == torch.float32
    folder = written(base())
    runner = load(folder, dtype=dtype)
    for name, layer in linear_layers(runner).items():
        if name != "lm_head":  # logits are float32
            assert layer(randn(3, layer.input_size).to(runner.dtype)).dtype == getattr(torch, dtype)
    errors, logits = layer_errors([runner], Oracle(folder / "model.safetensors"))
    assert max(errors.values()) < 0.003 and logits[0].dtype == torch.float32


def weight(**changes: Any) -> NvFp4Weight:
    tensors = make_parts({"down_proj": 32}, 64)
    given = {
        "packed": tensors["model.down_proj.weight"],
        "scale": tensors["model.down_proj.weight_scale"],
        "global_scales": torch.tensor([0.01]),
        "part_sizes": (32,),
        "activation": Activation.STATIC,
        "dtype": torch.bfloat16,
        "input_scale": torch.tensor(0.002),
        "input_scale_inv": torch.tensor(500.0),
    }
    return NvFp4Weight(**{**given, **changes})


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"packed": torch.zeros(32, 32)}, "packed"),
        ({"packed": torch.zeros(32, 30, dtype=torch.uint8)}, "packed"),
        ({"scale": torch.zeros(32, 4)}, "scale"),
        ({"scale": torch.zeros(31, 4).to(torch.float8_e4m3fn)}, "scale"),
        ({"global_scales": torch.tensor([0.1, 0.2])}, "global_scales"),
        ({"global_scales": torch.tensor([0.1]).double()}, "global_scales"),
        ({"part_sizes": (16, 8), "global_scales": torch.tensor([0.1, 0.2])}, "part_sizes"),
        ({"input_scale": None}, "input_scale"),
        ({"input_scale_inv": None}, "input_scale_inv"),
        ({"input_scale": torch.tensor([0.1, 0.2])}, "input_scale"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_f14_arguments_of_the_product_are_checked(changes: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=rf"^{name}: "):
        NvFp4Linear(weight(**changes), backends()["torch"]())


def test_f14_inputs_of_the_product_are_checked() -> None:
    linear = NvFp4Linear(weight(), backends()["torch"]())
    for x in (randn(3, 48), randn(3, 64).float()):
        with pytest.raises(ValueError, match=r"^x: expected \[..., 64\]"):
            linear(x)
    with pytest.raises(ValueError, match=r"^bias: expected \[32\]"):
        linear(randn(3, 64), randn(31))


@pytest.mark.parametrize("rows_per_tile", [8, 128])
@pytest.mark.parametrize("shape", [(1, 1), (128, 4), (130, 5)], ids=str)
def test_f15_scale_layouts_go_there_and_back(shape: tuple[int, int], rows_per_tile: int) -> None:
    scale = torch.randint(1, 0x7F, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    there = swizzle_scale(scale, rows_per_tile)
    assert there.shape == (-(-shape[0] // rows_per_tile) * rows_per_tile, -(-shape[1] // 4) * 4)
    assert torch.equal(unswizzle_scale(there, *shape, rows_per_tile), scale)
    assert there.long().sum() == scale.long().sum()  # what was added is zero


def test_f19_the_largest_block_scale_is_448(written: Written) -> None:
    checkpoint = base()
    for name in checkpoint.layers("*"):
        checkpoint.scale_bytes(name)[:, ::5] = 0x7E
    assert_layers_match(written(checkpoint))
