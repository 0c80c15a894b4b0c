"""The CPU kernel's shared library: C++ without torch's headers, compiled on first use, called through ctypes.

A plain C interface compiles in seconds, needs no headers but the compiler's own, and works with every torch. Its OpenMP
is the libgomp that torch has loaded (the names are equal), so both share one pool of threads.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import logging
import os
import platform
import shlex
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from filelock import FileLock

from sglang.srt.environ import envs
from sglang.srt.errors import ArgumentError

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).with_name("cpu")
# Contraction would round once where another path rounds twice. Exceptions and errno are not looked at.
FLAGS = (
    *("-std=c++17", "-O2", "-ftree-vectorize", "-fvect-cost-model"),
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-fopenmp"),
)

_COMPILERS = ("c++", "g++", "clang++")
_INSTALL = {
    "apt-get": "apt-get install g++",
    "dnf": "dnf install gcc-c++",
    "apk": "apk add g++",
    "zypper": "zypper install gcc-c++",
}
_AVX2 = ("avx2", "fma", "f16c")
_AVX512 = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni")
_AMX = ("amx_tile", "amx_bf16")


@dataclass(frozen=True)
class Isa:
    """Instructions that one build of the kernel uses: names in /proc/cpuinfo, and the compiler's flags for them."""

    name: str
    machine: str
    features: tuple[str, ...]
    flags: tuple[str, ...]


def _x86(name: str, *features: str) -> Isa:
    spelling = {"avx512_vnni": "avx512vnni", "avx_vnni": "avxvnni"}
    flags = (f"-m{spelling.get(feature, feature.replace('_', '-'))}" for feature in features)
    return Isa(name, "x86_64", features, tuple(flags))


# The first whose features the CPU has is used.
ISAS = (
    _x86("amx", *_AVX2, *_AVX512, "avx512vbmi", *_AMX),
    _x86("avx512vbmi", *_AVX2, *_AVX512, "avx512vbmi"),
    _x86("avx512vnni", *_AVX2, *_AVX512),
    _x86("avxvnni", *_AVX2, "avx_vnni"),
    _x86("avx2", *_AVX2),
    Isa("neon", "aarch64", ("asimddp",), ("-march=armv8.2-a+dotprod",)),
    Isa("portable", "", (), ()),
)


_scratch: list[tempfile.TemporaryDirectory[str]] = []  # removed at exit


class CompileError(Exception):
    """The library can't be built here; the text says why, and what to do."""


def isas() -> tuple[Isa, ...]:
    """What this CPU can run, best first, from ``SGLANG_MAX_CPU_ISA`` on.

    Raises:
        ArgumentError: that names nothing of :data:`ISAS`.
    """
    features, best = _cpu_features(), envs.SGLANG_MAX_CPU_ISA.get()
    names = [isa.name for isa in ISAS]
    if best is not None and best not in names:
        variable = f"environment variable {envs.SGLANG_MAX_CPU_ISA.name}={best!r}"
        raise ArgumentError(f"{variable}: must be one of {', '.join(names)}")
    allowed = ISAS[names.index(best) :] if best else ISAS
    here = ("", platform.machine())
    return tuple(isa for isa in allowed if isa.machine in here and features.issuperset(isa.features))


def has_amx() -> bool:
    """Whether this CPU multiplies bfloat16 in tiles, and this process may let it."""
    return isas()[0].name == "amx"


@cache
def _cpu_features() -> frozenset[str]:
    file = Path("/proc/cpuinfo")
    for line in file.read_text().splitlines() if file.exists() else []:
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            features = frozenset(value.split())
            return features if features.isdisjoint(_AMX) or _may_use_amx() else features.difference(_AMX)
    return frozenset()


def _may_use_amx() -> bool:
    """Ask Linux for room for AMX's registers, which a process gets once it has asked."""
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    return bool(ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0)


def _compiler() -> list[str]:
    """The command of the C++ compiler: $CXX, or the system's.

    Raises:
        CompileError: there is none.
    """
    named = os.environ.get("CXX")
    for command in [shlex.split(named)] if named else [[name] for name in _COMPILERS]:
        if command and shutil.which(command[0]):
            return command
    raise CompileError(f"needs a C++ compiler; found none ({f'CXX={named}' if named else ', '.join(_COMPILERS)})")


def _run(command: list[str]) -> str:
    result = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if result.returncode != 0:
        lines = (result.stderr or result.stdout).strip().splitlines()
        first = next((line for line in lines if "error" in line), lines[0] if lines else "no output")
        raise CompileError(f"the C++ compiler {command[0]} failed: {first}")
    return result.stdout


def build(isa: Isa) -> Path:
    """The library for ``isa``, compiled unless the same build is in the cache.

    It lies in ``SGLANG_CACHE_DIR``, named after everything that it depends on; processes that start together compile it
    once. Where that folder can't be written, this process compiles it for itself.

    Raises:
        CompileError: no compiler, or it failed, or no folder for temporary files can be written.
    """
    compiler = _compiler()
    command = [*compiler, *FLAGS, *isa.flags]
    sources = sorted(path for path in SOURCES.iterdir() if path.suffix in (".cpp", ".h"))
    key = hashlib.sha256("\0".join([*command, _run([*compiler, "--version"]), platform.machine()]).encode())
    for path in sources:
        key.update(path.name.encode() + path.read_bytes())
    folder = envs.SGLANG_CACHE_DIR.get() / "kernels"
    library = folder / f"cpu-{isa.name}-{key.hexdigest()[:16]}.so"
    units = [path for path in sources if path.suffix == ".cpp"]
    built: Path | None = None
    try:
        if library.exists():
            return library
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{library}.lock"):
            if library.exists():
                return library
            built = _compile(command, units, library.name, isa)
            partial = library.with_suffix(".tmp")
            try:
                shutil.copyfile(built, partial)
                partial.replace(library)
            finally:
                partial.unlink(missing_ok=True)
            return library
    except OSError as error:
        logger.warning(
            "The compiled CPU kernel can't be kept in %s, so every start compiles it: %s. Set %s to another folder.",
            folder, error, envs.SGLANG_CACHE_DIR.name,
        )  # fmt: skip
    return built or _compile(command, units, library.name, isa)


def _compile(command: list[str], units: list[Path], name: str, isa: Isa) -> Path:
    """A library in a folder that goes when this process ends; the units are compiled side by side."""
    logger.info("Compiling the CPU kernels (%s)", isa.name)
    started = time.monotonic()
    try:
        scratch = tempfile.TemporaryDirectory(prefix="sglang-kernel-")
    except OSError as error:
        raise CompileError(f"can't write a temporary file: {error}; set TMPDIR") from None
    _scratch.append(scratch)
    output = Path(scratch.name) / name
    objects = [f"{scratch.name}/{unit.stem}.o" for unit in units]
    with ThreadPoolExecutor(len(units)) as pool:
        list(pool.map(lambda unit, to: _run([*command, "-c", str(unit), "-o", to]), units, objects))
    _run([*command, "-shared", *objects, "-o", str(output)])
    logger.info("Compiled the CPU kernels (%s) in %.1f s", isa.name, time.monotonic() - started)
    return output


_POINTER, _SIZE, _INTEGER, _NUMBER = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
# The arguments of each function; those that can fail return an errno value.
_SIGNATURES: dict[str, list[type]] = {
    "sglang_fp4_gemm": [_POINTER, _SIZE, *[_POINTER] * 7, *[_SIZE] * 3, *[_INTEGER] * 2],
    "sglang_rms_norm": [*[_POINTER] * 4, *[_SIZE] * 5, _NUMBER, *[_INTEGER] * 2],
    "sglang_silu_and_mul": [_POINTER, _SIZE, _POINTER, _SIZE, _SIZE, *[_INTEGER] * 2],
    "sglang_cos_sin": [_POINTER, _POINTER, _SIZE, _POINTER, _POINTER, _SIZE, _SIZE, _NUMBER, *[_INTEGER] * 2],
    "sglang_embedding": [*[_POINTER] * 3, *[_SIZE] * 3, *[_INTEGER] * 3],
    "sglang_greedy": [_POINTER, _SIZE, _POINTER, _POINTER, _SIZE, _SIZE, *[_INTEGER] * 3],
    "sglang_bf16_linear": [_POINTER, _SIZE, *[_POINTER] * 3, *[_SIZE] * 3, *[_INTEGER] * 2],
    "sglang_attention": [
        *[_POINTER] * 3, *[_SIZE] * 3, *[_POINTER] * 6, _SIZE, *[_POINTER] * 4, *[_SIZE] * 5, *[_NUMBER] * 3,
        *[_INTEGER] * 3,
    ],
}  # fmt: skip
_FAIL = {"sglang_fp4_gemm", "sglang_embedding", "sglang_bf16_linear", "sglang_attention"}


class Function:
    """A function of the library, called with Python's numbers and addresses (None: null)."""

    def __init__(self, library: ctypes.CDLL, name: str) -> None:
        self._recorded = getattr(library, f"{name}_recorded")
        self._call = getattr(library, name)
        self._call.argtypes = self.argtypes = _SIGNATURES[name]
        self._call.restype = _INTEGER if name in _FAIL else None

    @property
    def recorded(self) -> int:
        """The address of its twin that takes all arguments in one array of 8 bytes each."""
        address = ctypes.cast(self._recorded, _POINTER).value
        assert address is not None
        return address

    def pack(self, arguments: tuple[float | None, ...]) -> bytes:
        """What that twin reads."""
        values = zip(self.argtypes, arguments, strict=True)
        return b"".join(struct.pack("d" if kind is _NUMBER else "q", value or 0) for kind, value in values)

    def __call__(self, *arguments: float | None) -> int | None:
        if (calls := recording.get()) is not None:
            calls.append((self, arguments))
        result: int | None = self._call(*arguments)
        return result


def raise_for(error: int) -> None:
    """Raise what a function's result means, unless it is 0.

    Raises:
        IndexError: EINVAL, a token id is outside the vocabulary.
        MemoryError: ENOMEM.
    """
    if error == errno.EINVAL:
        raise IndexError("a token id is outside the vocabulary")
    if error:
        raise MemoryError("no memory for what a CPU kernel works in")


# Where calls of this thread are noted, if they are.
recording: ContextVar[list[tuple[Function, tuple[float | None, ...]]] | None] = ContextVar("recording", default=None)


class Library:
    """The functions of one build, as attributes."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._functions = {name: Function(library, name) for name in _SIGNATURES}
        self.replay = library.sglang_replay
        self.replay.argtypes = [_POINTER, _SIZE]
        self.replay.restype = _INTEGER

    def __getattr__(self, name: str) -> Function:
        try:
            return self._functions[name]
        except KeyError:
            raise AttributeError(name) from None


@cache
def load(isa: Isa | None = None) -> Library:
    """The library's functions: for ``isa``, or the best that CPU and compiler know.

    Raises:
        CompileError: see :func:`build`, or the library can't be loaded.
    """
    if isa is None:
        for candidate in isas()[:-1]:
            try:
                return load(candidate)
            except CompileError as error:  # an old compiler doesn't know all instructions
                logger.debug("%s: %s", candidate.name, error)
        return load(isas()[-1])
    try:
        library = ctypes.CDLL(str(build(isa)))
    except OSError as error:
        raise CompileError(f"the compiled CPU kernel can't be loaded: {error}") from None
    return Library(library)


@cache
def unavailable() -> str | None:
    """Why the library can't be had in this process, as a sentence without its subject; None if it can.

    The first call compiles it, unless the cache has it: whether a compiler works can't be known otherwise.
    """
    if not sys.platform.startswith("linux"):
        return f"needs Linux; this is {platform.system()}"
    try:
        load()
    except CompileError as error:
        return str(error)
    return None


def fix() -> str | None:
    """The command after which there is a C++ compiler; None where there is one, or no command is known."""
    try:
        _compiler()
    except CompileError:
        if any(map(shutil.which, _COMPILERS)):  # $CXX names another
            return "unset CXX"
        return next((command for manager, command in _INSTALL.items() if shutil.which(manager)), None)
    return None
