"""The cache of compiled kernels."""

import errno
from pathlib import Path

import pytest

from sglang.kernels import nvrtc

CUBIN = b"\x7fELF machine code"


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The sources compiled so far."""
    sources: list[str] = []

    def compile_source(source: str, arch: str, options: tuple[str, ...]) -> nvrtc.Compiled:
        sources.append(source)
        return nvrtc.Compiled(CUBIN, "")

    monkeypatch.setenv("SGLANG_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(nvrtc, "compile_source", compile_source)
    return sources


def test_a_kernel_is_compiled_once(compiled: list[str]) -> None:
    assert not nvrtc.is_cached("a", "sm_90a", ())
    assert nvrtc.load_cubin("a", "sm_90a", ()) == (CUBIN, True)
    assert nvrtc.is_cached("a", "sm_90a", ())
    assert nvrtc.load_cubin("a", "sm_90a", ()) == (CUBIN, False)
    assert compiled == ["a"]


@pytest.mark.parametrize("other", [("b", "sm_90a", ()), ("a", "sm_80", ()), ("a", "sm_90a", ("-DX=1",))])
def test_source_architecture_and_options_are_told_apart(
    compiled: list[str], other: tuple[str, str, tuple[str, ...]]
) -> None:
    nvrtc.load_cubin("a", "sm_90a", ())
    nvrtc.load_cubin(*other)
    assert len(compiled) == 2


def test_another_compiler_does_not_read_it(compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    nvrtc.load_cubin("a", "sm_90a", ())
    monkeypatch.setattr(nvrtc, "version", lambda: "99.0")
    assert not nvrtc.is_cached("a", "sm_90a", ())


@pytest.mark.parametrize("damaged", [b"", CUBIN, b"END\n"])
def test_a_file_that_is_not_whole_is_compiled_again(compiled: list[str], damaged: bytes, tmp_path: Path) -> None:
    nvrtc.load_cubin("a", "sm_90a", ())
    (path,) = (tmp_path / "cache" / "kernels").iterdir()
    path.write_bytes(damaged)
    assert nvrtc.load_cubin("a", "sm_90a", ()) == (CUBIN, True)
    assert nvrtc.load_cubin("a", "sm_90a", ()) == (CUBIN, False)


def test_a_folder_that_cannot_be_made_costs_time_and_one_warning(
    compiled: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "kernels").write_text("a file")
    for _ in range(2):
        assert nvrtc.load_cubin("a", "sm_90a", ()) == (CUBIN, True)
    assert compiled == ["a", "a"]
    (warning,) = caplog.messages
    assert str(tmp_path / "cache" / "kernels") in warning and "SGLANG_CACHE_DIR" in warning


def test_a_full_disk_leaves_no_part_of_a_file(
    compiled: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(nvrtc.os, "fdopen", full)
    assert nvrtc.load_cubin("a", "sm_90a", ()) == (CUBIN, True)
    assert list((tmp_path / "cache" / "kernels").iterdir()) == []
    assert "No space left on device" in caplog.text


@pytest.mark.skipif(not nvrtc.available(), reason="needs NVRTC: pip install nvidia-cuda-nvrtc")
def test_a_refused_source_is_reported_with_the_compilers_words() -> None:
    with pytest.raises(nvrtc.StartupError, match="sm_80(.|\n)*nonsense"):
        nvrtc.compile_source("nonsense", "sm_80", ())
