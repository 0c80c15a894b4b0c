import json
import os
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

import sglang
from sglang import check_env
from sglang.kernels.cpu_extension import isas
from sglang.srt.environ import envs
from sglang.srt.errors import ArgumentError
from sglang.srt.layers.quantization.fp4_utils import Target, backends, candidates
from sglang.srt.utils import versions

VARIABLE = envs.SGLANG_FLASHINFER_FP4_GEMM_BACKEND.name
B200 = Target(
    device="cuda",
    capability=(10, 0),
    cuda="13.0",
    flashinfer="0.7.4",
    cudnn="9.23.1",
    cudnn_frontend="1.32.0",
    cutlass_dsl="4.8.0",
    nvcc="13.0",
    nvrtc="13.0",
)


@pytest.fixture(autouse=True)
def no_variable(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)


def as_json(capsys, *argv) -> dict:
    check_env.run(["--json", "--device", "cpu", *argv])
    return json.loads(capsys.readouterr().out)


def as_text(report: dict, width: int = 100) -> str:
    output = StringIO()
    check_env.print_report(report, Console(file=output, width=width))
    return output.getvalue()


def test_json_has_everything(capsys):
    report = as_json(capsys)
    assert report["versions"]["sglang-nvfp4"] == sglang.__version__
    assert {"torch", "python", "NVIDIA driver", "nvcc (for FlashInfer)"} <= set(report["versions"])
    assert set(versions.DISTRIBUTIONS) <= set(report["versions"])
    assert {"flashinfer-cubin", "apache-tvm-ffi", "nvidia-cuda-nvrtc", "cuda-core", "triton"} <= set(report["versions"])
    assert report["versions"]["msgspec"] is not None
    cpu = report["devices"][-1]
    assert (cpu["device"], cpu["capability"]) == ("cpu", None)
    assert cpu["name"] and cpu["instructions"] == isas()[0].name
    assert 0 < cpu["memory_available"] <= cpu["memory_total"]
    fp4 = report["fp4_gemm"]
    assert [backend["name"] for backend in fp4["backends"]] == list(backends())
    assert (fp4["target"], fp4["flag"], fp4["environment"], fp4["error"]) == ("cpu", "auto", None, None)
    assert fp4["resolution"]["source"] == "default"
    attention = report["attention"]
    reasons = {backend["name"]: backend["reason"] for backend in attention["backends"]}
    assert list(reasons) == ["cpu", "flashinfer", "torch_native"]
    assert reasons["torch_native"] is None and "needs a CUDA GPU" in reasons["flashinfer"]
    assert attention["auto"] == next(name for name, reason in reasons.items() if reason is None)
    assert "bfloat16" in attention["target"]
    assert fp4["resolution"]["resolved"] == fp4["auto"]["w4a4"]
    for backend in fp4["backends"]:
        listed = fp4["resolution"]["unsupported"]
        assert (backend["w4a4"] is None) == (backend["name"] not in listed)


def test_environment_variable_is_explained(capsys, monkeypatch):
    monkeypatch.setenv(VARIABLE, "Torch")
    report = as_json(capsys)
    fp4 = report["fp4_gemm"]
    assert fp4["environment"] == "Torch"
    assert (fp4["resolution"]["requested"], fp4["resolution"]["source"]) == ("torch", VARIABLE)
    assert VARIABLE in fp4["warnings"][0]
    text = as_text(report)
    assert f"warning: {VARIABLE} is deprecated" in text
    assert f"asks for torch (from {VARIABLE}) and gets torch." in text


def test_what_would_not_start_is_shown_and_is_status_2(capsys):
    with pytest.raises(ArgumentError) as caught:
        check_env.run(["--json", "--device", "cpu", "--fp4-gemm-backend", "cutlass"])
    assert caught.value.exit_code == 2
    report = json.loads(capsys.readouterr().out)
    assert report["fp4_gemm"]["resolution"] is None
    assert report["fp4_gemm"]["error"] == str(caught.value)
    reason = next(backend["w4a4"] for backend in report["fp4_gemm"]["backends"] if backend["name"] == "cutlass")
    assert reason in str(caught.value)
    assert report["versions"]["torch"]
    assert "A server started now" not in as_text(report)


@pytest.mark.parametrize("argv", [["--device", "tpu"], ["--nonsense"], ["--js"]])
def test_bad_argument(argv):
    with pytest.raises(ArgumentError, match=argv[0]):
        check_env.run(argv)


def test_tables_name_every_backend_and_reason():
    report = check_env.collect("cpu", "auto")
    text = as_text(report, width=240)
    for backend in report["fp4_gemm"]["backends"]:
        assert backend["name"] in text
        assert backend["w4a4"] is None or backend["w4a4"] in text
    for backend in report["attention"]["backends"]:
        assert backend["name"] in text
        assert backend["reason"] is None or backend["reason"] in text
    assert "A server started now asks for auto and gets" in text
    assert all(name in text for name in report["versions"])


def test_a_reason_with_brackets_is_shown_as_it_is():
    # rich takes [word] for markup and would drop it.
    report = check_env.collect("cpu", "auto")
    report["fp4_gemm"]["backends"][0]["w4a4"] = "needs FlashInfer: pip install 'sglang-nvfp4[cuda13]'"
    assert "'sglang-nvfp4[cuda13]'" in as_text(report, width=240)


def test_a_fix_is_shown_beside_the_reason():
    report = check_env.collect("cpu", "auto")
    assert "To have" not in as_text(report)
    report["fp4_gemm"] = check_env.fp4_report(replace(B200, cutlass_dsl=None), "auto", None)
    fixes = {backend["name"]: backend["fix"] for backend in report["fp4_gemm"]["backends"]}
    assert fixes["cutedsl"] == "pip install 'nvidia-cutlass-dsl>=4.8.0'"
    assert fixes["torch"] is None
    assert fixes["cutlass"] is None  # no command makes it weight-only
    text = as_text(report, width=240)
    assert "To have cutedsl: pip install 'nvidia-cutlass-dsl>=4.8.0'" in text
    assert text.count("To have") == 1
    bare = check_env.fp4_report(replace(B200, flashinfer=None), "auto", None)
    assert next(b["fix"] for b in bare["backends"] if b["name"] == "cutlass") == "pip install 'sglang-nvfp4[cuda13]'"


def test_state_of_the_cache_folder(monkeypatch, tmp_path):
    folder = tmp_path / "later" / "cache"
    monkeypatch.setenv("SGLANG_CACHE_DIR", str(folder))
    report = check_env.collect("cpu", "auto")  # compiles the CPU kernel where nothing has before
    report["cache"] = check_env.cache_report()
    assert report["cache"] == {"path": str(folder), "writable": True, "fp4_autotune_files": 0}
    monkeypatch.setenv("HOME", str(tmp_path))
    assert check_env.cache_report()["path"] == "~/later/cache"
    assert f"Cache folder: {folder}; files of measured FP4 GEMM choices: 0" in as_text(report, width=240)
    assert not folder.exists()
    measured = folder / check_env.AUTOTUNE_FOLDER
    measured.mkdir(parents=True)
    for name in ("a.json", "b.json", "b.json.lock"):
        (measured / name).touch()
    assert check_env.cache_report()["fp4_autotune_files"] == 2
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != folder)  # root may write anywhere
    report = check_env.collect("cpu", "auto")
    assert report["cache"]["writable"] is False
    assert "which can't be written" in as_text(report, width=240)
    (tmp_path / "file").touch()
    monkeypatch.setenv("SGLANG_CACHE_DIR", str(tmp_path / "file" / "below"))
    assert check_env.cache_report()["writable"] is False
    stat = os.stat

    def denied(path, *args, **kwargs):  # as for all that is in a folder without the permission to search it
        if str(path).startswith(f"{tmp_path}/closed/"):
            raise PermissionError(13, "Permission denied", path)
        return stat(path, *args, **kwargs)

    monkeypatch.setattr(os, "stat", denied)
    (tmp_path / "closed").mkdir()
    monkeypatch.setenv("SGLANG_CACHE_DIR", str(tmp_path / "closed" / "below"))
    assert envs.SGLANG_CACHE_DIR.get() == tmp_path / "closed" / "below"
    assert check_env.cache_report()["fp4_autotune_files"] == 0


def test_the_autotuner_keeps_its_files_where_they_are_counted(monkeypatch, tmp_path):
    import torch

    from sglang.srt.layers.quantization.fp4_autotune import Autotuner

    monkeypatch.setenv("SGLANG_CACHE_DIR", str(tmp_path))
    with Autotuner("on", torch.device("cpu")).active(measure=True):
        pass
    assert check_env.cache_report()["fp4_autotune_files"] == 1


def test_report_of_another_machine():
    report = check_env.fp4_report(B200, "auto", None)
    reasons = {backend["name"]: (backend["w4a4"], backend["weight_only"]) for backend in report["backends"]}
    assert reasons["cutlass"][0] is None
    assert reasons["cutlass"][1] is not None
    assert report["auto"]["w4a4"] == candidates(B200)[0].name
    assert report["auto"]["weight_only"] != "cutlass"
    without = check_env.fp4_report(replace(B200, flashinfer=None), "cutlass", None)
    assert "FlashInfer" in without["error"]
    assert without["resolution"] is None


def test_driver_version(monkeypatch):
    class Done:
        stdout = "580.95.05\n580.95.05\n"

    monkeypatch.setattr(versions.subprocess, "run", lambda *args, **options: Done)
    assert versions.versions()["NVIDIA driver"] == "580.95.05"

    def missing(*args, **options):
        raise FileNotFoundError("nvidia-smi")

    monkeypatch.setattr(versions.subprocess, "run", missing)
    assert versions.versions()["NVIDIA driver"] is None
