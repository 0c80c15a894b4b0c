"""The backends that can multiply one product, held against the exact result and against each other's times.

A layer is prepared in one layout, so candidates compete in groups that share one. The default is always a candidate and
wins ties: what is chosen is never slower.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from tqdm import tqdm

from sglang.srt.errors import StartupError
from sglang.srt.layers.quantization import fp4_utils
from sglang.srt.layers.quantization.fp4_autotune_cache import FLAG, Measurement
from sglang.srt.layers.quantization.fp4_autotune_timing import CaptureError, Probe, copies_needed, seconds_per_call
from sglang.srt.layers.quantization.fp4_utils import Fp4GemmBackend
from sglang.srt.layers.quantization.nvfp4_linear import NvFp4Linear, NvFp4Weight

# What differs by less is a tie.
NOISE = 0.03
# A candidate that takes this many times the best one's time is not timed more exactly.
HOPELESS = 2.0
_RAISED = "it raised "

Layout = tuple[str, int, int, bool]


def layout_of(backend: Fp4GemmBackend) -> Layout:
    """Backends for which it is the same can multiply with the same :class:`NvFp4Linear`."""
    return (backend.layout, backend.in_multiple, backend.out_multiple, backend.per_column_scale)


def choose(times: Mapping[str, Sequence[float]], layouts: Mapping[str, Layout], default: str) -> list[str]:
    """The label to use for each number of rows: all of one layout, and none slower than ``default``.

    Another layout than the default's must have, for every number of rows, something that is not slower, and be faster
    on the whole: in the sum, over numbers of rows, of its time relative to the default's.

    Args:
        times: label to the time of one call for each number of rows, the same numbers for all.
        layouts: label to layout.
        default: the label that wins ties.
    """
    reference = times[default]
    best: list[str] = []
    best_cost = float("inf")
    groups = dict.fromkeys(layouts[label] for label in times)
    for layout in sorted(groups, key=lambda layout: layout != layouts[default]):
        labels = [label for label in times if layouts[label] == layout]
        chosen = []
        for index, of_default in enumerate(reference):
            of_fastest, fastest = min((times[label][index], label) for label in labels)
            tie = default in labels and of_default <= of_fastest * (1 + NOISE)
            chosen.append(default if tie else fastest)
        relative = [times[label][index] / reference[index] for index, label in enumerate(chosen)]
        if max(relative) <= 1 + NOISE and sum(relative) * (1 + NOISE) < best_cost:
            best, best_cost = chosen, sum(relative)
    return best


@torch.no_grad()
def measure(
    weight: NvFp4Weight,
    name: str,
    candidates: Sequence[Fp4GemmBackend],
    rows: Sequence[int],
    dropped: Mapping[str, str],
    cache: Path | None,
) -> Measurement:
    """Compare ``candidates``, the default first, on the weight of layer ``name`` for each number of ``rows``. If the
    layer is W4A4, all of them quantise its input or all keep it.

    Args:
        dropped: label to what was wrong with it for another product; such a candidate is not tried again.
        cache: file beside which libraries keep their own measurements; None: nowhere.

    Raises:
        StartupError: the backend that the user has named fails or computes wrong numbers, or every candidate does, or
            one has left the process in a state in which it can't serve.
        OutOfMemoryError: of the GPU.
    """
    layer = f"layer {name} ({weight.product})"
    labels = [candidate.label for candidate in candidates]
    candidates = [candidate for candidate in candidates if candidate.label not in dropped]
    layouts = {candidate.label: layout_of(candidate) for candidate in candidates}
    probe = Probe.make(weight, max(rows), any(candidate.keeps_activations for candidate in candidates))
    right: list[Fp4GemmBackend] = []
    times: dict[str, list[float]] = {}
    problems: dict[str, str] = {}
    timing: dict[str, str] = {}
    compare = len(candidates) > 1
    with tqdm(total=len(candidates), desc=f"FP4 GEMM autotune, {weight.product}", leave=False, disable=None) as bar:
        for layout in dict.fromkeys(layouts.values()):
            linears: list[NvFp4Linear] = []
            for candidate in (one for one in candidates if layouts[one.label] == layout):
                bar.set_postfix_str(candidate.label)
                try:
                    linears = [linear.shared_with(candidate) for linear in linears] or _copies(
                        weight, candidate, compare
                    )
                    with candidate.tuning(cache, measure=True):
                        problem = _problem(linears[0], probe, rows)
                    if problem is None and compare:
                        times[candidate.label], timing[candidate.label] = _times(linears, probe, rows, times)
                    if problem is None:
                        right.append(candidate)
                except torch.OutOfMemoryError:
                    raise
                except Exception as error:
                    problem = f"{_RAISED}{type(error).__name__}: {error}"
                    _check_process(error, probe.x.device, f"{layer}: FP4 GEMM backend {candidate.label}: {problem}")
                if problem is not None:
                    problems[candidate.label] = problem
                    _check_named(candidate, layer, problem)
                bar.update()
    if not right:
        listed = "; ".join(f"{label}: {problem}" for label, problem in {**dropped, **problems}.items())
        raise StartupError(f"{layer}: every FP4 GEMM backend fails here: {listed}")
    default = right[0]
    chosen = choose(times, layouts, default.label) if len(right) > 1 else [default.label] * len(rows)
    if set(chosen) != {default.label}:  # the default went first: perhaps before the clocks were up
        linears.clear()
        again, _ = _times(_copies(weight, default, compare), probe, rows, {})
        times[default.label] = [min(pair) for pair in zip(times[default.label], again, strict=True)]
        chosen = choose(times, layouts, default.label)
    in_microseconds = {label: [round(second * 1e6, 2) for second in values] for label, values in times.items()}
    raised = [label for label in labels if {**dropped, **problems}.get(label, "").startswith(_RAISED)]
    return Measurement(chosen, in_microseconds, timing, problems, raised)


def _copies(weight: NvFp4Weight, backend: Fp4GemmBackend, compare: bool) -> list[NvFp4Linear]:
    """As many as it takes to time it, or one."""
    first = NvFp4Linear(weight, backend)
    count = copies_needed(first.nbytes, first.device) if compare else 1
    return [first, *(NvFp4Linear(weight, backend) for _ in range(count - 1))]


def _problem(linear: NvFp4Linear, probe: Probe, rows: Sequence[int]) -> str | None:
    """What is wrong with the results, the largest first."""
    outputs = (linear(probe.x[:count]) for count in reversed(rows))
    return next((problem for y in outputs if (problem := probe.problem(y)) is not None), None)


def _times(
    linears: list[NvFp4Linear], probe: Probe, rows: Sequence[int], others: Mapping[str, Sequence[float]]
) -> tuple[list[float], str]:
    """Seconds for each number of rows, less exact where one of ``others`` is much faster; and how it was timed."""
    result, timing = [], ""
    for index, count in enumerate(rows):
        best = min((times[index] for times in others.values()), default=float("inf"))
        calls = [partial(linear, probe.x[:count]) for linear in linears]
        seconds, timing = seconds_per_call(calls, probe.x.device, HOPELESS * best)
        result.append(seconds)
    return result, timing


def _check_process(error: Exception, device: torch.device, what: str) -> None:
    """Some faults leave a process in which CUDA, or torch's use of it, does not work any more."""
    try:
        if isinstance(error, CaptureError):
            raise error
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except RuntimeError as fatal:
        raise StartupError(
            f"{what}; after that this process can't go on. Name another backend with {fp4_utils.FLAG}, or use {FLAG} "
            "off"
        ) from fatal


def _check_named(candidate: Fp4GemmBackend, layer: str, problem: str) -> None:
    """A backend that was asked for is not replaced by another."""
    resolution = fp4_utils.get_fp4_gemm_resolution()
    if resolution is not None and resolution.requested == candidate.name and not candidate.variant:
        raise StartupError(
            f"{layer}: {fp4_utils.FLAG} {candidate.name} can't be used: {problem}; `python -m sglang.verify_fp4` says "
            f"more, {fp4_utils.FLAG} auto takes another backend"
        )
