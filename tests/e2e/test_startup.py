"""Starts that must fail: at once, one clear message, no traceback, the right exit status."""

import json
import shutil
import socket
from pathlib import Path

import pytest
from launched_server import FIXTURES, launched, run_to_exit
from safetensors.torch import load_file, save_file

NVFP4 = FIXTURES / "tiny-llama-modelopt-nvfp4"


def edited(tmp_path: Path, **config: object) -> Path:
    """A copy of the fixture with other values in config.json (None deletes)."""
    folder = tmp_path / "model"
    shutil.copytree(NVFP4, folder)
    file = folder / "config.json"
    merged = {**json.loads(file.read_text()), **config}
    file.write_text(json.dumps({key: value for key, value in merged.items() if value is not None}))
    return folder


def check(result: object, status: int, *words: str) -> None:
    text = result.stdout + result.stderr  # type: ignore[attr-defined]
    assert result.returncode == status, text  # type: ignore[attr-defined]
    assert "Traceback" not in text, text
    for word in words:
        assert word in text, f"{word!r} is not in:\n{text}"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--fp4-gemm-backend", "fastest"), ("'fastest' is not an FP4 GEMM backend", "valid: auto", "cutlass")),
        (("--quantization", "awq"), ("awq", "modelopt_fp4")),
        (("--dtype", "int8"), ("--dtype", "bfloat16")),
        (("--tp-size", "3"), ("--tp-size 3", "num_attention_heads 4", "divisor")),
        (("--enable-lora",), ("--enable-lora", "not supported")),
        (("--no-such-flag",), ("--no-such-flag",)),
    ],
)
def test_bad_arguments(arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    check(run_to_exit(NVFP4, *arguments), 2, *words)


def test_backend_that_cannot_run_is_refused_before_a_weight_is_read(tmp_path: Path) -> None:
    folder = edited(tmp_path)
    (folder / "model.safetensors").write_bytes(b"not weights")
    result = run_to_exit(folder, "--fp4-gemm-backend", "cutlass")
    check(
        result,
        2,
        "--fp4-gemm-backend cutlass can't run on cpu",
        "cudnn: ",
        "cutedsl: ",
        "trtllm: ",
        "torch: can run here",
    )


def test_without_a_compiler(tmp_path: Path) -> None:
    """``auto`` takes torch and says once how to get the kernel; who names the kernel gets an error."""
    binaries = tmp_path / "bin"
    binaries.mkdir()
    (binaries / "apt-get").touch(0o755)
    environment = {"PATH": str(binaries), "CXX": ""}
    with launched(NVFP4, tmp_path, **environment) as server:
        reason = "cpu: needs a C++ compiler; found none (c++, g++, clang++). To have cpu: apt-get install g++"
        assert "FP4 GEMM backend: torch (requested: auto)" in server.log
        assert server.log.count("apt-get install g++") == server.log.count(reason) == 1
        assert server.log.count("C++ compiler") == server.log.count("cpu: needs a C++ compiler") == 2  # and attention
        server.generate(text="a", sampling_params={"max_new_tokens": 1})
    result = run_to_exit(NVFP4, "--fp4-gemm-backend", "cpu", **environment)
    check(result, 2, "--fp4-gemm-backend cpu can't run on cpu", "cpu: needs a C++ compiler; found none")


def test_bad_environment_variable() -> None:
    check(run_to_exit(NVFP4, SGLANG_FLASHINFER_FP4_GEMM_BACKEND="x"), 2, "SGLANG_FLASHINFER_FP4_GEMM_BACKEND", "'x'")


def test_deprecated_variable_works_and_warns_once(tmp_path: Path) -> None:
    with launched(NVFP4, tmp_path, SGLANG_FLASHINFER_FP4_GEMM_BACKEND="torch") as server:
        assert server.log.count("SGLANG_FLASHINFER_FP4_GEMM_BACKEND is deprecated") == 1
        assert "use --fp4-gemm-backend torch instead" in server.log
        server.generate(text="a", sampling_params={"max_new_tokens": 1})


def test_folders_and_configs(tmp_path: Path) -> None:
    check(run_to_exit(tmp_path / "nowhere"), 1, "nowhere")
    (tmp_path / "empty").mkdir()
    check(run_to_exit(tmp_path / "empty"), 1, "config.json")
    check(run_to_exit(edited(tmp_path / "a", architectures=None)), 1, "architectures")
    result = run_to_exit(edited(tmp_path / "b", architectures=["GPT2LMHeadModel"]))
    check(result, 1, "GPT2LMHeadModel", "LlamaForCausalLM", "Qwen3ForCausalLM")
    folder = edited(tmp_path / "c")
    for file in folder.glob("tokenizer*"):
        file.unlink()
    check(run_to_exit(folder), 1, "tokenizer")


def test_weights(tmp_path: Path) -> None:
    folder = edited(tmp_path / "a")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4096])
    check(run_to_exit(folder), 1, "model.safetensors can't be read", "complete")
    tensors = load_file(NVFP4 / "model.safetensors")
    save_file({name: value for name, value in tensors.items() if "scale" not in name}, file)
    check(run_to_exit(folder), 1, "the checkpoint lacks model.layers.0.", "weight_scale")


def test_port_taken(tmp_path: Path) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        check(run_to_exit(NVFP4, "--port", str(s.getsockname()[1])), 1, str(s.getsockname()[1]))
