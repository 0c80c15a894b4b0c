"""``--fp4-gemm-autotune``: which FP4 GEMM backend multiplies how many rows of which product, by measurement.

A product is measured when the first layer that has it is installed, with that layer's weight, for numbers of rows that
are powers of two; a call takes the choice of the next one above. The default is always a candidate.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace

import msgspec
import torch

from sglang.srt.distributed import SINGLE, TensorParallelGroup
from sglang.srt.environ import envs
from sglang.srt.errors import StartupError
from sglang.srt.layers.quantization import fp4_utils
from sglang.srt.layers.quantization.fp4_autotune_cache import Measurement, TuningCache, current_stamp, has_files
from sglang.srt.layers.quantization.fp4_utils import Fp4GemmBackend, Target, backends
from sglang.srt.layers.quantization.nvfp4_linear import NvFp4Weight
from sglang.srt.platforms import release_unused_memory

logger = logging.getLogger(__name__)

MAX_ROWS = 8192


def candidates_for(target: Target, default: Fp4GemmBackend) -> list[Fp4GemmBackend]:
    """What may multiply the layer of ``target``: the variants of ``default``, and for ``--fp4-gemm-backend auto`` those
    of every other backend that can, in the order of ``auto``. None changes what is computed: for a W4A4 layer, all
    quantise the input as the default does, or all keep it as the default does."""
    resolution = fp4_utils.get_fp4_gemm_resolution()
    types = [type(default)]
    if resolution is None or resolution.requested == "auto":
        others = dict.fromkeys([*fp4_utils.candidates(target), *backends().values()])
        keeps = None if target.weight_only else types[0].keeps_activations
        types += [
            other
            for other in others
            if other not in types
            and keeps in (None, other.keeps_activations)
            and other.unsupported_reason(target) is None
        ]
    return [variant for backend in types for variant in backend.variants(target)]


class _Message(msgspec.Struct):
    """What rank 0 tells the others about a product; ``error`` ends the start on every rank."""

    product: str = ""
    measurement: Measurement | None = None
    error: str | None = None


class Autotuner:
    """The choices of one process.

    Args:
        mode: the flag's value: "on" measures what is not known, "cached" uses what an earlier run has measured, "off"
            does neither.
        device: where the products are computed.
        max_rows: most rows that a call is expected to have.
        tp: ranks that must agree. Rank 0 reads the cache and measures.
    """

    def __init__(
        self, mode: str, device: torch.device, max_rows: int = MAX_ROWS, tp: TensorParallelGroup = SINGLE
    ) -> None:
        self.mode, self.device, self.tp = mode, device, tp
        self.rows = [1 << index for index in range((min(max_rows, MAX_ROWS) - 1).bit_length() + 1)]
        self.products: dict[str, Measurement | None] = {}  # None: could not be measured
        self.dropped: dict[str, str] = {}
        self._cache: TuningCache | None = None
        self._measuring = False
        self._began = False
        self._used: dict[str, bool] = {}  # products of installed layers: whether their choice was measured
        self._libraries: set[type[Fp4GemmBackend]] = set()
        self._seconds, self._measured = 0.0, 0

    # ------------------------------------------------------------------------------------------------ the whole model
    @contextmanager
    def active(self, measure: bool) -> Iterator[None]:
        """While a model is loaded: its layers take their backends from here. All ranks do the same.

        Args:
            measure: whether mode "on" may measure: not while a server that is serving replaces its weights.
        """
        if self.mode == "off":
            yield
            return
        if not self._began:
            self._began = True
            self._read()
        self._measuring = measure and self.mode == "on"
        self._used, self._seconds, self._measured = {}, 0.0, 0
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)
        self._load_tactics()
        self._report()

    def _read(self) -> None:
        folder = envs.SGLANG_CACHE_DIR.get() / "fp4_autotune"
        known: dict[str, Measurement] = {}
        if self.mode == "on" or has_files(folder):
            self._cache = TuningCache(folder, current_stamp(self.device, self._candidates()))
            if self.tp.rank == 0:
                known = self._cache.read()
                if self.mode == "on":
                    # A library that could not download or compile something may have it now.
                    known = {product: found for product, found in known.items() if not found.raised}
                    self._cache.write({})  # says now whether it can
        received = self.tp.broadcast_bytes(msgspec.json.encode(known))
        for product, measurement in msgspec.json.decode(received, type=dict[str, Measurement]).items():
            self._keep(product, measurement)

    def _keep(self, product: str, measurement: Measurement | None) -> None:
        self.products[product] = measurement
        for label, problem in measurement.dropped.items() if measurement is not None else ():
            if label not in self.dropped:
                self.dropped[label] = problem
                if self.tp.rank == 0:
                    logger.warning(
                        "FP4 GEMM autotune: %s is not used: with %s %s; `python -m sglang.verify_fp4` says more",
                        label, product, problem,
                    )  # fmt: skip

    def _candidates(self) -> str:
        resolution = fp4_utils.get_fp4_gemm_resolution()
        if resolution is not None and resolution.requested != "auto":
            return resolution.name
        missing = fp4_utils.unsupported_reasons(Target.current(self.device))
        return "auto: " + ", ".join(name for name in backends() if missing[name] is None)

    def _load_tactics(self) -> None:
        """What libraries have found out about their own kernels, on rank 0 or earlier, is in force from here on."""
        if self._cache is None:
            return
        for backend in self._libraries:
            try:
                with backend.tuning(self._cache.file, measure=False):
                    pass
            except Exception as error:
                logger.warning("FP4 GEMM autotune: %s can't read its own measurements: %s", backend.name, error)

    def _report(self) -> None:
        known = sum(self._used.values())
        if self.tp.rank != 0 or self._cache is None or not (known or self._measured):
            return
        text = [f"{self._measured} products measured in {self._seconds:.1f} s"] if self._measured else []
        text += [f"{known - self._measured} products as measured before"] if known > self._measured else []
        text += [f"{len(self._used) - known} not measured, with the default"] if known < len(self._used) else []
        logger.info("FP4 GEMM autotune: %s (%s)", ", ".join(text), self._cache.file)

    # --------------------------------------------------------------------------------------------------- one product
    def by_rows(self, weight: NvFp4Weight, target: Target, name: str, default: Fp4GemmBackend) -> list[Fp4GemmBackend]:
        """The backends for layer ``name``, as :class:`NvFp4Linear` takes them.

        Raises:
            StartupError: the backend that was named computes wrong numbers, or none computes right ones.
        """
        product = weight.product
        candidates = candidates_for(target, default)
        if self._measuring:
            # Rank 0's product is everyone's: a head's last rank may have fewer rows.
            product = self._agreed(product, weight, name, candidates)
        found = self.products.get(product)
        by_label = {candidate.label: candidate for candidate in candidates}
        usable = found is not None and len(found.choices) >= len(self.rows) and by_label.keys() >= set(found.choices)
        self._used[product] = usable
        if found is not None and usable:
            labels = found.choices[: len(self.rows)]
            chosen = [by_label[label] for label in (labels if len(set(labels)) > 1 else labels[:1])]
        else:
            chosen = [next((one for one in candidates if one.label not in self.dropped), default)]
        self._libraries |= {type(backend) for backend in chosen}
        return chosen

    def _agreed(self, product: str, weight: NvFp4Weight, name: str, candidates: list[Fp4GemmBackend]) -> str:
        """Look up or measure a product on rank 0, and tell every rank what came out."""
        message, failure = _Message(), None
        if self.tp.rank == 0:
            try:
                message = _Message(product, self._found(product, weight, name, candidates))
            except Exception as error:  # the others wait for this message
                message, failure = _Message(error=str(error) or type(error).__name__), error
        message = msgspec.json.decode(self.tp.broadcast_bytes(msgspec.json.encode(message)), type=_Message)
        if failure is not None:
            raise failure
        if message.error is not None:
            raise StartupError(message.error)
        self._keep(message.product, message.measurement)
        return message.product

    def _found(
        self, product: str, weight: NvFp4Weight, name: str, candidates: list[Fp4GemmBackend]
    ) -> Measurement | None:
        known = self.products.get(product)
        if product in self.products and (known is None or len(known.choices) >= len(self.rows)):
            return known
        from sglang.srt.layers.quantization.fp4_autotune_measure import measure  # needs what a loaded layer needs not

        assert self._cache is not None
        started = time.perf_counter()
        # Ranks that share an input would have to multiply at the same time.
        weight = replace(weight, input_ranks=SINGLE)
        try:
            file = self._cache.file if self._cache.writable else None
            measurement = measure(weight, name, candidates, self.rows, self.dropped, file)
        except torch.OutOfMemoryError:
            logger.warning("FP4 GEMM autotune: not enough memory to measure %s; it uses the default", product)
            measurement = None
            release_unused_memory(self.device)
        self._seconds += time.perf_counter() - started
        if measurement is not None:
            self._measured += 1
            self._cache.write({product: measurement})
        return measurement


_current: ContextVar[Autotuner | None] = ContextVar("fp4_autotuner", default=None)


def backends_for(weight: NvFp4Weight, target: Target, name: str) -> list[Fp4GemmBackend]:
    """What multiplies layer ``name``, as :class:`NvFp4Linear` takes it.

    Raises:
        StartupError: see :func:`backend_for_layer` and :meth:`Autotuner.by_rows`.
    """
    default = fp4_utils.backend_for_layer(target, name)
    tuner = _current.get()
    return [default] if tuner is None else tuner.by_rows(weight, target, name, default)
