"""Reading safetensors checkpoints: which files, and every tensor in them, with errors that name the file."""

from __future__ import annotations

import ctypes
import json
import logging
import mmap
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from sglang.srt.errors import CheckpointError
from sglang.srt.utils.progress import progress_of

logger = logging.getLogger(__name__)

INDEX_NAME = "model.safetensors.index.json"


def safetensors_files(model_path: str | Path) -> list[Path]:
    """The weight files of a checkpoint folder: those of its index, else every ``*.safetensors`` in it.

    Mistral's ``consolidated*`` files, which repeat the weights under other names, are read only where there are no
    others, as those of a hub's model are downloaded.

    The file with the output head, the largest layer of many models, comes first: converting it takes as much memory
    again, of which little is in use then.

    Raises:
        CheckpointError: there are none, or the index can't be read or lists a file that is missing.
    """
    folder = Path(model_path)
    index = folder / INDEX_NAME
    if index.is_file():
        try:
            weight_map = json.loads(index.read_text())["weight_map"].items()
            heads = {name for tensor, name in weight_map if tensor.endswith("lm_head.weight")}
            names = sorted({name for _, name in weight_map}, key=lambda name: (name not in heads, name))
            files = [folder / name for name in names]
        except (ValueError, LookupError, AttributeError, TypeError, OSError) as error:
            raise CheckpointError(f"{index} is not a safetensors index: {error!r}; download it again") from error
        for file in files:
            if not file.is_file():
                raise CheckpointError(f"{INDEX_NAME} lists {file.name}, which is not in {folder}")
        return files
    files = sorted(folder.glob("*.safetensors"))
    consolidated = sorted(folder.glob("consolidated*.safetensors"))
    if len(consolidated) < len(files):
        files = [file for file in files if file not in consolidated]
        for file in consolidated:
            logger.info("%s is not read: it repeats the weights of the other files.", file)
    if not files:
        raise CheckpointError(f"{folder} has no *.safetensors file; other weight formats are not read")
    return files


def open_safetensors(file: Path) -> safe_open:
    """Open a file for reading tensor by tensor (memory-mapped).

    Raises:
        CheckpointError: the file is truncated, a Git LFS pointer, or not safetensors at all.
    """
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        hint = ""
        with suppress(OSError), file.open("rb") as stream:
            if stream.read(20).startswith(b"version https://git-"):
                hint = " (it is a Git LFS pointer, not the data: run git lfs pull)"
        raise CheckpointError(f"{file} can't be read as safetensors{hint}; is it complete? {error}") from error


def iterate_tensors(model_path: str | Path, progress: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
    """Every (name, CPU tensor) of the checkpoint, file by file.

    A tensor's memory is the file's map: only to be read. What was read of it is no longer resident when the next one
    comes, and is read again from the file if it is used again.

    Raises:
        CheckpointError: a file can't be read, or two files hold the same tensor.
    """
    seen: dict[str, str] = {}
    for file in progress_of(safetensors_files(model_path), "Loading safetensors checkpoint shards", show=progress):
        with open_safetensors(file) as tensors:
            mapped: list[range] | None = None
            for name in tensors.keys():  # noqa: SIM118 (not a dictionary)
                if name in seen:
                    raise CheckpointError(f"tensor {name} is in {file.name} and in {seen[name]}")
                seen[name] = file.name
                tensor = tensors.get_tensor(name)
                if mapped is None:
                    mapped = _addresses(file)
                yield name, tensor
                _drop_pages(tensor, mapped)


def _addresses(file: Path) -> list[range]:
    """Where ``file`` is mapped into this process (on Linux; elsewhere nothing is said)."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return []
    found = [line.split(maxsplit=5) for line in maps.read_text().splitlines()]
    spans = [words[0].split("-") for words in found if len(words) == 6 and words[5] == str(file.resolve())]
    return [range(int(start, 16), int(end, 16)) for start, end in spans]


def _drop_pages(tensor: torch.Tensor, mapped: list[range]) -> None:
    """Take the pages in which ``tensor`` lies out of this process's memory, if they are a file's."""
    start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    # Other memory would lose its content.
    if start < end and any(start in span and end - 1 in span for span in mapped):
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED)
