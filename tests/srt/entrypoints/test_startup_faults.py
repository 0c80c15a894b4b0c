"""What is wrong before anything is started is told before anything is started."""

import json
import shutil
import socket
import tempfile
from pathlib import Path
from typing import Any

import pytest

from http_server_thread import FIXTURE
from sglang.srt.entrypoints.http_server import launch_server
from sglang.srt.errors import ArgumentError, CheckpointError, StartupError
from sglang.srt.managers.hf_tokenizer import get_tokenizer
from sglang.srt.server_args import ServerArgs


def never_started(*_: Any) -> None:
    raise AssertionError("the scheduler was started")


def launch(port: int, model: Path = FIXTURE, **arguments: Any) -> None:
    args = {"model_path": str(model), "device": "cpu", "port": port, **arguments}
    launch_server(ServerArgs(**args), never_started)


@pytest.fixture
def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of the fixture without its weights: nothing here may want to read them."""
    return Path(shutil.copytree(FIXTURE, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors")))


def edit_config(model: Path, **changes: Any) -> None:
    file = model / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_port_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = int(taken.getsockname()[1])
        with pytest.raises(StartupError, match=f"{port}.*in use") as caught:
            launch(port)
        assert caught.value.exit_code == 1


def test_architecture(free_port: int, model: Path) -> None:
    edit_config(model, architectures=["NoSuchModel"])
    with pytest.raises(CheckpointError, match="LlamaForCausalLM"):
        launch(free_port, model)


def test_quantization(free_port: int, model: Path) -> None:
    edit_config(model, quantization_config={"quant_method": "no_such_method"})
    with pytest.raises(CheckpointError, match="no_such_method"):
        launch(free_port, model)


def test_fp4_backend(free_port: int, model: Path) -> None:
    with pytest.raises(ArgumentError, match="cutlass") as caught:
        launch(free_port, model, fp4_gemm_runner_backend="cutlass")
    assert caught.value.exit_code == 2


def test_no_tokenizer(free_port: int, model: Path) -> None:
    (model / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match="no tokenizer.*--tokenizer-path"):
        launch(free_port, model)


def test_broken_tokenizer(free_port: int, model: Path) -> None:
    (model / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match="can't be loaded"):
        launch(free_port, model)


def test_tokenizer_path(free_port: int, model: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="elsewhere"):
        launch(free_port, model, tokenizer_path=str(tmp_path / "elsewhere"))


def test_long_folder_for_sockets(free_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/" + "x" * 90)
    with pytest.raises(StartupError, match="TMPDIR"):
        launch(free_port)


def test_tokenizer_neither_cuts_nor_fills(model: Path) -> None:
    file = model / "tokenizer.json"
    content = json.loads(file.read_text())
    content["truncation"] = {"max_length": 3, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    file.write_text(json.dumps(content))
    assert len(get_tokenizer(str(model)).backend_tokenizer.encode("a long text, longer than that").ids) > 3
