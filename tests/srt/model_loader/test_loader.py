"""Completeness: every parameter once, every tensor consumed or known unused, everything else refused by name."""

import json
import shutil
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from sglang.srt.errors import CheckpointError
from sglang.srt.layers.linear import MergedColumnParallelLinear, ReplicatedLinear
from sglang.srt.layers.quantization.modelopt_quant import ModelOptFp4Config
from sglang.srt.model_loader.checkpoint_reader import CheckpointReader
from sglang.srt.model_loader.loader import fill_with_dummy_weights, load_model, load_weights
from sglang.srt.model_loader.weight_utils import iterate_tensors, safetensors_files

FIXTURE = Path(__file__).parents[2] / "fixtures" / "tiny-llama-bf16"


class Model(nn.Module):
    packed_modules_mapping: ClassVar = {"gate_up_proj": ["gate_proj", "up_proj"]}
    unused_checkpoint_tensors = ("lm_head.weight",)

    def __init__(self, quantized: bool = False) -> None:
        super().__init__()
        config = ModelOptFp4Config(exclude_modules=["out"]) if quantized else None
        self.gate_up_proj = MergedColumnParallelLinear(32, [16, 16], quant_config=config, prefix="gate_up_proj")
        self.out = ReplicatedLinear(32, 8, bias=True, quant_config=config, prefix="out")
        self.norm = nn.Parameter(torch.empty(32))


def full() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    shapes = {
        "gate_proj.weight": (16, 32),
        "up_proj.weight": (16, 32),
        "out.weight": (8, 32),
        "out.bias": (8,),
        "norm": (32,),
    }
    return {name: torch.randn(shape, generator=g) for name, shape in shapes.items()}


def wrap(model: Model) -> nn.Module:
    """``norm`` is a parameter of the root; give the root a name as real models have."""
    outer = nn.Module()
    outer.model = model
    outer.packed_modules_mapping = model.packed_modules_mapping  # type: ignore[assignment]
    outer.unused_checkpoint_tensors = model.unused_checkpoint_tensors  # type: ignore[assignment]
    return outer


def named(tensors: dict[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    return [(name if name.startswith("lm_head") else f"model.{name}", value) for name, value in tensors.items()]


def test_loads_and_ignores_what_is_known_unused() -> None:
    model, tensors = Model(), full()
    extra = {"lm_head.weight": torch.zeros(1), "layers.0.rotary_emb.inv_freq": torch.zeros(1)}
    load_weights(wrap(model), named({**tensors, **extra}))
    assert torch.equal(model.gate_up_proj.weight, torch.cat([tensors["gate_proj.weight"], tensors["up_proj.weight"]]))
    assert torch.equal(model.norm, tensors["norm"])


def test_a_file_with_the_fused_tensor() -> None:
    model, tensors = Model(), full()
    fused = torch.cat([tensors.pop("gate_proj.weight"), tensors.pop("up_proj.weight")])
    load_weights(wrap(model), named({**tensors, "gate_up_proj.weight": fused}))
    assert torch.equal(model.gate_up_proj.weight, fused)


@pytest.mark.parametrize("prefix", ["language_model.", "model.language_model."])
def test_the_text_part_of_a_larger_model(prefix: str) -> None:
    model, tensors = Model(), full()
    names = {f"model.{name}": value for name, value in tensors.items()}
    if prefix == "language_model.":
        stored = {prefix + name: value for name, value in names.items()}
    else:
        stored = {prefix + name.removeprefix("model."): value for name, value in names.items()}
    load_weights(wrap(model), stored.items())
    assert torch.equal(model.norm, tensors["norm"])


def test_a_head_that_the_config_does_not_use_is_named(caplog: pytest.LogCaptureFixture) -> None:
    load_weights(wrap(Model()), named({**full(), "lm_head.weight": torch.zeros(1)}))
    assert "Tensor lm_head.weight is stored but not used" in caplog.text


@pytest.mark.parametrize("name", list(full()))
def test_every_missing_tensor_is_named(name: str) -> None:
    tensors = full()
    del tensors[name]
    with pytest.raises(CheckpointError, match=f"lacks model.{name}$"):
        load_weights(wrap(Model()), named(tensors))


def test_unknown_twice_and_misshapen_tensors_are_named() -> None:
    with pytest.raises(CheckpointError, match=r"model.extra \(torch.float32, \[1\]\) .*no layer reads it"):
        load_weights(wrap(Model()), named({**full(), "extra": torch.zeros(1)}))
    with pytest.raises(CheckpointError, match=r"model.gate_up_proj.weight was given twice"):
        load_weights(wrap(Model()), named({**full(), "gate_up_proj.weight": torch.zeros(32, 32)}))
    with pytest.raises(
        CheckpointError, match=r"tensor model.up_proj.weight: expected shape \[16, 32\], found \[32, 16\]"
    ):
        load_weights(wrap(Model()), named({**full(), "up_proj.weight": torch.zeros(32, 16)}))
    for size in (31, 1, 0):
        with pytest.raises(CheckpointError, match=rf"tensor model.norm: expected shape \[32\], found \[{size}\]$"):
            load_weights(wrap(Model()), named({**full(), "norm": torch.zeros(size)}))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8, torch.int32])
def test_a_norm_of_another_dtype_is_not_converted_without_a_scale(dtype: torch.dtype) -> None:
    with pytest.raises(CheckpointError, match=f"tensor model.norm: expected dtype torch.float32, found {dtype}"):
        load_weights(wrap(Model()), named({**full(), "norm": torch.ones(32).to(dtype)}))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_norm_of_another_float_is_converted(dtype: torch.dtype) -> None:
    model, norm = Model(), torch.randn(32).to(dtype)
    load_weights(wrap(model), named({**full(), "norm": norm}))
    assert torch.equal(model.norm, norm.float())


def nvfp4_tensors() -> dict[str, torch.Tensor]:
    tensors = {name: value for name, value in full().items() if not name.startswith(("gate", "up"))}
    for part in ("gate_proj", "up_proj"):
        tensors[f"{part}.weight"] = torch.zeros(16, 16, dtype=torch.uint8)
        tensors[f"{part}.weight_scale"] = torch.ones(16, 2).to(torch.float8_e4m3fn)
        tensors[f"{part}.weight_scale_2"] = torch.tensor(0.5)
        tensors[f"{part}.input_scale"] = torch.tensor(0.5)
    return tensors


def test_nvfp4_tensors_are_checked_under_their_own_names() -> None:
    load_weights(wrap(Model(quantized=True)), named(nvfp4_tensors()))
    bad = torch.full((16, 2), 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)
    for change, words in (
        ({"up_proj.weight_scale": bad}, r"model.up_proj.weight_scale: block scale \[0, 0\] is 0x7F, which is NaN"),
        ({"gate_proj.weight_scale_2": torch.tensor(0.0)}, r"model.gate_proj.weight_scale_2: .*found 0.0"),
        ({"gate_proj.weight": torch.zeros(16, 32).bfloat16()}, r"model.gate_proj.weight: expected dtype torch.uint8"),
        (
            {"out.weight": torch.zeros(8, 16, dtype=torch.uint8)},
            r"model.out.weight: expected dtype torch.float32, found",
        ),
    ):
        with pytest.raises(CheckpointError, match="tensor " + words):
            load_weights(wrap(Model(quantized=True)), named({**nvfp4_tensors(), **change}))
    tensors = nvfp4_tensors()
    for name in [name for name in tensors if "scale" in name]:
        del tensors[name]
    with pytest.raises(CheckpointError, match=r"lacks model.gate_proj.weight_scale, .* config must exclude them"):
        load_weights(wrap(Model(quantized=True)), named(tensors))


# -------------------------------------------------------------------------------------------------------- files
def test_truncated_pointer_and_missing_files(tmp_path: Path) -> None:
    shutil.copytree(FIXTURE, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-4096])
    with pytest.raises(CheckpointError, match=r"model.safetensors can't be read .*complete"):
        list(iterate_tensors(tmp_path, progress=False))
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(CheckpointError, match="Git LFS pointer"):
        list(iterate_tensors(tmp_path, progress=False))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model-2.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"lists model-2.safetensors, which is not in"):
        safetensors_files(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{")
    with pytest.raises(CheckpointError, match="is not a safetensors index"):
        safetensors_files(tmp_path)
    with pytest.raises(CheckpointError, match=r"has no \*.safetensors file"):
        safetensors_files(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "index",
    [
        "[]",
        "5",
        "null",
        '{"weight_map": []}',
        '{"weight_map": null}',
        '{"weight_map": {"a": 5}}',
        '{"weight_map": {"a": null}}',
        '{"weight_map": {"a": 5, "b": "model.safetensors"}}',
        '{"weight_map": {"a": ["model.safetensors"]}}',
        "\xff",
    ],
)
def test_an_index_that_is_none(index: str, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors.index.json"
    file.write_bytes(index.encode("latin-1"))
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json is not a safetensors index") as caught:
        safetensors_files(tmp_path)
    assert "\n" not in str(caught.value)


def test_what_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").mkdir()
    with pytest.raises(CheckpointError, match=r"a\.safetensors can't be read as safetensors"):
        list(iterate_tensors(tmp_path, progress=False))
    (tmp_path / "a.safetensors").rmdir()
    (tmp_path / "a.safetensors").symlink_to(tmp_path / "gone")  # the hub's cache, half deleted
    with pytest.raises(CheckpointError, match=r"a\.safetensors can't be read as safetensors"):
        list(iterate_tensors(tmp_path, progress=False))


def test_consolidated_files_are_read_only_alone(tmp_path: Path) -> None:
    def stored() -> list[str]:
        return [name for name, _ in iterate_tensors(tmp_path, progress=False)]

    for part in (1, 2):
        save_file({f"theirs.{part}": torch.zeros(1)}, tmp_path / f"consolidated-0000{part}-of-00002.safetensors")
    assert stored() == ["theirs.1", "theirs.2"]
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    save_file({"x": torch.zeros(1)}, tmp_path / "consolidated.safetensors")
    assert stored() == list(CheckpointReader(tmp_path).tensors) == ["x"]


def test_one_tensor_in_two_files(tmp_path: Path) -> None:
    for name in "ab":
        save_file({"x": torch.zeros(1)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(CheckpointError, match=r"tensor x is in b.safetensors and in a.safetensors"):
        list(iterate_tensors(tmp_path, progress=False))


def test_dummy_weights_follow_from_the_seed() -> None:
    def weights(seed: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(seed)
        model = Model(quantized=True)
        fill_with_dummy_weights(model)
        return {name: param.detach().view(torch.uint8) for name, param in model.named_parameters() if param.dim() == 2}

    first, again, other = weights(1), weights(1), weights(2)
    assert any("packed" in name or "weight" in name for name in first)
    for name in first:
        assert torch.equal(first[name], again[name]), name
        assert not torch.equal(first[name], other[name]), name
        assert len(first[name].unique()) > 20, name


def test_dummy_weights_run() -> None:
    model = Model(quantized=True)
    load_model(wrap(model), "", load_format="dummy")
    y = model.gate_up_proj(torch.randn(2, 32))
    assert y.isfinite().all() and y.any()
