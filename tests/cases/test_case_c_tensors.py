"""Groups C and D: tensors and scales at load time, fused parts with different scales."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import FUSED, Checkpoint, Shape, base
from harness import assert_layers_match, assert_refused, forward, linear_layers, load, logits_of
from oracle import Oracle, relative_error
from safetensors.torch import load_file

from sglang.quantize import quantize_checkpoint
from sglang.srt.layers import radix_attention
from sglang.srt.model_executor.model_runner import ModelRunner

Written = Callable[..., Path]
DOWN = "model.layers.0.mlp.down_proj"
O_PROJ = "model.layers.0.self_attn.o_proj"
K_PROJ = "model.layers.0.self_attn.k_proj"
WRONG_DTYPE = "quantised"


def changed(name: str, tensor: Any) -> Checkpoint:
    checkpoint = base()
    assert name in checkpoint.tensors
    checkpoint.tensors[name] = tensor
    return checkpoint


@pytest.mark.parametrize("tensor", ["weight_scale_2", "input_scale", "weight_scale", "weight"])
@pytest.mark.parametrize("layer", [DOWN, K_PROJ])
def test_c1_a_missing_tensor_is_named(layer: str, tensor: str, written: Written) -> None:
    checkpoint = base()
    del checkpoint.tensors[f"{layer}.{tensor}"]
    assert_refused(written(checkpoint), f"lacks {layer}.{tensor}")


def test_c2_a_bf16_layer_that_is_not_excluded(written: Written) -> None:
    checkpoint = base()
    checkpoint.make_plain(O_PROJ)
    assert_refused(written(checkpoint), O_PROJ + ".weight", "torch.uint8", "torch.bfloat16", WRONG_DTYPE)


def test_c4_nibble_order_and_missing_input_scale(written: Written) -> None:
    original = base()
    weight = original.tensors[DOWN + ".weight"]
    swapped = changed(DOWN + ".weight", (weight << 4) | (weight >> 4))
    # Both are legal files; each must be read in the documented order, low nibble first.
    first, second = assert_layers_match(written(original)), assert_layers_match(written(swapped))
    assert not torch.allclose(first, second, atol=0.1)
    # Weight-only too: with quantised inputs, an order that is wrong on both sides cancels.
    assert_layers_match(written(original), lambda name: "none", quantization="w4a16_nvfp4")
    del swapped.tensors[DOWN + ".input_scale"]
    assert_refused(written(swapped), f"lacks {DOWN}.input_scale")


@pytest.mark.parametrize("backend", ["torch", "cpu", "cudnn", "cutlass", "cutedsl", "trtllm"])
def test_c4_one_layer_through_every_backend(backend: str, written: Written, blackwell: Callable[[str], Any]) -> None:
    emulator = blackwell(backend)
    folder = written(base())
    assert_layers_match(folder, dtypes=["bfloat16"])
    assert bool(emulator.calls) == (backend not in ("torch", "cpu"))
    x = torch.randn(5, 512, generator=torch.Generator().manual_seed(0)).mul(50).bfloat16()
    y = linear_layers(load(folder, dtype="bfloat16"))[DOWN](x)
    assert relative_error(y, Oracle(folder / "model.safetensors").outputs([DOWN], x)[0]) < 0.003


def test_c5_transposed_weights(written: Written) -> None:
    name = O_PROJ + ".weight"
    words = (name, "expected shape [256, 128], found [128, 256]")
    assert_refused(written(changed(name, base().tensors[name].T)), *words)
    # The packed weight of k_proj is square (N = K / 2), its scales are not.
    name, scale = K_PROJ + ".weight", K_PROJ + ".weight_scale"
    square = changed(name, base().tensors[name].T)
    assert square.tensors[name].shape == (128, 128)
    square.tensors[scale] = square.tensors[scale].view(torch.uint8).T.contiguous().view(torch.float8_e4m3fn)
    assert_refused(written(square), scale, "expected shape [128, 16], found [16, 128]")


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=str)
def test_c6_shapes_of_a_global_scale(shape: tuple[int, ...], written: Written) -> None:
    checkpoint = base()
    for part in "qkv":
        for tensor in ("weight_scale_2", "input_scale"):
            key = f"model.layers.0.self_attn.{part}_proj.{tensor}"
            checkpoint.tensors[key] = checkpoint.tensors[key].reshape(shape)
    assert torch.equal(logits_of(written(checkpoint)), logits_of(written(base())))
    key = K_PROJ + ".weight_scale_2"
    checkpoint.tensors[key] = torch.full((3,), 1e-3)
    assert_refused(written(checkpoint), key, "expected one value, found shape [3]")


@pytest.mark.parametrize("value", [0.0, -1e-3, float("inf"), float("nan"), 1e-42])
@pytest.mark.parametrize("tensor", ["weight_scale_2", "input_scale"])
def test_c7_illegal_global_scales(tensor: str, value: float, written: Written) -> None:
    name = f"{K_PROJ}.{tensor}"
    assert_refused(written(changed(name, torch.tensor(value))), name, "must be positive, finite and not denormal")


@pytest.mark.parametrize(
    ("byte", "word"), [(0x7F, "NaN"), (0xFF, "NaN"), (0x81, "negative"), (0xFE, "negative"), (0x80, "negative")]
)
def test_c9_illegal_block_scales(byte: int, word: str, written: Written) -> None:
    checkpoint = base()
    checkpoint.scale_bytes(K_PROJ)[127, 15] = byte
    assert_refused(written(checkpoint), K_PROJ + ".weight_scale", f"[127, 15] is 0x{byte:02X}", word)


@pytest.mark.parametrize("byte", [0x7E, 0x00, 0x01, 0x07])
def test_c9_extreme_legal_block_scales(byte: int, written: Written) -> None:
    """448 (f19: it is not clamped to 416), zero and subnormals."""
    checkpoint = base()
    checkpoint.scale_bytes(K_PROJ)[::3] = byte
    assert_layers_match(written(checkpoint))


def test_c10_block_scales_are_bytes_not_numbers(written: Written) -> None:
    key = DOWN + ".weight_scale"
    scales = base().tensors[key]
    as_bytes = written(changed(key, scales.view(torch.uint8)))
    assert torch.equal(assert_layers_match(as_bytes), logits_of(written(base()), dtype="float32"))
    for dtype in (torch.float32, torch.bfloat16, torch.int8):
        assert_refused(written(changed(key, scales.float().to(dtype))), key, str(dtype))


def test_c10_weights_of_another_float_type(written: Written) -> None:
    """An excluded layer in eight bits must not be converted to bf16 without its scale."""
    for dtype in (torch.float8_e5m2, torch.float8_e4m3fn, torch.int8):
        checkpoint = base()
        checkpoint.section["exclude_modules"].append(DOWN)
        checkpoint.replace_layer(DOWN, lambda n, k: {"weight": torch.ones(n, k).to(dtype)})  # noqa: B023
        assert_refused(written(checkpoint), DOWN + ".weight", str(dtype))


def test_c11_global_scales_are_loaded_and_applied_once(written: Written) -> None:
    checkpoint = changed(DOWN + ".weight_scale_2", torch.tensor(1e-4))
    checkpoint.tensors[O_PROJ + ".weight_scale_2"] = torch.tensor(1e-2)
    assert_layers_match(written(checkpoint))


def test_c13_damaged_files(written: Written) -> None:
    folder = written(base())
    file = folder / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-4096])
    assert_refused(folder, "model.safetensors can't be read", "complete")
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 1234567\n")
    assert_refused(folder, "model.safetensors can't be read", "Git LFS pointer")
    file.write_bytes(data)
    names = dict.fromkeys(base().tensors, "model.safetensors")
    index = {"weight_map": {**names, "lm_head.weight": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert_refused(folder, "lists model-00002-of-00002.safetensors", "not in")


def test_c14_kv_cache_scales_without_an_fp8_cache(written: Written) -> None:
    checkpoint = base()
    for i in range(2):
        checkpoint.tensors[f"model.layers.{i}.self_attn.k_proj.k_scale"] = torch.tensor(0.5)
        checkpoint.tensors[f"model.layers.{i}.self_attn.v_proj.v_scale"] = torch.tensor(0.25)
    runner = load(written(checkpoint))
    assert runner.kv_cache_dtype is torch.bfloat16
    assert torch.equal(forward(runner), logits_of(written(base())))


def kv_scales(runner: ModelRunner) -> tuple[float | None, float | None]:
    """Those of layer 1."""
    attention = runner.model.get_submodule("model.layers.1.self_attn.attn")
    assert isinstance(attention, radix_attention.RadixAttention)
    return attention.k_scale, attention.v_scale


def test_c15_kv_cache_algorithms(written: Written, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint = base()
    assert load(written(checkpoint)).kv_cache_dtype is torch.bfloat16
    checkpoint.section["kv_cache_quant_algo"] = "NVFP4"
    assert_refused(written(checkpoint), "kv_cache_quant_algo 'NVFP4' is not served")
    checkpoint.section["kv_cache_quant_algo"] = "FP8"
    with caplog.at_level(logging.WARNING):
        runner = load(written(checkpoint))
    warnings = [record.getMessage() for record in caplog.records if "k_scale" in record.getMessage()]
    assert len(warnings) == 1 and "1.0 is used" in warnings[0]
    assert runner.kv_cache_dtype is torch.float8_e4m3fn
    assert kv_scales(runner) == (1.0, 1.0)
    checkpoint.tensors["model.layers.1.self_attn.k_proj.k_scale"] = torch.tensor(0.3)
    assert_refused(written(checkpoint), "model.layers.1.self_attn", "no v_scale")
    checkpoint.tensors["model.layers.1.self_attn.v_proj.v_scale"] = torch.tensor(0.7)
    assert_refused(written(checkpoint), "model.layers.0.self_attn", "no k_scale and v_scale, but those of other layers")
    for part in "kv":
        checkpoint.tensors[f"model.layers.0.self_attn.{part}_proj.{part}_scale"] = torch.tensor(0.5)
    assert kv_scales(load(written(checkpoint))) == pytest.approx((0.3, 0.7), rel=1e-7)


@pytest.mark.parametrize("tp_size", [2, 4])
def test_c16_fused_scales_are_sharded_part_by_part(tp_size: int, written: Written) -> None:
    """Unequal scales, and with four ranks two of them hold each KV head."""
    checkpoint = base(Shape(vocab=449))
    for index, name in enumerate(checkpoint.layers("*")):
        key = name + ".weight_scale_2"
        checkpoint.tensors[key] = checkpoint.tensors[key] * (1 + index % 5)
    folder = written(checkpoint)
    sharded = assert_layers_match(folder, tp_size=tp_size)
    torch.testing.assert_close(sharded, assert_layers_match(folder), rtol=0, atol=1e-4)


def test_c17_the_source_dtype_does_not_matter(tmp_path: Path, written: Written) -> None:
    plain = base(Shape(layers=1))
    plain.make_plain("*")
    plain.hf_quant_config = None
    results = []
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        # 1/256 of bf16's range is exact in all three.
        copies = {name: (t.float() * 16).round().div(16).to(dtype) for name, t in plain.tensors.items()}
        checkpoint = Checkpoint(plain.shape, {**plain.config, "torch_dtype": str(dtype)[6:]}, copies)
        out = tmp_path / f"out-{dtype}"
        quantize_checkpoint(str(written(checkpoint, tokenizer=True)), str(out), "w4a16_nvfp4", show_progress=False)
        results.append(load_file(out / "model.safetensors"))
    quantised = [name for name, tensor in results[0].items() if tensor.dtype == torch.uint8]
    assert len(quantised) == 7
    for name in quantised:
        for key in (name, name + "_scale"):
            raw = [result[key].view(torch.uint8) for result in results]
            assert torch.equal(raw[0], raw[1]) and torch.equal(raw[0], raw[2]), key


def test_c18_zeros_in_zeros_out(written: Written) -> None:
    checkpoint = base(attention_bias=True)
    g = torch.Generator().manual_seed(5)
    for name in checkpoint.layers("*self_attn*"):
        checkpoint.tensors[name + ".bias"] = torch.randn(checkpoint.shape.linears()[name][0], generator=g).bfloat16()
    checkpoint.scale_bytes(K_PROJ)[:, 3] = 0  # a column of all-zero blocks
    checkpoint.scale_bytes(O_PROJ)[17] = 0  # an all-zero row
    assert_layers_match(written(checkpoint))
    for scheme in ("static", "dynamic"):
        checkpoint.section["activation_scheme"] = scheme
        runner = load(written(checkpoint))
        for name, layer in linear_layers(runner).items():
            zeros = torch.zeros(3, layer.input_size, dtype=runner.dtype)
            y = layer(zeros)
            expected = torch.zeros_like(y) if layer.bias is None else layer.bias.expand_as(y)
            assert torch.equal(y, expected), name


# ------------------------------------------------------------------------------------------------------------ group D
def test_d3_parts_that_differ_by_one_ulp(written: Written) -> None:
    name = "model.layers.0.mlp.up_proj.weight_scale_2"
    value = base().tensors[name]
    assert_layers_match(written(changed(name, torch.nextafter(value, torch.tensor(1.0)))))


@pytest.mark.parametrize("ratio", [1.5, 300.0])
def test_d3_parts_with_different_global_scales(ratio: float, written: Written) -> None:
    checkpoint = base()
    for parts in FUSED.values():
        for index, part in enumerate(parts):
            for key in checkpoint.names(f"*.{part}.weight_scale_2"):
                checkpoint.tensors[key] = checkpoint.tensors[key] * ratio ** (index - 1)
    assert_layers_match(written(checkpoint))


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("scales", ["one", "one a part"])
def test_a_file_that_stores_the_fused_layers(scales: str, tp_size: int, written: Written) -> None:
    """Not a public row: ``qkv_proj`` and ``gate_up_proj`` in the file, with one global scale or one for each part."""
    source, fused = base(), base()
    if scales == "one a part":
        for key in source.names("*.k_proj.weight_scale_2") + source.names("*.up_proj.weight_scale_2"):
            source.tensors[key] = source.tensors[key] * 3
    for module, parts in FUSED.items():
        for first in source.names(f"*.{parts[0]}.*"):
            names = [first.replace(f".{parts[0]}.", f".{part}.") for part in parts]
            tensors = [source.tensors[name] for name in names]
            for name in names:
                del fused.tensors[name]
            if tensors[0].dim() == 2:
                raw = torch.cat([tensor.view(torch.uint8) for tensor in tensors])
                value = raw.view(tensors[0].dtype)
            else:
                value = tensors[0] if len({float(tensor) for tensor in tensors}) == 1 else torch.stack(tensors)
            fused.tensors[first.replace(f".{parts[0]}.", f".{module}.")] = value
    assert_layers_match(written(fused), source=written(source), tp_size=tp_size)


@pytest.mark.parametrize("largest", ["q", "k", "v"])
def test_d4_input_scales_that_differ(largest: str, written: Written, blackwell: Callable[[str], Any]) -> None:
    checkpoint = base()
    for part in "qkv":
        for key in checkpoint.names(f"*.{part}_proj.input_scale"):
            checkpoint.tensors[key] = checkpoint.tensors[key] / (1 if part == largest else 3)
    folder = written(checkpoint)
    assert_layers_match(folder)
    blackwell("cutlass")
    assert_layers_match(folder, dtypes=["bfloat16"])
