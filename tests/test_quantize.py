import json
import re
import runpy
import shutil
import signal
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang import quantize
from sglang.quantize import quantize_checkpoint
from sglang.srt.errors import ArgumentError, CheckpointError, StartupError
from sglang.srt.layers.quantization.nvfp4_weight import global_scale_from_amax
from sglang.srt.utils.cli import run_main

FIXTURES = Path(__file__).parent / "fixtures"
TINY = FIXTURES / "tiny-llama-bf16"

Tensors = dict[str, torch.Tensor]


def to_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and to_bytes(a) == to_bytes(b)


def quantize_quietly(source: Path, output: Path, scheme: Any = "w4a16_nvfp4", **options: Any) -> Tensors:
    quantize_checkpoint(str(source), str(output), scheme, show_progress=False, **options)
    return {name: tensor for file in output.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.fixture
def editable(tmp_path: Path) -> Callable[..., Path]:
    """A copy of the tiny model with changed tensors (None removes one) and config entries."""

    def make(config: dict[str, Any] | None = None, **changes: torch.Tensor | None) -> Path:
        folder = tmp_path / "source"
        shutil.copytree(TINY, folder)
        tensors = load_file(folder / "model.safetensors")
        for name, tensor in changes.items():
            del tensors[name]
            if tensor is not None:
                tensors[name] = tensor
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        original = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(original | (config or {})))
        return folder

    return make


# ---------------------------------------------------------------------------------------- the fixtures of ModelOpt
@pytest.mark.parametrize(("scheme", "name"), [("nvfp4", "nvfp4"), ("w4a16_nvfp4", "w4a16")])
def test_output_equals_modelopt(tmp_path: Path, scheme: str, name: str) -> None:
    expected_folder = FIXTURES / f"tiny-llama-modelopt-{name}"
    ours = quantize_quietly(TINY, tmp_path / "out", scheme)
    expected = load_file(expected_folder / "model.safetensors")
    assert ours.keys() == expected.keys()
    for key, tensor in expected.items():
        if key.endswith(".input_scale"):  # calibrated on other text
            assert ours[key].dtype == tensor.dtype and ours[key].shape == tensor.shape
            assert 0.5 < ours[key] / tensor < 2
        else:
            assert same(ours[key], tensor), key

    def load(folder: Path, file: str) -> dict[str, Any]:
        value: dict[str, Any] = json.loads((folder / file).read_text())
        return value

    ours_hf, expected_hf = (load(folder, "hf_quant_config.json") for folder in (tmp_path / "out", expected_folder))
    assert ours_hf["quantization"] == expected_hf["quantization"]
    config = load(tmp_path / "out", "config.json")
    entry = config.pop("quantization_config")
    expected_entry = load(expected_folder, "config.json")["quantization_config"]
    assert entry.pop("producer") == ours_hf["producer"] == {"name": "sglang-nvfp4", "version": quantize.__version__}
    expected_entry.pop("producer")
    assert entry == expected_entry
    assert config == load(TINY, "config.json")


def test_other_files_are_copied_and_readable(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(TINY, source)
    (source / "LICENSE").write_text("free")
    (source / "notes.md").write_text("about the bf16 model")
    quantize_quietly(source, tmp_path / "out")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "LICENSE"):
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
    assert not (tmp_path / "out" / "notes.md").exists()
    modes = {stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "out").glob("*.*")}
    assert len(modes) == 1


def test_zero_weights(tmp_path: Path, editable: Callable[..., Path]) -> None:
    zero = torch.zeros(256, 256, dtype=torch.bfloat16)
    # Without values the output projection's input is zero as well.
    source = editable(
        **{
            "model.layers.0.self_attn.v_proj.weight": zero[:128].clone(),
            "model.layers.0.self_attn.o_proj.weight": zero,
        }
    )
    ours = quantize_quietly(source, tmp_path / "out", "nvfp4")
    module = "model.layers.0.self_attn.o_proj"
    assert ours[f"{module}.weight_scale_2"] == ours[f"{module}.input_scale"] == 1
    assert not ours[f"{module}.weight"].any() and (ours[f"{module}.weight_scale"].float() == 1).all()
    scales = [tensor for name, tensor in ours.items() if name.endswith(("_scale", "_scale_2"))]
    assert all(torch.isfinite(scale.float()).all() and (scale.float() > 0).all() for scale in scales)


# ------------------------------------------------------------------------------------------------ files
def split_into_shards(folder: Path, dtype: torch.dtype) -> None:
    """Rewrite the folder's single file as three, so that fused parts end up in different ones."""
    tensors = {name: t.to(dtype) for name, t in load_file(folder / "model.safetensors").items()}
    (folder / "model.safetensors").unlink()
    weight_map = {name: f"model-{i % 3 + 1:05}-of-00003.safetensors" for i, name in enumerate(sorted(tensors))}
    for file in set(weight_map.values()):
        save_file({name: t for name, t in tensors.items() if weight_map[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_shards(
    tmp_path: Path, editable: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    source = editable()
    split_into_shards(source, dtype)
    limit = 400_000
    monkeypatch.setattr(quantize, "MAX_SHARD_BYTES", limit)
    out = tmp_path / "out"
    ours = quantize_quietly(source, out)
    expected = load_file(FIXTURES / "tiny-llama-modelopt-w4a16" / "model.safetensors")
    assert ours.keys() == expected.keys()
    for name, tensor in expected.items():  # fp32 copies of bf16 weights quantise to the same bytes
        assert same(ours[name], tensor.to(dtype) if tensor.dtype == torch.bfloat16 else tensor), name

    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(out.glob("*.safetensors"))
    assert len(files) >= 3
    assert [f.name for f in files] == [f"model-{i:05}-of-{len(files):05}.safetensors" for i in range(1, 1 + len(files))]
    assert all(file.stat().st_size < limit * 1.05 for file in files)
    for file in files:
        assert {n for n, where in index["weight_map"].items() if where == file.name} == load_file(file).keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in ours.values())


def test_output_that_fits_one_file_gets_no_index(tmp_path: Path, editable: Callable[..., Path]) -> None:
    source = editable()
    split_into_shards(source, torch.bfloat16)
    quantize_quietly(source, tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").is_file()
    assert not (tmp_path / "out" / "model.safetensors.index.json").exists()


def test_exclude(tmp_path: Path) -> None:
    # k_proj of layer 1 has its own, smaller range; without v_proj the largest of q and k decides.
    ours = quantize_quietly(TINY, tmp_path / "out", exclude=["*.1.self_attn.v_proj", "model.layers.0.mlp"])
    source = load_file(TINY / "model.safetensors")
    excluded = ["model.layers.1.self_attn.v_proj"]
    excluded += [f"model.layers.0.mlp.{part}_proj" for part in ("gate", "up", "down")]
    for module in excluded:
        assert same(ours[f"{module}.weight"], source[f"{module}.weight"])
        assert f"{module}.weight_scale" not in ours
    amax = max(float(source[f"model.layers.1.self_attn.{p}_proj.weight"].abs().max()) for p in "qk")
    for part in "qk":
        assert ours[f"model.layers.1.self_attn.{part}_proj.weight_scale_2"] == global_scale_from_amax(amax)
    listed = json.loads((tmp_path / "out" / "hf_quant_config.json").read_text())["quantization"]["exclude_modules"]
    assert sorted(listed) == sorted(["lm_head", "model.embed_tokens", *excluded])
    assert json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["ignore"] == listed


def test_interrupted_run_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Path] = []

    def interrupted(_tensors: Tensors, path: Path, **_: Any) -> None:
        seen.extend(path.parent.parent.iterdir())
        raise KeyboardInterrupt

    monkeypatch.setattr(quantize, "save_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        quantize_quietly(TINY, tmp_path / "parent" / "out")
    assert [path.name.startswith("out.incomplete-") for path in seen] == [True]
    assert not list((tmp_path / "parent").iterdir())


def test_calibration_text_is_used(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("ab ab ab ab")
    (tmp_path / "two.txt").write_text("12 + 3 = 15; 7 * 8 = 56")
    results = [
        quantize_quietly(TINY, tmp_path / f"out-{name}", "nvfp4", calibration_text=str(tmp_path / f"{name}.txt"))
        for name in ("one", "two")
    ]
    key = "model.layers.1.mlp.down_proj.input_scale"
    assert results[0][key] != results[1][key]


# ------------------------------------------------------------------------------------------------ refusals
def refused(source: Path, output: Path, error: type[StartupError], match: str, **options: Any) -> None:
    with pytest.raises(error, match=match) as caught:
        quantize_quietly(source, output, **options)
    assert type(caught.value) is error and "\n" not in str(caught.value)
    assert not list(output.parent.glob(f"{output.name}*")), "something was left behind"


DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", [DOWN, "model.norm.weight"])
def test_not_finite(tmp_path: Path, editable: Callable[..., Path], name: str, value: float) -> None:
    tensor = load_file(TINY / "model.safetensors")[name]
    tensor.view(-1)[77] = value
    refused(editable(**{name: tensor}), tmp_path / "out", CheckpointError, f"tensor {name} has NaN or infinite")


@pytest.mark.parametrize(
    ("config", "changes", "match"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, {}, "GPT2LMHeadModel.*LlamaForCausalLM"),
        ({"quantization_config": {"quant_method": "modelopt"}}, {}, "already quantised"),
        ({}, {DOWN: None}, f"{DOWN} is missing"),
        ({}, {DOWN: torch.zeros(256, 504)}, rf"{DOWN} has 504 input features.*--exclude '\*.down_proj'"),
        ({}, {DOWN: torch.zeros(256 * 512)}, rf"{DOWN} has shape \[131072\]"),
        ({}, {DOWN: torch.zeros(256, 256, dtype=torch.uint8)}, f"{DOWN} has dtype U8"),
        ({}, {"model.layers.0.input_layernorm.weight": None}, "lacks model.layers.0.input_layernorm.weight"),
        ({}, {DOWN: torch.zeros(256, 528)}, rf"{DOWN}: expected shape \[256, 512\], found \[256, 528\]"),
        ({}, {"model.embed_tokens.weight": None}, "lacks model.embed_tokens.weight"),
        ({}, {DOWN: torch.full((256, 512), 3e38), "model.layers.1.mlp.up_proj.weight": torch.full((512, 256), 3e38)},
         "the input of model.layers.1.mlp.down_proj is NaN or infinite"),
    ],
)  # fmt: skip
def test_bad_checkpoint(
    tmp_path: Path, editable: Callable[..., Path], config: dict[str, Any], changes: dict[str, Any], match: str
) -> None:
    refused(editable(config, **changes), tmp_path / "out", CheckpointError, match, scheme="nvfp4")


def test_already_quantised(tmp_path: Path) -> None:
    for name in ("modelopt-nvfp4", "ct-nvfp4"):
        refused(FIXTURES / f"tiny-llama-{name}", tmp_path / "out", CheckpointError, "already quantised")


def test_truncated_file(tmp_path: Path, editable: Callable[..., Path]) -> None:
    source = editable()
    whole = (source / "model.safetensors").read_bytes()
    (source / "model.safetensors").write_bytes(whole[:-100])
    refused(source, tmp_path / "out", CheckpointError, "model.safetensors can't be read")


def test_without_tokenizer_only_weights(tmp_path: Path, editable: Callable[..., Path]) -> None:
    source = editable()
    for file in source.glob("tokenizer*"):
        file.unlink()
    refused(source, tmp_path / "out", CheckpointError, "calibration needs the tokenizer", scheme="nvfp4")
    assert quantize_quietly(source, tmp_path / "out")


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"scheme": "int4"}, "--scheme int4: unknown; valid: nvfp4, w4a16_nvfp4"),
        ({"calibration_text": "x.txt"}, "--calibration-text has no effect with --scheme w4a16_nvfp4"),
        ({"scheme": "nvfp4", "calibration_text": "no/such.txt"}, "--calibration-text no/such.txt: can't be read"),
        (
            {"exclude": ["*.q_proj", "*.qproj"]},
            r"--exclude \*.qproj: matches no layer.*model.layers.0.self_attn.q_proj",
        ),
        ({"exclude": ["re:("]}, r"--exclude re:\(:"),
        ({"exclude": ["*"]}, "no layer to quantise"),
    ],
)
def test_bad_arguments(tmp_path: Path, options: dict[str, Any], match: str) -> None:
    refused(TINY, tmp_path / "out", ArgumentError, match, **options)


@pytest.mark.parametrize("content", [b"", b" \n", b"\xff\xfe\x00"])
def test_bad_calibration_text(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "t.txt").write_bytes(content)
    options: dict[str, Any] = {"scheme": "nvfp4", "calibration_text": str(tmp_path / "t.txt")}
    refused(TINY, tmp_path / "out", ArgumentError, "t.txt: ", **options)


def test_output_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("precious")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ArgumentError, match="is a file"):
        quantize_quietly(TINY, tmp_path / "file")
    with pytest.raises(ArgumentError, match="not empty"):
        quantize_quietly(TINY, tmp_path / "full")
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["file"]
    assert quantize_quietly(TINY, tmp_path / "empty")


def test_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10))
    refused(TINY, tmp_path / "out", StartupError, "0.0 GB are free")


def test_output_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    refused(TINY, tmp_path / "file" / "out", StartupError, "file/out: writing failed: ")


# ------------------------------------------------------------------------------------------------ command line
@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., int]]:
    before = signal.getsignal(signal.SIGTERM)

    def run(*arguments: object) -> int:
        monkeypatch.setattr(sys, "argv", ["quantize", *map(str, arguments)])
        try:
            run_main(quantize.main)
        except SystemExit as end:
            return int(end.code or 0)
        return 0

    yield run
    signal.signal(signal.SIGTERM, before)


def test_command(tmp_path: Path, command: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    arguments = [
        "--model-path",
        TINY,
        "--output",
        out,
        "--exclude",
        "*.o_proj",
        "--exclude",
        "*.0.mlp.up_proj",
        "*.1.*",
    ]
    assert command(*arguments) == 0
    printed, bars = capsys.readouterr()
    assert printed.startswith(f"{out}: 5 linear layers quantised to nvfp4, 9 excluded. Size 2.7 MB -> ")
    assert all(f"{bar}: 100%" in bars for bar in ("Reading weights", "Calibrating", "Quantizing"))
    assert command(*arguments) == 2
    assert capsys.readouterr().err == f"error: --output {out}: the folder is not empty; remove it or choose another\n"


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--output", "o"], 2, "--model-path"),
        (["--model-path", TINY, "--output", "o", "--scheme", "fp8"], 2, "fp8.*nvfp4"),
        (["--model-path", TINY, "--output", "o", "--bits", "4"], 2, "--bits"),
        (["--model-path", "./no/such/folder", "--output", "o"], 1, "no such folder"),
        (["--model-path", FIXTURES, "--output", "o"], 1, "config.json"),
    ],
)
def test_command_errors_are_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    arguments: list[Any],
    status: int,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command(*arguments) == status
    printed, errors = capsys.readouterr()
    assert printed == "" and errors.startswith("error: ") and errors.count("\n") == 1
    assert re.search(message, errors)


def test_example(capsys: pytest.CaptureFixture[str]) -> None:
    example = Path(__file__).parent.parent / "examples" / "quantize_to_nvfp4.py"
    runpy.run_path(str(example), run_name="__main__")
    printed = capsys.readouterr().out
    assert "13 linear layers quantised to nvfp4, 1 excluded" in printed
    assert float(printed.rsplit(":", 1)[1]) < 0.12
