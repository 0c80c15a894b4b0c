import os
from pathlib import Path

import pytest

from sglang.srt.environ import envs
from sglang.srt.errors import StartupError
from sglang.srt.utils import cache_folder
from sglang.srt.utils.cache_folder import ensure_cache_folder


def test_a_folder_that_can_be_written_is_made_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_CACHE_DIR", str(tmp_path / "new"))
    ensure_cache_folder()
    assert envs.SGLANG_CACHE_DIR.get() == tmp_path / "new"
    assert not [path for path in (tmp_path / "new").rglob("*") if not path.is_dir()]


def test_a_file_in_the_place_of_a_subfolder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "fp4_autotune").touch()
    monkeypatch.setenv("SGLANG_CACHE_DIR", str(tmp_path))
    ensure_cache_folder()
    assert os.environ["SGLANG_CACHE_DIR"] != str(tmp_path)
    (warning,) = caplog.messages
    assert f"{tmp_path} can't be written (File exists)" in warning


def test_another_one_with_one_warning(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("SGLANG_CACHE_DIR", "/proc/sglang")
    ensure_cache_folder()
    ensure_cache_folder()
    replacement = Path(os.environ["SGLANG_CACHE_DIR"])
    assert replacement.is_dir() and not replacement.is_relative_to("/proc")
    (warning,) = caplog.messages
    assert "/proc/sglang can't be written" in warning and "SGLANG_CACHE_DIR" in warning


def test_kernels_in_a_read_only_folder_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SGLANG_CACHE_DIR", str(tmp_path))
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "a.so").touch()

    def read_only(**_: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(cache_folder.tempfile, "TemporaryFile", read_only)
    ensure_cache_folder()
    assert os.environ["SGLANG_CACHE_DIR"] == str(tmp_path)
    (warning,) = caplog.messages
    assert "Read-only file system" in warning and "is used" in warning


def test_nowhere_to_write_is_a_startup_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setenv("SGLANG_CACHE_DIR", "/proc/sglang")
    monkeypatch.setattr(cache_folder.tempfile, "TemporaryDirectory", full)
    with pytest.raises(StartupError, match="No space left on device.*TMPDIR"):
        ensure_cache_folder()
