"""SGLang-compatible inference server with an exact NVFP4 subsystem. Importing this package imports no torch."""

from importlib import metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang.srt.entrypoints.engine import Engine

__version__ = "0.1.0"
__all__ = ["Engine", "__version__"]


def _refuse_upstream_beside_us() -> None:
    """Both distributions install the package ``sglang``; whichever was written last would win file by file."""
    try:
        upstream = metadata.version("sglang")
    except metadata.PackageNotFoundError:
        return
    raise ImportError(
        f"the distribution 'sglang' {upstream} is installed beside 'sglang-nvfp4' {__version__}; both provide the "
        "package 'sglang' and overwrite each other's files. Keep one: pip uninstall -y sglang sglang-nvfp4, then "
        "install the one you want (a virtual environment for each works too)."
    )


_refuse_upstream_beside_us()


def __getattr__(name: str) -> Any:
    if name == "Engine":
        from sglang.srt.entrypoints.engine import Engine

        return Engine
    raise AttributeError(f"module 'sglang' has no attribute {name!r}")
