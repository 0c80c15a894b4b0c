"""Scales of an fp8 KV cache: parameters until the checkpoint is loaded, numbers afterwards."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from second_checkpoint import FIXTURES, Tensors, copy_with
from sglang.srt.errors import CheckpointError
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_loader.loader import load_model
from step_harness import Stepper, make_runner, random_tokens

FP8 = torch.float8_e4m3fn
KVFP8 = FIXTURES / "tiny-llama-modelopt-nvfp4-kvfp8"
BF16 = FIXTURES / "tiny-llama-bf16"
WARNING = "stores no k_scale and v_scale; 1.0 is used"


class Attention(nn.Module):
    def __init__(self, kv_cache_dtype: torch.dtype | None, layer: int) -> None:
        super().__init__()
        self.attn = RadixAttention(
            2, 8, 1.0, 1, layer_id=layer, kv_cache_dtype=kv_cache_dtype, prefix=f"layers.{layer}.self_attn.attn"
        )


class Layer(nn.Module):
    def __init__(self, kv_cache_dtype: torch.dtype | None, layer: int) -> None:
        super().__init__()
        self.self_attn = Attention(kv_cache_dtype, layer)


def load(folder: Path, tensors: Tensors, kv_cache_dtype: torch.dtype | None = FP8) -> list[RadixAttention]:
    """The attentions of two layers filled from ``tensors``, to whose names ``layers.`` belongs."""
    model = nn.Module()
    model.layers = nn.ModuleList(Layer(kv_cache_dtype, i) for i in range(2))
    save_file({f"layers.{name}": value for name, value in tensors.items()}, folder / "model.safetensors")
    load_model(model, folder, progress=False)
    return [module for module in model.modules() if isinstance(module, RadixAttention)]


def tensors(*layers: int, k_scale: float = 0.25) -> Tensors:
    found: Tensors = {}
    for layer in layers:
        found[f"{layer}.self_attn.k_proj.k_scale"] = torch.tensor(k_scale)
        found[f"{layer}.self_attn.v_proj.v_scale"] = torch.tensor([0.5])
    return found


def test_scales_are_loaded_from_the_projections_names(tmp_path: Path) -> None:
    for layer in load(tmp_path, tensors(0, 1)):
        assert (layer.k_scale, layer.v_scale) == (0.25, 0.5)
        assert list(layer.parameters()) == []


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_impossible_scale_is_refused(bad: float, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"0\.self_attn\.k_proj\.k_scale: a KV cache scale must be positive"):
        load(tmp_path, tensors(0, 1, k_scale=bad))


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (torch.ones(0), r"must be one value, found shape \[0\]"),
        (torch.ones(2), r"must be one value, found shape \[2\]"),
        (torch.ones(1, dtype=torch.int32), "expected dtype torch.float32, found torch.int32"),
        (torch.ones(1).to(FP8), "expected dtype torch.float32, found torch.float8_e4m3fn"),
    ],
)
def test_scale_of_another_shape_or_dtype_is_refused(bad: torch.Tensor, words: str, tmp_path: Path) -> None:
    name = "1.self_attn.v_proj.v_scale"
    with pytest.raises(CheckpointError, match=f"tensor layers.{name}: .*{words}"):
        load(tmp_path, {**tensors(0, 1), name: bad})


def test_one_scale_without_the_other_is_refused(tmp_path: Path) -> None:
    stored = tensors(0, 1)
    del stored["1.self_attn.v_proj.v_scale"]
    with pytest.raises(CheckpointError, match=r"layer layers\.1\.self_attn.*one KV cache scale but no v_scale"):
        load(tmp_path, stored)


@pytest.mark.parametrize("without", [0, 1])
def test_a_layer_without_scales_beside_one_with_them_is_refused(
    without: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    words = rf"layer layers\.{without}\.self_attn\.attn: the checkpoint stores no k_scale and v_scale, but those of"
    with pytest.raises(CheckpointError, match=rf"{words} other layers \(layers\.{1 - without}\.self_attn\.attn\)"):
        load(tmp_path, tensors(1 - without))
    assert WARNING not in caplog.text


def test_no_scales_at_all_are_stated_each_time(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for count in (1, 2):
        for layer in load(tmp_path, {}):
            assert (layer.k_scale, layer.v_scale) == (1.0, 1.0)
        assert caplog.text.count(WARNING) == count


@pytest.mark.parametrize("kv_cache_dtype", [None, torch.bfloat16])
def test_no_scales_in_another_cache(
    kv_cache_dtype: torch.dtype | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for layer in load(tmp_path, tensors(1), kv_cache_dtype):
        assert layer.k_scale is None and layer.v_scale is None
        assert list(layer.parameters()) == []
    assert WARNING not in caplog.text


# ------------------------------------------------------------------------------------- what the server's flag decides
def scales_of(runner: ModelRunner) -> list[tuple[float | None, float | None]]:
    return [(m.k_scale, m.v_scale) for m in runner.model.modules() if isinstance(m, RadixAttention)]


def logits(runner: ModelRunner) -> torch.Tensor:
    output, _ = Stepper(runner).step({0: random_tokens(40, 320)})
    return output.next_token_logits


def small_scales(values: Tensors) -> None:
    for name in values:
        if name.endswith((".k_scale", ".v_scale")):
            values[name] = torch.tensor(2.0**-9)


def without_declaration(folder: Path) -> Path:
    """The FP8-cache fixture with scales of 2^-9 and no word about the cache in its two configurations."""
    copy_with(KVFP8, folder, small_scales)
    file = folder / "hf_quant_config.json"
    section = json.loads(file.read_text())
    section["quantization"]["kv_cache_quant_algo"] = None
    file.write_text(json.dumps(section))
    file = folder / "config.json"
    config = json.loads(file.read_text())
    del config["quantization_config"]["kv_cache_scheme"]
    file.write_text(json.dumps(config))
    return folder


def test_an_fp8_cache_by_the_flag_has_the_stored_scales(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = without_declaration(tmp_path / "undeclared")
    runner = make_runner(folder, kv_cache_dtype="fp8_e4m3")
    assert runner.kv_cache_dtype == FP8
    assert scales_of(runner) == [(2.0**-9, 2.0**-9)] * 2
    declared = make_runner(copy_with(KVFP8, tmp_path / "declared", small_scales))
    assert torch.equal(logits(runner), logits(declared))
    assert WARNING not in caplog.text
    assert scales_of(make_runner(folder)) == [(None, None)] * 2


def test_an_fp8_cache_by_the_flag_without_stored_scales(caplog: pytest.LogCaptureFixture) -> None:
    runner = make_runner(BF16, kv_cache_dtype="fp8_e4m3")
    assert scales_of(runner) == [(1.0, 1.0)] * 2
    assert caplog.text.count(WARNING) == 1


def test_another_cache_than_declared_ignores_the_scales(tmp_path: Path) -> None:
    declared, undeclared = make_runner(KVFP8, kv_cache_dtype="bf16"), without_declaration(tmp_path / "undeclared")
    assert declared.kv_cache_dtype == torch.bfloat16
    assert scales_of(declared) == [(None, None)] * 2
    assert torch.equal(logits(declared), logits(make_runner(undeclared, kv_cache_dtype="bf16")))


def test_an_update_takes_the_scales_as_the_start_does(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    start = FIXTURES / "tiny-llama-modelopt-nvfp4"
    runner = make_runner(start, kv_cache_dtype="fp8_e4m3", context_length=128)
    assert scales_of(runner) == [(1.0, 1.0)] * 2
    folder = without_declaration(tmp_path / "undeclared")
    assert runner.update_weights_from_disk(str(folder), "auto")[0]
    assert scales_of(runner) == [(2.0**-9, 2.0**-9)] * 2
    caplog.clear()
    assert runner.update_weights_from_disk(str(BF16), "auto")[0]
    assert scales_of(runner) == [(1.0, 1.0)] * 2
    assert caplog.text.count(WARNING) == 1


def test_dummy_scales() -> None:
    runner = make_runner(KVFP8, load_format="dummy")
    assert scales_of(runner) == [(pytest.approx(1e-2), pytest.approx(1e-2))] * 2
