"""FlashInfer, the real package, is what these tests are about: without it they fail, they never skip."""

import atexit
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from stand_in_gpu import StandInGpu

REQUIREMENTS = "tests/requirements-flashinfer.txt"

# Importing FlashInfer makes a cache folder, and a log in it.
if "FLASHINFER_WORKSPACE_BASE" not in os.environ:
    _workspace = tempfile.mkdtemp(prefix="flashinfer-")
    atexit.register(shutil.rmtree, _workspace, ignore_errors=True)
    os.environ["FLASHINFER_WORKSPACE_BASE"] = _workspace

missing: str | None = None
try:
    import flashinfer
except ImportError as error:
    missing = f"FlashInfer can't be imported ({error}): run `make test`, or pip install --no-deps -r {REQUIREMENTS}"
    # One sentence instead of one error for every file.
    collect_ignore = [p.name for p in Path(__file__).parent.glob("test_*.py") if p.name != "test_contract_package.py"]


def pytest_report_collectionfinish() -> list[str]:
    if missing:
        return []
    return [f"contract tests: flashinfer {flashinfer.__version__} from {Path(flashinfer.__file__).parent}"]


@pytest.fixture
def flashinfer_missing() -> str | None:
    return missing


@pytest.fixture(autouse=True)
def no_downloads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that makes FlashInfer fetch kernels is wrong, and would wait for its retries."""
    if missing:
        return
    import requests

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError(f"FlashInfer tried to download {args[1:3]}")

    monkeypatch.setattr(requests.Session, "request", refuse)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The products are small: threads would only wait for each other, and for whatever else runs on the machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., "StandInGpu"]]:
    """Makes a :class:`StandInGpu`, which stands for the only GPU until the test ends."""
    from stand_in_gpu import StandInGpu

    yield lambda *args, **facts: StandInGpu(monkeypatch, *args, **facts)
