"""FP4 GEMM backends for tests: they compute with ``torch`` and take as long as a test says, on a clock of its own."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from torch import nn

from sglang.srt.distributed import SINGLE, TensorParallelGroup
from sglang.srt.layers.quantization import fp4_utils
from sglang.srt.layers.quantization.fp4_autotune import Autotuner
from sglang.srt.layers.quantization.fp4_utils import (
    Fp4GemmBackend,
    PreparedWeight,
    Target,
    backends,
    resolve_fp4_gemm_backend,
)
from sglang.srt.layers.quantization.nvfp4 import install
from sglang.srt.layers.quantization.nvfp4_linear import Activation, NvFp4Linear, NvFp4Weight

Fault = Callable[[torch.Tensor], torch.Tensor]


@dataclass
class FakeWeight(PreparedWeight):
    inner: PreparedWeight

    @property
    def nbytes(self) -> int:
        return self.inner.nbytes


@dataclass
class World:
    """What the fakes share.

    ``seconds``: label to the time of one call for 1, 2, 4, ... rows, the last one for more too. ``faults``: label to
    what is done to a result. ``calls``: every product as (label, rows). ``prepared``: every weight that was made.
    ``tuned``: name, cache and measure of every :meth:`Fp4GemmBackend.tuning`.
    """

    seconds: dict[str, Sequence[float]] = field(default_factory=dict)
    faults: dict[str, Fault] = field(default_factory=dict)
    calls: list[tuple[str, int]] = field(default_factory=list)
    prepared: list[weakref.ref[FakeWeight]] = field(default_factory=list)
    tuned: list[tuple[str, Path | None, bool]] = field(default_factory=list)
    now: float = 0.0
    names: list[str] = field(default_factory=list)

    def clock(self) -> float:
        return self.now

    def duration(self, label: str, rows: int) -> float:
        seconds = self.seconds.get(label, (1e-3,))
        return seconds[min((rows - 1).bit_length(), len(seconds) - 1)]

    def time_torch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let ``torch`` too take its time: long, unless ``seconds`` says otherwise. ``cpu``, which has none, goes."""
        torch_backend = backends()["torch"]
        monkeypatch.delitem(fp4_utils._names, "cpu", raising=False)
        apply = torch_backend.apply
        self.seconds["torch"] = (1.0,)

        def timed(
            backend: Fp4GemmBackend, x: torch.Tensor, weight: PreparedWeight, bias: torch.Tensor | None
        ) -> torch.Tensor:
            self.now += self.duration("torch", x.shape[0])
            return apply(backend, x, weight, bias)

        monkeypatch.setattr(torch_backend, "apply", timed)

    def alive(self) -> list[FakeWeight]:
        return [prepared for reference in self.prepared if (prepared := reference()) is not None]

    def labels(self) -> list[str]:
        """What has multiplied, each once, in the order of the first call."""
        return list(dict.fromkeys(label for label, _ in self.calls))

    def add(
        self,
        name: str,
        *,
        priority: int = 1,
        layout: str = "",
        variants: tuple[str, ...] = ("",),
        multiples: tuple[int, int] = (16, 1),
        per_column: bool = False,
        keeps: bool = False,
        reason: Callable[[Target], str | None] = lambda target: None,
    ) -> type[Fp4GemmBackend]:
        """Register a backend; ``auto`` prefers a higher ``priority``. ``keeps``: its ``keeps_activations``."""
        world = self

        def init(self: Fp4GemmBackend, variant: str = "") -> None:
            self.variant = variant

        def prepare(self: Fp4GemmBackend, weight: NvFp4Weight) -> FakeWeight:
            if keeps:
                weight = replace(weight, activation=Activation.NONE)
            prepared = FakeWeight(self.name, backends()["torch"]().prepare(weight))
            world.prepared.append(weakref.ref(prepared))
            return prepared

        def apply(
            self: Fp4GemmBackend, x: torch.Tensor, weight: PreparedWeight, bias: torch.Tensor | None
        ) -> torch.Tensor:
            weight.check_owner(self)
            assert isinstance(weight, FakeWeight)
            rows = x.shape[0]
            world.calls.append((self.label, rows))
            end = world.now + world.duration(self.label, rows)
            y = backends()["torch"]().apply(x, weight.inner, bias)
            world.now = end
            return world.faults.get(self.label, lambda y: y)(y)

        @contextmanager
        def tuning(cls: type[Fp4GemmBackend], cache: Path | None, measure: bool) -> Iterator[None]:
            world.tuned.append((cls.name, cache, measure))
            yield

        members: dict[str, object] = {
            "name": name,
            "layout": layout,
            "in_multiple": multiples[0],
            "out_multiple": multiples[1],
            "per_column_scale": per_column,
            "keeps_activations": keeps,
            "__init__": init,
            "priority": classmethod(lambda cls, target: priority),
            "unsupported_reason": classmethod(lambda cls, target: reason(target)),
            "variants": classmethod(lambda cls, target: tuple(cls(variant) for variant in variants)),
            "tuning": classmethod(tuning),
            "prepare": prepare,
            "apply": apply,
        }
        backend: type[Fp4GemmBackend] = type(f"Fake{name.title()}", (Fp4GemmBackend,), members)
        self.names.append(name)
        return backend

    def remove_all(self) -> None:
        for name in self.names:
            fp4_utils._names.pop(name)


def make_weight(
    parts: Sequence[int] = (32,),
    columns: int = 64,
    scales: Sequence[float] = (0.01,),
    activation: Activation = Activation.STATIC,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> NvFp4Weight:
    """Random codes and block scales."""
    generator = torch.Generator().manual_seed(seed)
    rows = sum(parts)
    scale = torch.randint(1, 0x7F, (rows, columns // 16), generator=generator, dtype=torch.uint8)
    input_scale = torch.tensor(0.7 / 2688) if activation is Activation.STATIC else None
    return NvFp4Weight(
        packed=torch.randint(0, 256, (rows, columns // 2), generator=generator, dtype=torch.uint8),
        scale=scale.view(torch.float8_e4m3fn),
        global_scales=torch.tensor(scales),
        part_sizes=tuple(parts),
        activation=activation,
        dtype=dtype,
        input_scale=input_scale,
        input_scale_inv=None if input_scale is None else 1.0 / input_scale,
    )


# --------------------------------------------------------------------------------------------------- tuning with them
CPU = torch.device("cpu")
MAX_ROWS = 16  # rows of 1, 2, 4, 8 and 16 are measured


def name_backend(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(fp4_utils, "_resolution", resolve_fp4_gemm_backend(name, None, Target("cpu")))


def layer_of(
    weight: NvFp4Weight, tp: TensorParallelGroup = SINGLE, sharded: bool = False, name: str = "a"
) -> nn.Module:
    layer = nn.Module()
    layer.prefix, layer.tp, layer.input_is_sharded = name, tp, sharded
    install(layer, weight)
    return layer


def tuned(weight: NvFp4Weight, mode: str = "on", measure: bool = True) -> NvFp4Linear:
    """The product of a layer that a new tuner has installed."""
    with Autotuner(mode, CPU, MAX_ROWS).active(measure):
        return layer_of(weight).nvfp4


# --------------------------------------------------------------------------------------------- backends with a fault
@dataclass
class StandWeight(PreparedWeight):
    inner: PreparedWeight


class Stand:
    """Registers backends that compute with ``torch``, and takes them away."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def add(
        self,
        name: str,
        *,
        before: Callable[[NvFp4Weight], NvFp4Weight] = lambda weight: weight,
        inside: Callable[[torch.Tensor], torch.Tensor] = lambda x: x,
        after: Callable[[torch.Tensor], torch.Tensor] = lambda y: y,
        use_bias: bool = True,
        reason: Callable[[Target], str | None] = lambda target: None,
        fix: str | None = None,
        variants: tuple[str, ...] = ("",),
        **members: object,
    ) -> None:
        def prepare(self: Fp4GemmBackend, weight: NvFp4Weight) -> StandWeight:
            return StandWeight(self.name, backends()["torch"]().prepare(before(weight)))

        def apply(
            self: Fp4GemmBackend, x: torch.Tensor, weight: StandWeight, bias: torch.Tensor | None
        ) -> torch.Tensor:
            weight.check_owner(self)
            return after(backends()["torch"]().apply(inside(x), weight.inner, bias if use_bias else None))

        def make(cls: type[Fp4GemmBackend], variant: str) -> Fp4GemmBackend:
            backend = cls()
            backend.variant = variant
            return backend

        members = {
            "name": name,
            "per_column_scale": True,
            "priority": classmethod(lambda cls, target: -1),
            "unsupported_reason": classmethod(lambda cls, target: reason(target)),
            "fix": classmethod(lambda cls, target: fix),
            "variants": classmethod(lambda cls, target: tuple(make(cls, variant) for variant in variants)),
            "prepare": prepare,
            "apply": apply,
        } | members
        type("Stand" + name.title(), (Fp4GemmBackend,), members)
        self.names.append(name)
