"""Servers that start at the same time with an empty cache folder."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]

# Waits for the others, then takes both kinds of kernels from the cache; the compilers are slow and note their calls.
PROCESS = """
import sys, time
from pathlib import Path
from sglang.kernels import cpu_extension, nvrtc

folder, begin = Path(sys.argv[1]), float(sys.argv[2])

def run(command):
    if "-o" in command:
        if "-shared" in command:
            with (folder / "calls").open("a") as calls:
                calls.write("compiled\\n")
        time.sleep(0.5)
        Path(command[command.index("-o") + 1]).write_bytes(b"library" * 50000)
    return "version 1"

def compile_source(source, arch, options):
    time.sleep(0.3)
    return nvrtc.Compiled(b"\\x7fELF" + source.encode() * 50000, "")

cpu_extension._run = run
nvrtc.compile_source = compile_source
time.sleep(max(0.0, begin - time.time()))
library = cpu_extension.build(cpu_extension.ISAS[-1])
assert library.read_bytes() == b"library" * 50000, library
for source in ("a", "b"):
    assert nvrtc.load_cubin(source, "sm_90a", ())[0] == b"\\x7fELF" + source.encode() * 50000
print(library)
"""


def test_processes_that_start_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", str(TESTS.parent / "python"))
    command = [sys.executable, "-c", PROCESS, str(tmp_path), str(time.time() + 3)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    libraries = {process.communicate(timeout=60)[0] for process in processes}
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert len(libraries) == 1
    assert (tmp_path / "calls").read_text() == "compiled\n"
    kernels = list((tmp_path / "cache" / "kernels").iterdir())
    assert sorted(path.suffix for path in kernels) == [".cubin", ".cubin", ".lock", ".so"]
