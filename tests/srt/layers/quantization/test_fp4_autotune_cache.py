"""The file of measured choices: what is written is read, by whoever runs the same, and nothing else."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fp4_fakes import World
from sglang.srt.layers.quantization import fp4_autotune_cache
from sglang.srt.layers.quantization.fp4_autotune_cache import (
    Measurement,
    Stamp,
    TuningCache,
    current_stamp,
    sources_digest,
)
from sglang.srt.utils import versions as versions_module

CPU = torch.device("cpu")
STAMP: Stamp = {"device": "NVIDIA H200, 132 SMs", "threads": None, "torch": "2.11", "NVIDIA driver": "580.1"}
ONE = {
    "N=1 K=16": Measurement(["a", "b/x"], {"a": [1.5, 2.25], "b/x": [3.0, 1.0]}, {"a": "graph"}, {"c": "it is wrong"})
}
TWO = {"N=2 K=16": Measurement(["a"], {}, {})}


def test_round_trip(tmp_path: Path) -> None:
    cache = TuningCache(tmp_path / "new" / "folder", STAMP)
    assert cache.read() == {}
    cache.write(ONE)
    cache.write(TWO)
    assert TuningCache(tmp_path / "new" / "folder", dict(STAMP)).read() == ONE | TWO
    assert cache.file.name.startswith("nvidia-h200-132-sms-") and cache.writable
    assert json.loads(cache.file.read_text())["stamp"] == STAMP  # in full, for who wants to know
    assert {path.name for path in cache.file.parent.iterdir()} == {cache.file.name, cache.file.name + ".lock"}


def test_what_was_measured_again_replaces_what_was_there(tmp_path: Path) -> None:
    TuningCache(tmp_path, STAMP).write(ONE)
    again = {"N=1 K=16": Measurement(["b"], {"b": [1.0]}, {"b": "events"})}
    TuningCache(tmp_path, STAMP).write(again)
    assert TuningCache(tmp_path, STAMP).read() == again


@pytest.mark.parametrize("field", [*current_stamp(CPU, "auto: torch"), "new"])
def test_any_difference_refuses(field: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    stamp = current_stamp(CPU, "auto: torch")
    TuningCache(tmp_path, stamp).write(ONE)
    assert TuningCache(tmp_path, current_stamp(CPU, "auto: torch")).read() == ONE
    other = TuningCache(tmp_path, stamp | {field: "something else"})
    assert other.read() == {}
    assert f"is not used: {field} was {stamp.get(field)}, is something else" in caplog.text
    # Nor if the file had the right name.
    TuningCache(tmp_path, stamp).file.rename(other.file)
    caplog.clear()
    assert other.read() == {}
    assert f"{other.file} is not used: {field} was {stamp.get(field)}, is something else" in caplog.text
    other.write(TWO)  # and what it holds is not taken over
    assert other.read() == TWO


def test_the_stamp_has_what_times_depend_on(monkeypatch: pytest.MonkeyPatch) -> None:
    stamp = current_stamp(CPU, "auto: torch")
    assert stamp["threads"] == str(torch.get_num_threads()) and stamp["device"]
    assert stamp["torch"] == torch.__version__ and stamp["candidates"] == "auto: torch"
    for name in ("NVIDIA driver", "CUDA (of torch)", "cuDNN (loaded)", "flashinfer-python", "nvidia-cutlass-dsl"):
        assert name in stamp
    assert {"nvidia-cudnn-frontend", "sglang-nvfp4", "capability", "sources", "triton"} <= stamp.keys()
    monkeypatch.setattr(fp4_autotune_cache, "versions", lambda: {**versions_module.versions(), "torch": "3.0"})
    assert current_stamp(CPU, "auto: torch")["torch"] == "3.0"


def test_the_stamp_knows_the_sources_of_every_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = sources_digest()
    assert sources_digest() == before
    world = World()
    try:
        world.add("external")  # from another file than ours
        assert sources_digest() != before
    finally:
        world.remove_all()
    assert sources_digest() == before
    package = tmp_path / "sglang"
    (package / "kernels").mkdir(parents=True)
    monkeypatch.setattr(fp4_autotune_cache.sglang, "__file__", str(package / "__init__.py"))
    without = sources_digest()
    kernel = package / "kernels" / "w.cu"
    kernel.write_text("a")
    first = sources_digest()
    kernel.write_text("b")
    assert len({without, first, sources_digest()}) == 3


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00\xff\xfe",
        b"{",
        b"[]",
        b'{"stamp": {}}',
        b'{"stamp": {}, "products": {"x": {"choices": "torch", "microseconds": {}, "timing": {}}}}',
        b'{"stamp": {}, "products": {"x": {"choices": [1], "microseconds": {}, "timing": {}}}}',
    ],
)
def test_a_damaged_file_is_named_and_replaced(content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = TuningCache(tmp_path, STAMP)
    cache.file.write_bytes(content)
    assert cache.read() == {}
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1 and f"{cache.file} can't be used, delete it" in warnings[0].getMessage()
    assert TuningCache(tmp_path, {**STAMP, "torch": "2.12"}).read() == {}  # nor does it disturb its neighbours
    cache.write(ONE)
    assert cache.read() == ONE


@pytest.mark.parametrize("obstacle", ["folder", "file"])
def test_what_cannot_be_written_is_said_once(obstacle: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = TuningCache(tmp_path / "folder", STAMP)
    if obstacle == "folder":
        cache.file.parent.write_text("a file")
    else:
        cache.file.mkdir(parents=True)
    cache.read()
    caplog.clear()
    cache.write(ONE)
    cache.write(TWO)
    assert caplog.text.count("measurements can't be kept") == 1 and not cache.writable


def test_a_file_that_appears_while_reading_is_not_said_to_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    cache = TuningCache(tmp_path, STAMP)
    original = fp4_autotune_cache._read

    def late(file: Path) -> object:
        monkeypatch.setattr(fp4_autotune_cache, "_read", original)
        TuningCache(tmp_path, STAMP).write(ONE)
        raise FileNotFoundError

    monkeypatch.setattr(fp4_autotune_cache, "_read", late)
    assert cache.read() == {}
    assert not caplog.records


WRITER = """
import sys
from pathlib import Path
from sglang.srt.layers.quantization.fp4_autotune_cache import Measurement, TuningCache
cache = TuningCache(Path(sys.argv[1]), {"device": "d"})
print("ready", flush=True)
sys.stdin.readline()
for index in range(40):
    cache.write({f"{sys.argv[2]} {index}": Measurement([sys.argv[2]], {}, {})})
"""


def test_processes_that_write_at_the_same_time_lose_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    pipe = subprocess.PIPE
    processes = [subprocess.Popen([*command, name], stdin=pipe, stdout=pipe, text=True) for name in "ab"]
    assert [process.stdout and process.stdout.readline() for process in processes] == ["ready\n"] * 2
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    cache = TuningCache(tmp_path, {"device": "d"})
    while any(process.poll() is None for process in processes):
        cache.read()
    assert [process.wait(60) for process in processes] == [0, 0]
    assert cache.read().keys() == {f"{name} {index}" for name in "ab" for index in range(40)}
    assert not caplog.records, "half a file was read"
