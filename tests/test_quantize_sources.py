"""Sources of sglang.quantize: what the server would not load is refused before anything is written."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang.quantize import quantize_checkpoint
from sglang.srt.errors import CheckpointError

TINY = Path(__file__).parent / "fixtures" / "tiny-llama-bf16"
EXTRA = "model.layers.2.input_layernorm.weight"
BIAS = "model.layers.0.mlp.up_proj.bias"
GATE = "model.layers.0.mlp.gate_proj.weight"


def quantize(source: Path, output: Path) -> None:
    quantize_checkpoint(str(source), str(output), "w4a16_nvfp4", show_progress=False)


@pytest.mark.parametrize(
    ("name", "shape", "match"),
    [
        (EXTRA, [256], f"tensor {EXTRA} .* no layer reads it"),
        (BIAS, [512], f"tensor {BIAS} .* no layer reads it"),
        (GATE, [256, 512], rf"tensor {GATE}: expected shape \[512, 256\], found \[256, 512\]"),
        ("model.norm.weight", [1], r"tensor model.norm.weight: expected shape \[256\], found \[1\]"),
        ("lm_head.weight", [319, 256], r"tensor lm_head.weight: expected shape \[320, 256\], found \[319, 256\]"),
        ("model.norm.weight", None, "the checkpoint lacks model.norm.weight"),
    ],
)
def test_what_the_loader_would_refuse(tmp_path: Path, name: str, shape: list[int] | None, match: str) -> None:
    """Also with weights only, for which the model is not run."""
    source = tmp_path / "source"
    shutil.copytree(TINY, source)
    tensors = load_file(source / "model.safetensors")
    tensors.pop(name, None)
    if shape is not None:
        tensors[name] = torch.ones(shape, dtype=torch.bfloat16)
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(CheckpointError, match=match) as caught:
        quantize(source, tmp_path / "out")
    assert str(caught.value).startswith(f"{source} is not what its config.json says: ")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_consolidated_files_are_left_out(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(TINY, source)
    shutil.copy(source / "model.safetensors", source / "consolidated.safetensors")
    quantize(source, tmp_path / "out")
    expected = load_file(TINY.with_name("tiny-llama-modelopt-w4a16") / "model.safetensors")
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == expected.keys()
    assert not list((tmp_path / "out").glob("consolidated*"))


@pytest.mark.parametrize("mounted", [False, True])
def test_an_empty_folder_that_stays(mounted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link to one, and a mount point, which can't be replaced."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    output = tmp_path / "out.v1"
    output.symlink_to(folder)
    rename = Path.rename

    def busy(path: Path, to: Path) -> Path:
        if to == folder:
            raise OSError(16, "Device or resource busy")
        return rename(path, to)

    if mounted:
        monkeypatch.setattr(Path, "is_mount", lambda path: path == folder)
        monkeypatch.setattr(Path, "rename", busy)
    quantize(TINY, output)
    assert output.is_symlink() and not list(tmp_path.rglob("*incomplete*"))
    names = {path.name for path in folder.iterdir()}
    assert names >= {"config.json", "hf_quant_config.json", "model.safetensors"}
