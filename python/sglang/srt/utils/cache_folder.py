"""The folder of compiled kernels and measurements, where it can't be written."""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path

from sglang.srt.environ import envs
from sglang.srt.errors import StartupError

logger = logging.getLogger(__name__)

# Each must take a file as large as compiled kernels are.
_SUBFOLDERS, _PROBE_BYTES = ("kernels", "fp4_autotune"), 1 << 20
_replacements: list[tempfile.TemporaryDirectory[str]] = []  # removed at exit


def has_kernels(folder: Path) -> bool:
    """Whether an earlier start has left compiled kernels."""
    try:
        return any((folder / "kernels").iterdir())
    except OSError:
        return False


def ensure_cache_folder() -> None:
    """Unless ``SGLANG_CACHE_DIR`` can be written, say so once and give this process and its children another one until
    it ends. A read-only folder that has kernels in it is kept.

    Raises:
        StartupError: no folder for temporary files can be written either.
    """
    folder = envs.SGLANG_CACHE_DIR.get()
    try:
        for name in _SUBFOLDERS:
            (folder / name).mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder / name) as probe:
                probe.write(bytes(_PROBE_BYTES))
        return
    except OSError as error:
        reason = error.strerror or str(error)
    if has_kernels(folder):
        logger.warning("%s can't be written (%s); what is in it is used.", folder, reason)
        return
    try:
        replacement = tempfile.TemporaryDirectory(prefix="sglang-cache-")
    except OSError as error:
        what = f"no temporary file can be written ({error.strerror})"
        raise StartupError(f"{what}; free some space or set TMPDIR") from None
    logger.warning(
        "%s can't be written (%s), so kernels are compiled and measured again at every start. Set %s to a folder "
        "that can be.",
        folder, reason, envs.SGLANG_CACHE_DIR.name,
    )  # fmt: skip
    _replacements.append(replacement)
    os.environ[envs.SGLANG_CACHE_DIR.name] = replacement.name
