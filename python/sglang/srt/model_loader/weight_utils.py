"""Reading safetensors checkpoints: which files, and every tensor in them, with errors that name the file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from sglang.srt.errors import CheckpointError

INDEX_NAME = "model.safetensors.index.json"


def safetensors_files(model_path: str | Path) -> list[Path]:
    """The weight files of a checkpoint folder: those of its index, else every ``*.safetensors`` in it.

    Raises:
        CheckpointError: there are none, or the index can't be read or lists a file that is missing.
    """
    folder = Path(model_path)
    index = folder / INDEX_NAME
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (json.JSONDecodeError, KeyError, AttributeError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{index} is not a safetensors index: {error!r}") from error
        files = [folder / name for name in names]
        for file in files:
            if not file.is_file():
                raise CheckpointError(f"{INDEX_NAME} lists {file.name}, which is not in {folder}")
        return files
    files = sorted(folder.glob("*.safetensors"))
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
        with file.open("rb") as stream:
            if stream.read(20).startswith(b"version https://git-"):
                hint = " (it is a Git LFS pointer, not the data: run git lfs pull)"
        raise CheckpointError(f"{file} can't be read as safetensors{hint}; is it complete? {error}") from error


def iterate_tensors(model_path: str | Path, progress: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
    """Every (name, CPU tensor) of the checkpoint, file by file; a tensor's memory is the file's map.

    Raises:
        CheckpointError: a file can't be read, or two files hold the same tensor.
    """
    seen: dict[str, str] = {}
    for file in tqdm(safetensors_files(model_path), desc="Loading safetensors checkpoint shards", disable=not progress):
        with open_safetensors(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a dictionary)
                if name in seen:
                    raise CheckpointError(f"tensor {name} is in {file.name} and in {seen[name]}")
                seen[name] = file.name
                yield name, tensors.get_tensor(name)
