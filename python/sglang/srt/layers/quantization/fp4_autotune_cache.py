"""Measured choices on disk: a file per state of the machine, refused where anything differs that times depend on."""

from __future__ import annotations

import hashlib
import inspect
import logging
import platform
import re
from collections.abc import Mapping
from pathlib import Path

import filelock
import msgspec
import torch

import sglang
from sglang.kernels.cpu_extension import isas
from sglang.srt.layers.quantization.fp4_utils import backends
from sglang.srt.platforms import device_capability, device_name
from sglang.srt.utils.versions import versions

logger = logging.getLogger(__name__)

FLAG = "--fp4-gemm-autotune"
Stamp = dict[str, str | None]

# What is installed and has no part in a product of a layer.
_IRRELEVANT = frozenset({"python", "transformers", "tokenizers", "safetensors", "msgspec", "xgrammar"})
_SOURCES = ("srt/layers/quantization", "srt/layers/constant_linear.py", "kernels")
_SUFFIXES = frozenset({".py", ".cu", ".cuh", ".cpp", ".c", ".h"})


class Measurement(msgspec.Struct, frozen=True):
    """What was found out about one product (:attr:`NvFp4Weight.product`); index i of a list is for 2^i rows.

    Attributes:
        choices: labels of the backends to use.
        microseconds: label to the median time of one call; of all candidates that compute the right thing.
        timing: label to how it was timed: "graph" (replays of a CUDA graph), "events" (launches between CUDA events) or
            "clock" (a CPU).
        dropped: label to what was wrong with it.
        raised: candidates that raised, here or for an earlier product, and might not at another start.
    """

    choices: list[str]
    microseconds: dict[str, list[float]]
    timing: dict[str, str]
    dropped: dict[str, str] = {}
    raised: list[str] = []


class _Contents(msgspec.Struct):
    stamp: Stamp
    products: dict[str, Measurement]


def sources_digest() -> str:
    """Of the code of every registered backend and of what it is built from."""
    root = Path(sglang.__file__).parent
    paths = {Path(inspect.getfile(backend)) for backend in backends().values()}
    for source in _SOURCES:
        path = root / source
        paths |= {path} if path.is_file() else {file for file in path.rglob("*") if file.suffix in _SUFFIXES}
    digest = hashlib.sha256()
    for path in sorted(paths):
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)} ".encode() + content)
    return digest.hexdigest()[:16]


def current_stamp(device: torch.device, candidates: str) -> Stamp:
    """Everything that a measurement on ``device`` depends on but the product; ``candidates`` says what was compared."""
    stamp: Stamp = {"candidates": candidates, "sources": sources_digest()}
    if device.type == "cuda":
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        stamp |= {"device": f"{device_name(device)}, {processors} SMs", "threads": None}
        stamp["capability"] = ".".join(map(str, device_capability(device) or ()))
    else:
        stamp |= {"device": _cpu_name(), "threads": str(torch.get_num_threads())}
        stamp["capability"] = f"{torch.backends.cpu.get_cpu_capability()}, {isas()[0].name}"
    installed = {name: version and str(version) for name, version in versions().items()}  # torch's is no plain string
    return stamp | {name: version for name, version in installed.items() if name not in _IRRELEVANT}


def _cpu_name() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1].strip() if found else platform.processor() or platform.machine()


def _differences(ours: Mapping[str, str | None], theirs: Mapping[str, str | None]) -> list[str]:
    names = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    return [f"{name} was {theirs.get(name)}, is {ours.get(name)}" for name in names]


class TuningCache:
    """The file of one stamp. Nothing that is wrong with it, or with its folder, keeps a server from starting.

    Args:
        folder: of all such files; made when something is written.
        stamp: of what runs now.

    Attributes:
        writable: false once something could not be written.
    """

    def __init__(self, folder: Path, stamp: Stamp) -> None:
        self.stamp = stamp
        digest = hashlib.sha256(msgspec.json.encode(sorted(stamp.items()))).hexdigest()[:12]
        device = re.sub("[^a-z0-9]+", "-", str(stamp["device"]).lower())[:40].strip("-")
        self.file = folder / f"{device}-{digest}.json"
        self.writable = True

    def read(self) -> dict[str, Measurement]:
        """What is known under this stamp, by product."""
        try:
            contents = _read(self.file)
        except FileNotFoundError:
            self._say_what_changed()
            return {}
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            logger.warning("FP4 GEMM autotune: %s can't be used, delete it: %s", self.file, error)
            return {}
        differences = _differences(self.stamp, contents.stamp)
        if differences:
            logger.info("FP4 GEMM autotune: %s is not used: %s", self.file, "; ".join(differences))
            return {}
        return contents.products

    def _say_what_changed(self) -> None:
        """Name what keeps the most similar file from being used."""
        others: list[tuple[list[str], Path]] = []
        try:
            for file in sorted(self.file.parent.glob("*.json")):
                if file == self.file:  # written since
                    continue
                try:
                    others.append((_differences(self.stamp, _read(file).stamp), file))
                except (OSError, msgspec.MsgspecError, UnicodeDecodeError):  # not one of ours, or of no use
                    continue
        except OSError:
            return
        if others:
            differences, file = min(others, key=lambda other: len(other[0]))
            logger.info("FP4 GEMM autotune: what was measured in %s is not used: %s", file, "; ".join(differences))

    def write(self, products: dict[str, Measurement]) -> None:
        """Add ``products`` to the file; what other processes have written meanwhile stays."""
        if not self.writable:
            return
        temporary = self.file.with_suffix(".tmp")
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with filelock.FileLock(f"{self.file}.lock", timeout=30):
                try:
                    old = _read(self.file)
                    known = old.products if old.stamp == self.stamp else {}
                except (FileNotFoundError, msgspec.MsgspecError, UnicodeDecodeError):
                    known = {}
                contents = _Contents(self.stamp, known | products)
                # In one step: a reader sees the old file or the new one.
                temporary.write_bytes(msgspec.json.format(msgspec.json.encode(contents)))
                temporary.replace(self.file)
        except (OSError, filelock.Timeout) as error:
            self.writable = False
            logger.warning("FP4 GEMM autotune: measurements can't be kept in %s: %s", self.file, error)


def has_files(folder: Path) -> bool:
    """Whether anything was ever measured."""
    try:
        return any(folder.glob("*.json"))
    except OSError:
        return False


def _read(file: Path) -> _Contents:
    return msgspec.json.decode(file.read_bytes(), type=_Contents)
