from pathlib import Path

import pytest

from sglang.srt.environ import envs
from sglang.srt.errors import ArgumentError


def test_unset_and_empty_give_the_default(monkeypatch):
    variable = envs.SGLANG_FLASHINFER_FP4_GEMM_BACKEND
    for value in (None, ""):
        monkeypatch.delenv(variable.name, raising=False)
        if value is not None:
            monkeypatch.setenv(variable.name, value)
        assert variable.get() is None
        assert not variable.is_set()


def test_is_read_when_asked_for(monkeypatch):
    variable = envs.SGLANG_FLASHINFER_FP4_GEMM_BACKEND
    assert variable.name == "SGLANG_FLASHINFER_FP4_GEMM_BACKEND"
    monkeypatch.setenv(variable.name, "FlashInfer_cudnn")
    assert variable.is_set()
    assert variable.get() == "FlashInfer_cudnn"
    monkeypatch.setenv(variable.name, "torch")
    assert variable.get() == "torch"


def test_cache_folder(monkeypatch, tmp_path):
    variable = envs.SGLANG_CACHE_DIR
    monkeypatch.delenv(variable.name, raising=False)
    assert variable.get() == Path.home() / ".cache" / "sglang"
    monkeypatch.setenv(variable.name, str(tmp_path / "new"))
    assert variable.get() == tmp_path / "new"
    monkeypatch.setenv(variable.name, "~/x")
    assert variable.get() == Path.home() / "x"


def test_bad_value_names_the_variable(monkeypatch, tmp_path):
    file = tmp_path / "file"
    file.touch()
    for value, reason in (("relative/folder", "absolute"), (str(file), "a file")):
        monkeypatch.setenv("SGLANG_CACHE_DIR", value)
        with pytest.raises(ArgumentError, match=f"SGLANG_CACHE_DIR.*{reason}"):
            envs.SGLANG_CACHE_DIR.get()


def test_fewer_than_ten_and_documented():
    variables = envs.all()
    assert len({variable.name for variable in variables}) == len(variables) < 10
    assert all(variable.name.startswith("SGLANG_") and variable.help.endswith(".") for variable in variables)
