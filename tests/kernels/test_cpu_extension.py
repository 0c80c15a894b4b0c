"""The loader of the CPU kernel: one compilation per source, flags and compiler; every failure is a reason."""

import ctypes
import errno
import stat
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from sglang.kernels import cpu_extension
from sglang.kernels.cpu_extension import ISAS, CompileError, build
from sglang.srt.errors import ArgumentError
from sglang.srt.layers.quantization.fp4_utils import Target, resolve_fp4_gemm_backend

ISA = ISAS[-1]


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("SGLANG_CACHE_DIR", str(tmp_path / "cache"))
    for cached in (cpu_extension.load, cpu_extension.unavailable):
        cached.cache_clear()
    yield
    for cached in (cpu_extension.load, cpu_extension.unavailable):
        cached.cache_clear()


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that takes a moment, notes what it was asked and writes an empty file."""
    script = tmp_path / "fake-c++"
    script.write_text(
        f"""#!/bin/sh
        case "$*" in *--version) exec cat {tmp_path}/version;; esac
        echo "$@" >> {tmp_path}/calls; sleep 0.3
        while [ "$1" != -o ]; do shift; done; : > "$2"
        """
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    (tmp_path / "version").write_text("fake 1.0")
    monkeypatch.setenv("CXX", f"{script} -DNAMED")
    return script


def libraries(tmp_path: Path) -> list[str]:
    """What the compiler was asked for one library each; every unit has been compiled as often."""
    calls = (tmp_path / "calls").read_text().splitlines()
    linked = [call for call in calls if " -shared " in call]
    for unit in cpu_extension.SOURCES.glob("*.cpp"):
        assert sum(f" -c {unit} " in call for call in calls) == len(linked)
    return linked


def test_compiles_once_for_everything_that_asks_at_once(compiler: Path, tmp_path: Path) -> None:
    with ThreadPoolExecutor(3) as pool:
        paths = set(pool.map(lambda _: build(ISA), range(3)))
    (library,) = libraries(tmp_path)
    assert len(paths) == 1 and "-DNAMED" in library and "/fp4_gemm.o" in library
    folder = tmp_path / "cache" / "kernels"
    assert {path.suffix for path in folder.iterdir()} == {".so", ".lock"}  # no scratch left


def test_everything_the_library_depends_on_is_in_its_name(
    compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = tmp_path / "sources"
    sources.mkdir()
    for path in cpu_extension.SOURCES.iterdir():
        (sources / path.name).write_bytes(path.read_bytes())
    in_place = build(ISA)
    (tmp_path / "calls").unlink()
    monkeypatch.setattr(cpu_extension, "SOURCES", sources)
    assert build(ISA) == in_place and not (tmp_path / "calls").exists()
    paths = [in_place, build(ISAS[0])]
    (tmp_path / "version").write_text("fake 1.1")
    paths.append(build(ISA))
    monkeypatch.setenv("CXX", str(compiler))
    paths.append(build(ISA))
    for name in ("simd.h", "fp4_gemm.cpp"):
        (sources / name).write_bytes((sources / name).read_bytes() + b"\n")
        paths.append(build(ISA))
    assert len(set(paths)) == len(paths) == len(libraries(tmp_path)) + 1


def test_a_failing_compiler_is_a_reason_and_leaves_nothing(compiler: Path, tmp_path: Path) -> None:
    body = compiler.read_text().replace(
        "while", "echo 'warning: w' >&2; echo 'x.h:3: error: no such thing' >&2; exit 1\nwhile"
    )
    compiler.write_text(body)
    with pytest.raises(CompileError, match=r"fake-c\+\+ failed: x.h:3: error: no such thing$"):
        build(ISA)
    assert {path.suffix for path in (tmp_path / "cache" / "kernels").iterdir()} == {".lock"}
    reason = cpu_extension.unavailable()
    assert reason is not None and reason.endswith("error: no such thing") and cpu_extension.fix() is None


def test_a_library_that_does_not_load_is_a_reason(compiler: Path) -> None:
    reason = cpu_extension.unavailable()
    assert reason is not None and reason.startswith("the compiled CPU kernel can't be loaded: ")


def test_no_compiler_is_a_reason_with_its_fix_and_auto_takes_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cpu_extension.fix() is None
    manager = tmp_path / "apt-get"
    manager.touch()
    manager.chmod(0o755)
    assert cpu_extension.fix() == "apt-get install g++"
    assert cpu_extension.unavailable() == "needs a C++ compiler; found none (c++, g++, clang++)"
    resolution = resolve_fp4_gemm_backend("auto", None, Target.current("cpu"))
    assert resolution.name == "torch" and "\n" not in str(resolution)
    assert "cpu: needs a C++ compiler; found none (c++, g++, clang++)" in str(resolution)
    assert str(resolution).endswith(". To have cpu: apt-get install g++")
    with pytest.raises(ArgumentError, match=r"cpu can't run on cpu(.|\n)*  cpu: needs a C\+\+ compiler; found none"):
        resolve_fp4_gemm_backend("cpu", None, Target.current("cpu"))
    monkeypatch.setenv("CXX", "no-such-compiler -m64")
    cpu_extension.load.cache_clear()
    cpu_extension.unavailable.cache_clear()
    assert cpu_extension.unavailable() == "needs a C++ compiler; found none (CXX=no-such-compiler -m64)"
    assert cpu_extension.fix() == "apt-get install g++"
    (tmp_path / "g++").touch(0o755)
    assert cpu_extension.fix() == "unset CXX"


def test_a_cache_folder_that_can_not_be_written_costs_a_compilation_and_a_warning(
    compiler: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SGLANG_CACHE_DIR", "/proc/sglang")
    library = build(ISA)
    assert library.is_file() and not library.is_relative_to("/proc")
    (warning,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert "/proc/sglang/kernels" in warning and "SGLANG_CACHE_DIR" in warning


def test_a_full_disk_costs_a_compilation_and_leaves_no_part_of_a_file(
    compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(source: Path, target: Path) -> None:
        target.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(cpu_extension.shutil, "copyfile", full)
    assert build(ISA).is_file()
    assert {path.suffix for path in (tmp_path / "cache" / "kernels").iterdir()} == {".lock"}
    assert len(libraries(tmp_path)) == 1 and "No space left on device" in caplog.text
    monkeypatch.setattr(tempfile, "TemporaryDirectory", lambda **_: full(tmp_path, tmp_path / "x"))
    with pytest.raises(CompileError, match="No space left.*set TMPDIR"):
        build(ISA)


def test_an_old_compiler_gets_the_best_instructions_that_it_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def fail_at_first(isa: cpu_extension.Isa) -> Path:
        asked.append(isa.name)
        if isa is not ISAS[-1]:
            raise CompileError("unrecognized command-line option")
        return Path("libm.so.6")

    monkeypatch.setattr(cpu_extension, "build", fail_at_first)
    monkeypatch.setattr(ctypes, "CDLL", lambda path: MagicMock())
    cpu_extension.load()
    assert asked == [isa.name for isa in cpu_extension.isas()]


@pytest.mark.parametrize("granted", [True, False])
def test_amx_is_used_where_the_kernel_gives_it(granted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_extension, "_may_use_amx", lambda: granted)
    flags = "fpu avx2 fma f16c avx512f avx512bw avx512dq avx512vl avx512_vnni avx512vbmi amx_tile amx_bf16"
    monkeypatch.setattr(Path, "read_text", lambda self: f"processor : 0\nflags\t\t: {flags}\n")
    monkeypatch.setattr(Path, "exists", lambda self: True)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    cpu_extension._cpu_features.cache_clear()
    try:
        assert cpu_extension.isas()[0].name == ("amx" if granted else "avx512vbmi")
    finally:
        cpu_extension._cpu_features.cache_clear()


def test_instructions_are_those_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def names(machine: str, features: str) -> list[str]:
        monkeypatch.setattr("platform.machine", lambda: machine)
        monkeypatch.setattr(cpu_extension, "_cpu_features", lambda: frozenset(features.split()))
        return [isa.name for isa in cpu_extension.isas()]

    avx2, avx512 = "avx2 fma f16c", "avx512f avx512bw avx512dq avx512vl avx512_vnni"
    assert names("x86_64", "sse2") == ["portable"]
    assert names("x86_64", avx2) == ["avx2", "portable"]
    assert names("x86_64", f"{avx2} avx_vnni") == ["avxvnni", "avx2", "portable"]
    assert names("x86_64", f"{avx2} {avx512}") == ["avx512vnni", "avx2", "portable"]
    assert names("x86_64", f"{avx2} {avx512} avx512vbmi")[0] == "avx512vbmi"
    assert names("x86_64", f"{avx2} {avx512} avx512vbmi amx_tile amx_bf16")[:2] == ["amx", "avx512vbmi"]
    assert names("aarch64", "asimd asimddp") == ["neon", "portable"]
    assert names("riscv64", "") == ["portable"]


def test_the_best_instructions_can_be_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    everything = frozenset(feature for isa in ISAS for feature in isa.features)
    monkeypatch.setattr(cpu_extension, "_cpu_features", lambda: everything)
    assert cpu_extension.has_amx()
    monkeypatch.setenv("SGLANG_MAX_CPU_ISA", "avx512vnni")
    assert [isa.name for isa in cpu_extension.isas()] == ["avx512vnni", "avxvnni", "avx2", "portable"]
    assert not cpu_extension.has_amx()
    monkeypatch.setenv("SGLANG_MAX_CPU_ISA", "avx1024")
    with pytest.raises(
        ArgumentError, match="SGLANG_MAX_CPU_ISA='avx1024': must be one of amx, avx512vbmi, .*, portable"
    ):
        cpu_extension.isas()
