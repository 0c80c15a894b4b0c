"""What tests of several files share: FlashInfer's emulator, a machine that is not there, the autotuner's world."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from flashinfer_emulator import Emulator

from fp4_fakes import World
from sglang.srt.layers.quantization import fp4_autotune_timing, fp4_utils
from sglang.srt.layers.quantization.fp4_backends import flashinfer as flashinfer_backends
from sglang.srt.layers.quantization.fp4_utils import Target


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[World]:
    """No fakes yet, an empty cache, ``--fp4-gemm-backend auto``."""
    world = World()
    world.time_torch(monkeypatch)
    monkeypatch.setattr(fp4_autotune_timing, "clock", world.clock)
    monkeypatch.setattr(fp4_autotune_timing, "MAX_COPIES", 2)
    monkeypatch.setattr(fp4_autotune_timing, "MAX_SAMPLES", 5)
    monkeypatch.setenv("SGLANG_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(fp4_utils, "_resolution", None)
    yield world
    world.remove_all()


@pytest.fixture
def emulator(monkeypatch: pytest.MonkeyPatch) -> Emulator:
    module = Emulator()
    monkeypatch.setattr(flashinfer_backends, "_flashinfer", lambda: module)
    return module


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[[Target], None]:
    return lambda target: monkeypatch.setattr(Target, "current", staticmethod(lambda *_: target))
