"""Running layers through FP4 GEMM backends: a verdict and a speed per backend, layer and batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from textwrap import shorten

import torch
import torch.nn.functional as F

from sglang.srt.layers.quantization.fp4_autotune_timing import seconds_per_call
from sglang.srt.layers.quantization.fp4_utils import Fp4GemmBackend, Target, backends
from sglang.srt.layers.quantization.fp4_verify import (
    Exact,
    Layer,
    check_layer,
    dense_weight,
    empty_input,
    make_batch,
)
from sglang.srt.layers.quantization.fp4_verify_fused import check_fused
from sglang.srt.layers.quantization.nvfp4 import Activation, NvFp4Linear


@dataclass(frozen=True)
class Row:
    """One backend, one layer, one batch. Errors and speed are None where there is none to give.

    Attributes:
        backend: its label, with the variant where it has several.
        verdict: "ok" or what is wrong.
        error, bound: relative, in the norm.
        max_abs: largest absolute error.
        microseconds: median of a call; ``tflops`` is 2 M N K in that time, ``gb_per_s`` the packed weight's bytes.
        speedup: over ``F.linear`` with the dequantised weight in the same dtype.
    """

    backend: str
    layer: str
    kind: str
    m: int
    n: int
    k: int
    dtype: str
    verdict: str = ""
    error: float | None = None
    bound: float | None = None
    max_abs: float | None = None
    microseconds: float | None = None
    tflops: float | None = None
    gb_per_s: float | None = None
    speedup: float | None = None

    @property
    def ok(self) -> bool:
        return self.verdict == "ok"


class DeviceLostError(Exception):
    """The device fails at everything since a kernel failed; nothing more can be said in this process."""


@dataclass(frozen=True)
class Batch:
    """One input of a layer, the exact result and the seconds of ``F.linear`` (None for 0 rows)."""

    x: torch.Tensor
    exact: Exact | None
    dense_seconds: float | None


class Verification:
    """Runs layers through backends and collects rows.

    Args:
        device: where.
        names: the backends.
        seed: of the inputs.

    Attributes:
        rows: in the order in which they ran.
        skipped: backend -> reason -> how many rows it does not take.
    """

    def __init__(self, device: torch.device, names: Sequence[str], seed: int) -> None:
        self.device, self.names, self.seed = device, names, seed
        self.rows: list[Row] = []
        self.skipped: dict[str, Counter[str]] = {}

    @torch.inference_mode()
    def run(self, layer: Layer, sizes: Sequence[int], on_row: Callable[[str], None]) -> None:
        """Every backend on one layer, with a batch of each of ``sizes`` rows.

        Args:
            on_row: called with a description before each row.

        Raises:
            DeviceLostError: a backend left the device unusable; its row is in ``rows``.
        """
        weight = layer.weight
        target = Target.current(self.device, weight.dtype).for_layer(
            weight.in_features, weight.out_features, weight.activation is Activation.NONE, weight.dtype
        )
        dense = dense_weight(layer)
        batches: dict[bool, list[Batch]] = {}
        for name in self.names:
            backend = backends()[name]
            reason = backend.unsupported_reason(target)
            if reason is not None:
                self.skipped.setdefault(name, Counter())[reason] += len(sizes)
                continue
            kept = backend.keeps_activations and weight.activation is not Activation.NONE
            layer = replace(layer, activations_kept=kept)
            if kept not in batches:
                batches[kept] = [self._batch(layer, rows, dense) for rows in sizes]
            linear: NvFp4Linear | None = None
            for variant in backend.variants(target):
                for batch in batches[kept]:
                    on_row(f"{variant.label} {layer.name} {layer.kind} M={batch.x.shape[0]}")
                    linear = self._row(layer, batch, variant, linear)

    def _batch(self, layer: Layer, rows: int, dense: torch.Tensor) -> Batch:
        if rows == 0:
            return Batch(empty_input(layer), None, None)
        x, exact = make_batch(layer, rows, self.seed)
        return Batch(x, exact, self._seconds(lambda: F.linear(x, dense, layer.bias)))

    def _seconds(self, call: Callable[[], object]) -> float:
        call()
        return seconds_per_call([call], self.device)[0]

    def _row(
        self, layer: Layer, batch: Batch, variant: Fp4GemmBackend, linear: NvFp4Linear | None
    ) -> NvFp4Linear | None:
        """Append a row. Takes and returns the weight in the backend's layout; None where it must be prepared."""
        weight, x, exact = layer.weight, batch.x, batch.exact
        m, n, k = x.shape[0], weight.out_features, weight.in_features
        row = Row(variant.label, layer.name, layer.kind, m, n, k, str(weight.dtype).removeprefix("torch."))
        try:
            if linear is None:
                linear = NvFp4Linear(weight, variant)
            elif linear.backend is not variant:
                linear = linear.shared_with(variant)
            found = check_layer(linear, layer, x, exact)
            verdict = found.verdict
            if found.ok and exact is not None:
                verdict = check_fused(linear, x, layer.bias, exact.limit)
            row = replace(row, verdict=verdict, error=found.error, max_abs=found.max_abs)
            if exact is not None and batch.dense_seconds is not None:
                row = replace(row, bound=exact.bound)
                if row.ok:
                    product = linear
                    seconds = self._seconds(lambda: product(x, layer.bias))
                    row = replace(
                        row,
                        microseconds=seconds * 1e6,
                        tflops=2 * m * n * k / seconds / 1e12,
                        gb_per_s=(weight.packed.nbytes + weight.scale.nbytes) / seconds / 1e9,
                        speedup=batch.dense_seconds / seconds,
                    )
        except Exception as error:  # whatever a kernel library raises is that backend's result
            row = replace(row, verdict=shorten(f"{type(error).__name__}: {error}", 400, placeholder=" ..."))
        self.rows.append(row)
        failure = None if row.ok else self._device_failure()
        if failure is not None:
            raise DeviceLostError(failure)
        return linear

    def _device_failure(self) -> str | None:
        """What a GPU answers to everything since a kernel failed on it; None where it still works."""
        if self.device.type != "cuda":
            return None
        try:
            torch.cuda.synchronize(self.device)
        except RuntimeError as error:
            return str(error)
        return None
