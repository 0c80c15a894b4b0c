"""Every environment variable that this package reads, typed: ``envs.NAME.get()``."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from sglang.srt.errors import ArgumentError

T = TypeVar("T")


class EnvField(Generic[T]):
    """One variable. It is read when asked for, never at import; an empty value is the same as none."""

    name: str

    def __init__(self, parse: Callable[[str], T], default: Callable[[], T], default_text: str, help: str) -> None:
        self._parse = parse
        self._default = default
        self.default_text = default_text
        self.help = help

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def is_set(self) -> bool:
        return bool(os.environ.get(self.name))

    def get(self) -> T:
        """The variable's value, or the default where it is unset or empty.

        Raises:
            ArgumentError: the value can't be used; the text names the variable.
        """
        value = os.environ.get(self.name)
        if not value:
            return self._default()
        try:
            return self._parse(value)
        except ValueError as error:
            raise ArgumentError(f"environment variable {self.name}={value!r}: {error}") from None


def _folder(value: str) -> Path:
    path = Path(value).expanduser()
    if not path.is_absolute():
        raise ValueError("must be an absolute path")
    # Not Path.exists, which raises below a folder that may not be searched.
    if os.path.exists(path) and not os.path.isdir(path):  # noqa: PTH110, PTH112
        raise ValueError("is a file, not a folder")
    return path


def _seconds(value: str) -> float | None:
    seconds = float(value)
    if not math.isfinite(seconds):
        raise ValueError("must be a finite number of seconds")
    return seconds if seconds > 0 else None


def _time_limit(value: str) -> float:
    seconds = float(value)
    if not 0 < seconds < math.inf:
        raise ValueError("must be a number of seconds, more than 0")
    return seconds


class Envs:
    """The variables, by name."""

    SGLANG_FLASHINFER_FP4_GEMM_BACKEND: EnvField[str | None] = EnvField(
        str,
        lambda: None,
        "unset",
        "Deprecated, use `--fp4-gemm-backend`. Kernel of NVFP4 linear layers; read only while the flag is `auto`.",
    )
    SGLANG_CACHE_DIR: EnvField[Path] = EnvField(
        _folder,
        lambda: Path.home() / ".cache" / "sglang",
        "`~/.cache/sglang`",
        "Absolute path of the folder for compiled kernels and other files that can be made again.",
    )
    SGLANG_MAX_CPU_ISA: EnvField[str | None] = EnvField(
        str,
        lambda: None,
        "the CPU's best",
        "The best instructions that our CPU kernels may use: `amx`, `avx512vbmi`, `avx512vnni`, `avxvnni`, `avx2`, "
        "`neon` or `portable`. NVFP4 products have the same bits with all of them.",
    )
    SGLANG_REQ_WAITING_TIMEOUT: EnvField[float | None] = EnvField(
        _seconds,
        lambda: None,
        "no limit",
        "Seconds that a request may wait until it first runs; then it is answered with HTTP 503. 0 or less: no limit.",
    )
    SGLANG_REQ_RUNNING_TIMEOUT: EnvField[float | None] = EnvField(
        _seconds,
        lambda: None,
        "no limit",
        "Seconds that a request may take from then on; then it is answered with HTTP 503. 0 or less: no limit.",
    )

    SGLANG_WRITE_TIMEOUT: EnvField[float | None] = EnvField(
        _seconds,
        lambda: 300.0,
        "`300`",
        "Seconds for which a client may accept nothing of its answer; then it is disconnected, which ends its request. "
        "0 or less: no limit.",
    )
    SGLANG_READ_TIMEOUT: EnvField[float | None] = EnvField(
        _seconds,
        lambda: 300.0,
        "`300`",
        "Seconds from a connection's opening or, if it was kept alive, a request's first byte, until the whole request "
        "must have come; then the answer is HTTP 408 and the client is disconnected. 0 or less: no limit.",
    )
    SGLANG_GRAMMAR_TIMEOUT: EnvField[float] = EnvField(
        _time_limit,
        lambda: 10.0,
        "`10`",
        "Seconds after which a grammar that is still being compiled is refused with HTTP 400.",
    )

    def all(self) -> tuple[EnvField[str | None] | EnvField[Path] | EnvField[float | None] | EnvField[float], ...]:
        """Every variable, in the order of declaration."""
        return tuple(value for value in vars(type(self)).values() if isinstance(value, EnvField))


envs = Envs()
