"""What keeps loading small: one module in two forms at a time, no more of a file than the tensor at hand."""

import json
import sys
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.quantization import get_quantization
from sglang.srt.layers.quantization.nvfp4 import NvFp4LinearMethod
from sglang.srt.model_loader.loader import load_model, load_weights
from sglang.srt.model_loader.weight_utils import iterate_tensors, safetensors_files
from sglang.srt.models.registry import get_model_class
from sglang.srt.server_args import ServerArgs

FIXTURES = Path(__file__).parents[2] / "fixtures"
NVFP4 = FIXTURES / "tiny-llama-modelopt-nvfp4"


def build(folder: Path) -> nn.Module:
    args = ServerArgs(model_path=str(folder), device="cpu")
    config = ModelConfig.from_server_args(args)
    return get_model_class(config.architecture)(config.hf_config, get_quantization(config, args))


def test_a_module_is_processed_when_its_last_tensor_was_read() -> None:
    model = build(NVFP4)
    tensors = list(iterate_tensors(NVFP4, progress=False))
    read: list[str] = []
    when: dict[str, int] = {}
    names = {module: name for name, module in model.named_modules()}

    def reading() -> object:
        for name, tensor in tensors:
            read.append(name)
            yield name, tensor

    def filled(module: nn.Module) -> None:
        assert names[module] not in when
        when[names[module]] = len(read)

    load_weights(model, reading(), filled)  # type: ignore[arg-type]
    parts = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    for path in when:
        parent, _, leaf = path.rpartition(".")
        prefixes = tuple(f"{parent}.{part}.".lstrip(".") for part in parts.get(leaf, (leaf,)))
        last = max(index for index, name in enumerate(read) if name.startswith(prefixes))
        assert when[path] == last + 1, path
    assert {"model.layers.0.self_attn.qkv_proj", "model.layers.1.mlp.down_proj", "model.norm", "lm_head"} <= set(when)


def test_nothing_holds_the_form_of_the_file_once_a_layer_is_processed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checked when the next layer is processed, while loading goes on."""
    model = build(NVFP4)
    previous: list[weakref.ref[torch.UntypedStorage]] = []
    checked = 0
    process = NvFp4LinearMethod.process_weights_after_loading

    def spy(self: NvFp4LinearMethod, layer: nn.Module) -> None:
        nonlocal checked
        assert not any(ref() is not None for ref in previous)
        checked += len(previous)
        previous.clear()
        for name in ("weight", "weight_scale"):
            previous.append(weakref.ref(getattr(layer, name).untyped_storage()))
        process(self, layer)

    monkeypatch.setattr(NvFp4LinearMethod, "process_weights_after_loading", spy)
    load_model(model, NVFP4, progress=False)
    assert checked == 2 * (8 - 1)


def split_in_two(folder: Path) -> None:
    """The bf16 fixture in two files, the output head in the second."""
    tensors = load_file(FIXTURES / "tiny-llama-bf16" / "model.safetensors")
    files = {name: f"model-{1 + (name == 'lm_head.weight')}.safetensors" for name in tensors}
    for file in set(files.values()):
        save_file({name: value for name, value in tensors.items() if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


def test_the_file_with_the_head_comes_first(tmp_path: Path) -> None:
    split_in_two(tmp_path)
    assert [file.name for file in safetensors_files(tmp_path)] == ["model-2.safetensors", "model-1.safetensors"]
    assert next(iterate_tensors(tmp_path, progress=False))[0] == "lm_head.weight"


def resident(file: Path) -> int:
    """Bytes of ``file``'s maps that are in this process's memory."""
    total, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            ours = line.endswith(str(file))
        elif ours and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_tensor_that_was_read_leaves_memory_and_can_be_read_again(tmp_path: Path) -> None:
    size = 2 << 20
    values = {name: torch.full((size,), i, dtype=torch.uint8) for i, name in enumerate("abcd")}
    # A name with a blank, behind a link, as in the hub's cache.
    file = tmp_path / "the file.safetensors"
    save_file(values, file)
    folder = tmp_path / "snapshot"
    folder.mkdir()
    (folder / "model.safetensors").symlink_to(file)
    seen = []
    for i, (_, tensor) in enumerate(iterate_tensors(folder, progress=False)):
        assert resident(file) < size, "the tensor before is still resident"
        assert int(tensor.sum(dtype=torch.int64)) == i * size
        assert resident(file) >= size - (128 << 10), "this test does not see what is resident"
        seen.append(tensor)
    assert [int(tensor.float().mean()) for tensor in seen] == [0, 1, 2, 3]
    del tensor, seen
    assert resident(file) == 0, "the file is still mapped"


def test_other_memory_than_the_file_is_left_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A reader that copies tensors into memory of its own must not lose them."""
    save_file({"a": torch.ones(1 << 20), "b": torch.ones(1 << 20)}, tmp_path / "model.safetensors")

    class Copying:
        def __enter__(self) -> "Copying":
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def keys(self) -> list[str]:
            return ["a", "b"]

        def get_tensor(self, name: str) -> torch.Tensor:
            return torch.ones(1 << 20)

    monkeypatch.setattr("sglang.srt.model_loader.weight_utils.open_safetensors", lambda file: Copying())
    assert all(bool(tensor.all()) for tensor in dict(iterate_tensors(tmp_path, progress=False)).values())
