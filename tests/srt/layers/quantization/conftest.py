"""The world that the tests of the autotuner share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fp4_fakes import World
from sglang.srt.layers.quantization import fp4_autotune_timing, fp4_utils


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
