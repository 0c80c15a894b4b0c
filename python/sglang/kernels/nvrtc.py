"""CUDA C++ compiled at run time: NVRTC through ctypes, compiled kernels kept in ``SGLANG_CACHE_DIR``.

Needs no compiler, no headers and no package beyond torch: CUDA builds of torch bring ``libnvrtc``, sources include
nothing. Compiling needs no GPU.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import site
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from sglang.srt.environ import envs
from sglang.srt.errors import StartupError

logger = logging.getLogger(__name__)

_END = b"END\n"  # marks a file that was written whole


@dataclass(frozen=True)
class Compiled:
    """Machine code of one source, and what the assembler said about it (registers, spills)."""

    cubin: bytes
    log: str


def _candidates() -> Iterator[str]:
    folders = dict.fromkeys([*sys.path, *site.getsitepackages()])
    for folder in folders:
        for pattern in ("nvidia/cu*/lib", "nvidia/cuda_nvrtc/lib", "torch/lib"):
            for library in sorted(Path(folder or ".").glob(f"{pattern}/libnvrtc.so.*"), reverse=True):
                yield str(library)
    for home in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(home):
            for library in sorted(Path(os.environ[home]).glob("lib*/libnvrtc.so*"), reverse=True):
                yield str(library)
    yield from ("libnvrtc.so.13", "libnvrtc.so.12", "/usr/local/cuda/lib64/libnvrtc.so")


@cache
def _library() -> ctypes.CDLL | None:
    for name in _candidates():
        try:
            for builtins in Path(name).parent.glob("libnvrtc-builtins.so.*"):  # NVRTC asks the loader for it by name
                ctypes.CDLL(str(builtins))
            library = ctypes.CDLL(name)
        except OSError:
            continue
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        return library
    return None


def available() -> bool:
    """Whether NVRTC is here."""
    return _library() is not None


@cache
def version() -> str:
    """NVRTC's version, "13.0"; "" where it is absent."""
    library = _library()
    if library is None:
        return ""
    major, minor = ctypes.c_int(), ctypes.c_int()
    library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return f"{major.value}.{minor.value}"


def architecture(capability: tuple[int, int]) -> str:
    """What NVRTC calls a device of this compute capability."""
    return f"sm_{capability[0]}{capability[1]}" + ("a" if capability == (9, 0) else "")


def _text(library: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(max(size.value, 1))
    getattr(library, f"nvrtcGet{what}")(program, buffer)
    return buffer.raw[: size.value]


def compile_source(source: str, arch: str, options: Sequence[str]) -> Compiled:
    """``source`` for ``arch`` ("sm_90a"), without the cache.

    Raises:
        StartupError: NVRTC is absent, or refuses the source; the text holds its log.
    """
    library = _library()
    if library is None:
        raise StartupError("NVRTC is not here: pip install nvidia-cuda-nvrtc")
    program = ctypes.c_void_p()
    library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None)
    try:
        flags = [f"--gpu-architecture={arch}", "--std=c++17", "--ptxas-options=-v", *options]
        array = (ctypes.c_char_p * len(flags))(*[flag.encode() for flag in flags])
        code = library.nvrtcCompileProgram(program, len(flags), array)
        log = _text(library, program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
        if code != 0:
            reason = library.nvrtcGetErrorString(code).decode()
            raise StartupError(f"NVRTC {version()} could not compile for {arch} ({' '.join(options)}): {reason}\n{log}")
        return Compiled(_text(library, program, "CUBIN"), log)
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _path(source: str, arch: str, options: Sequence[str]) -> Path:
    key = hashlib.sha256("\0".join([source, arch, *options, version()]).encode()).hexdigest()
    return envs.SGLANG_CACHE_DIR.get() / "kernels" / f"{key[:32]}.cubin"


def _read(path: Path) -> bytes | None:
    try:
        cubin = path.read_bytes()
    except OSError:
        return None
    whole = cubin[:4] == b"\x7fELF" and cubin[-len(_END) :] == _END
    return cubin[: -len(_END)] if whole else None


def is_cached(source: str, arch: str, options: Sequence[str]) -> bool:
    """Whether :func:`load_cubin` need not compile."""
    return _read(_path(source, arch, options)) is not None


def load_cubin(source: str, arch: str, options: Sequence[str]) -> tuple[bytes, bool]:
    """Machine code of ``source`` from the cache, or compiled and, where the folder can be written, added to it.

    The second value says whether it was compiled now. A file that is not a whole ELF is compiled again.
    """
    path = _path(source, arch, options)
    cached = _read(path)
    if cached is not None:
        return cached, False
    cubin = compile_source(source, arch, options).cubin
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(cubin + _END)
            Path(temporary).replace(path)
        finally:
            Path(temporary).unlink(missing_ok=True)
    except OSError as error:  # a folder that can't be written costs time at the next start, nothing else
        _warn(path.parent, error.strerror or str(error))
    return cubin, True


@cache
def _warn(folder: Path, reason: str) -> None:
    logger.warning(
        "Compiled kernels can't be kept in %s, so every start compiles them: %s. Set %s to another folder.",
        folder, reason, envs.SGLANG_CACHE_DIR.name,
    )  # fmt: skip
