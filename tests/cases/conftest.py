"""For every case: fresh memory is poisoned, so that a value nobody wrote shows."""

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import Checkpoint
from oracle import import_file

from sglang.srt.layers.quantization import fp4_utils
from sglang.srt.layers.quantization.fp4_backends import flashinfer
from sglang.srt.layers.quantization.fp4_utils import Target

# torch remembers its constructors when a device is first a context; they must be the real ones, not ours.
with torch.device("cpu"):
    torch.empty(0)


def poison(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype.itemsize == 1 and tensor.dtype != torch.bool:
        tensor.view(torch.uint8).fill_(0x7F)  # NaN as E4M3
    elif tensor.is_floating_point():
        tensor.fill_(float("nan"))
    elif tensor.dtype != torch.bool:
        tensor.fill_(torch.iinfo(tensor.dtype).max)
    return tensor


@pytest.fixture(scope="module", autouse=True)
def cheap_collections() -> Iterator[None]:
    """A model runner collects garbage; it need not look at the modules of this whole process each time."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def poisoned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda *args, **kwargs: poison(make(*args, **kwargs))

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))


@pytest.fixture(autouse=True)
def automatic_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever another test of this process initialised."""
    monkeypatch.setattr(fp4_utils, "_resolution", None)


@pytest.fixture
def written(tmp_path: Path) -> Callable[..., Path]:
    """Writes checkpoints into folders of their own."""
    folders = iter(range(1000))

    def write(checkpoint: Checkpoint, **options: Any) -> Path:
        return checkpoint.write(tmp_path / str(next(folders)), **options)

    return write


@pytest.fixture
def blackwell(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Makes this process believe in a Blackwell GPU whose FlashInfer is emulated on the CPU, byte by byte; the argument
    is the value of ``--fp4-gemm-backend``, and for ``cpu`` the process knows what it runs on. Returns the emulator,
    which counts its products."""
    emulator_file = Path(__file__).parents[1] / "srt" / "layers" / "quantization" / "flashinfer_emulator.py"

    current = Target.current

    def choose(backend: str) -> Any:
        emulator = import_file(emulator_file).Emulator()
        target = Target("cuda", (10, 0), "13.0", "0.6.13", "9.15.0", "1.15", "4.5.0")
        if backend == "cpu":
            target = current("cpu")
            reason = fp4_utils.unsupported_reasons(target)["cpu"]
            if reason is not None:
                pytest.skip(reason)
        monkeypatch.setattr(flashinfer, "_flashinfer", lambda: emulator)
        monkeypatch.setattr(Target, "current", staticmethod(lambda *_: target))
        monkeypatch.setattr(fp4_utils, "_resolution", fp4_utils.resolve_fp4_gemm_backend(backend, None, target))
        return emulator

    return choose
