"""Random access to the tensors of a safetensors folder, one file or many, without loading it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from safetensors import safe_open

from sglang.srt.errors import CheckpointError
from sglang.srt.model_loader.weight_utils import open_safetensors, safetensors_files

FLOAT_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


@dataclass(frozen=True)
class TensorInfo:
    """What a file's header says about one tensor.

    Attributes:
        file: where it is.
        dtype: safetensors' name, such as ``BF16``.
        shape: sizes.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes; only for the dtypes of ``FLOAT_DTYPES``."""
        return prod(self.shape) * FLOAT_DTYPES[self.dtype].itemsize


class CheckpointReader:
    """The tensors of a Hugging Face safetensors folder.

    Attributes:
        tensors: {name: :class:`TensorInfo`}, file by file.

    Raises:
        CheckpointError: no weights, a damaged file, or two files hold the same tensor.
    """

    def __init__(self, folder: Path) -> None:
        self.tensors: dict[str, TensorInfo] = {}
        for file in safetensors_files(folder):
            handle = open_safetensors(file)
            for name in handle.keys():  # noqa: SIM118 (not a dictionary)
                if name in self.tensors:
                    raise CheckpointError(f"tensor {name} is in {file.name} and in {self.tensors[name].file.name}")
                entry = handle.get_slice(name)
                self.tensors[name] = TensorInfo(file, entry.get_dtype(), tuple(entry.get_shape()))

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield ``(name, CPU tensor)`` in the given order. A file stays mapped while consecutive names are in it."""
        opened: tuple[Path, safe_open] | None = None
        for name in names:
            file = self.tensors[name].file
            if opened is None or opened[0] != file:
                opened = file, open_safetensors(file)
            yield name, opened[1].get_tensor(name)
