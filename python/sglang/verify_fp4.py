"""``python -m sglang.verify_fp4``: every FP4 GEMM backend that can run here, held against the exact product.

The first thing to run on a new GPU. Exit status 0: all right; 1: a backend is wrong or failed; 2: a bad argument, or a
named backend that can't run here. What is compared, and how far off is still right, is in
:mod:`sglang.srt.layers.quantization.fp4_verify`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from math import isfinite
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from tqdm import tqdm

from sglang.srt.errors import ArgumentError
from sglang.srt.layers.quantization.fp4_utils import Target, backends, normalize_backend_name
from sglang.srt.layers.quantization.fp4_verify import Layer, random_layers
from sglang.srt.layers.quantization.fp4_verify_run import DeviceLostError, Row, Verification
from sglang.srt.layers.quantization.nvfp4 import Activation
from sglang.srt.platforms import device_name, resolve_device
from sglang.srt.utils.cli import ArgumentParser, run_main
from sglang.srt.utils.versions import versions

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
# By default, what models run in; the first one is the usual one.
DEFAULT_DTYPES = {"cpu": ("float32", "bfloat16"), "cuda": ("bfloat16", "float16", "float32")}
ROWS = (0, 1, 7, 16, 129, 1000)
# N that is aligned to nothing, a K shorter than any tile, a K that is a multiple of 16 only; then, in the first dtype
# alone, sizes at which speed means something.
ODD_SHAPES = ((1000, 48), (520, 3696))
SPEED_SHAPES = {"cpu": ((1024, 2048),), "cuda": ((4096, 4096), (28672, 4096))}
# By default a CPU is spared batches of more multiplications, and memory of any device more outputs (in float64, often).
MAX_CPU_WORK = 3e8
MAX_OUTPUTS = 1 << 25
_SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}

Unsupported = dict[str, dict[str, str | None]]


def choose_backends(
    named: Sequence[str], device: torch.device, dtypes: Sequence[torch.dtype]
) -> tuple[list[str], Unsupported]:
    """The backends to run, and reason and fix of each that can't run here at all.

    Raises:
        ArgumentError: a named one is unknown or can't run; the text has the reason.
    """
    canonical = list(dict.fromkeys(normalize_backend_name(name, "--backend") for name in named))
    if "auto" in canonical:
        raise ArgumentError("--backend auto: name backends, or leave the flag out to run all that can")
    runnable, unsupported = [], Unsupported()
    for name, backend in backends().items():
        targets = [
            replace(Target.current(device, dtype), weight_only=kind) for dtype in dtypes for kind in (False, True)
        ]
        if any(backend.unsupported_reason(target) is None for target in targets):
            runnable.append(name)
        else:
            unsupported[name] = {"reason": backend.unsupported_reason(targets[0]), "fix": backend.fix(targets[0])}
    for name in canonical:
        if name in unsupported:
            raise ArgumentError(f"--backend {name} can't run here: {_why(unsupported[name])}")
    return [name for name in runnable if not canonical or name in canonical], unsupported


def _why(entry: dict[str, str | None]) -> str:
    return f"{entry['reason']}" + (f"; to change that: {entry['fix']}" if entry["fix"] else "")


def layers(options: argparse.Namespace, device: torch.device, dtypes: Sequence[str]) -> Iterator[Layer]:
    """What to verify: layers of the model, or random ones."""
    for dtype in dtypes:
        if options.model_path is None:
            shapes = options.shapes or (ODD_SHAPES if dtype != dtypes[0] else ODD_SHAPES + SPEED_SHAPES[device.type])
            for n, k in shapes:
                yield from random_layers(n, k, DTYPES[dtype], torch.Generator(device).manual_seed(options.seed))
            continue
        from sglang.srt.model_loader.nvfp4_layers import distinct_layers  # imports transformers, which takes seconds
        from sglang.srt.server_args import ServerArgs

        arguments: dict[str, Any] = {"model_path": options.model_path, "device": device.type, "dtype": dtype}
        for layer in distinct_layers(ServerArgs(**arguments), device):
            weight = layer.weight
            if weight.activation is not Activation.NONE and weight.pre_quant_scale is None:
                yield Layer(layer.name, weight, layer.bias, on_grid=True)
            yield Layer(layer.name, weight, layer.bias, on_grid=False)


def _batch_sizes(options: argparse.Namespace, device: torch.device, layer: Layer) -> list[int]:
    if options.rows:
        return list(options.rows)
    outputs, work = layer.weight.out_features, layer.weight.out_features * layer.weight.in_features
    sizes = [rows for rows in ROWS if rows <= 16 or rows * outputs <= MAX_OUTPUTS]
    return [rows for rows in sizes if rows <= 16 or device.type != "cpu" or rows * work <= MAX_CPU_WORK]


def verify(options: argparse.Namespace) -> dict[str, Any]:
    """Run what ``options`` (the command line's) ask for; the report of ``--json``.

    Raises:
        ArgumentError: an argument can't be used here.
        CheckpointError: ``--model-path`` can't be loaded.
    """
    started = time.perf_counter()
    device = resolve_device(options.device)
    dtypes: Sequence[str] = DEFAULT_DTYPES[device.type]
    if options.dtype is not None:
        dtypes = tuple(DTYPES) if options.dtype == "all" else (options.dtype,)
    names, unsupported = choose_backends(options.backend, device, [DTYPES[dtype] for dtype in dtypes])
    if options.dtype is None and options.model_path is not None:
        dtypes = ("auto",)
    work, lost = Verification(device, names, options.seed), None
    with tqdm(desc="Verifying", unit="row", disable=None) as progress:

        def on_row(description: str) -> None:
            progress.set_postfix_str(description)
            progress.update()

        try:
            for layer in layers(options, device, dtypes):
                work.run(layer, _batch_sizes(options, device, layer), on_row)
        except DeviceLostError as error:
            lost = f"{error}. Nothing could run after the last row; name other backends with --backend to verify them"
    ran = {row.backend.partition("/")[0] for row in work.rows}
    for name in names:
        if name not in ran and lost is None:
            reason = " and ".join(work.skipped[name])
            if options.backend:
                raise ArgumentError(f"--backend {name} takes none of these layers: {reason}")
            unsupported[name] = {"reason": reason, "fix": None}
    return {
        "versions": versions(),
        "device": device_name(device),
        "target": str(Target.current(device)),
        "seconds": time.perf_counter() - started,
        "rows": [
            _jsonable(row) for row in sorted(work.rows, key=lambda row: names.index(row.backend.partition("/")[0]))
        ],
        "skipped": {name: dict(reasons) for name, reasons in work.skipped.items() if name in ran},
        "unsupported": unsupported,
        "device_lost": lost,
        "ok": lost is None and all(row.ok for row in work.rows),
    }


def _jsonable(row: Row) -> dict[str, Any]:
    """NaN and infinity, which JSON lacks, are as good as no number."""
    fields = asdict(row)
    return {key: None if isinstance(value, float) and not isfinite(value) else value for key, value in fields.items()}


def print_report(report: dict[str, Any], console: Console) -> None:
    """Show :func:`verify`'s result: a table, a line for each backend, and the sum of it."""
    rows, installed = report["rows"], report["versions"]
    about = [f"{name} {installed[name]}" for name in ("torch", "flashinfer-python", "NVIDIA driver") if installed[name]]
    console.print(f"{report['device']} ({report['target']}), {', '.join(about)}", markup=False, soft_wrap=True)
    title = "FP4 GEMM backends against the exact product"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    named = any(row["layer"] != f"{row['n']}x{row['k']}" for row in rows)
    for header in ("backend", *(("layer",) if named else ()), "kind"):
        table.add_column(header)
    for header in ("M", "N", "K", "dtype", "error", "bound", "max abs", "us", "TFLOP/s", "GB/s", "x F.linear"):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("verdict", min_width=20)
    for index, row in enumerate(rows):
        if index and rows[index - 1]["backend"] != row["backend"]:
            table.add_section()
        numbers = [
            "-" if row[key] is None else format(row[key], style)
            for key, style in (
                ("error", ".1e"), ("bound", ".1e"), ("max_abs", ".1e"), ("microseconds", ".1f"), ("tflops", ".3g"),
                ("gb_per_s", ".3g"), ("speedup", ".2f"),
            )
        ]  # fmt: skip
        shape = (str(row[key]) for key in "mnk")
        verdict = row["verdict"] if row["verdict"] == "ok" else f"[red]{escape(row['verdict'])}[/red]"
        names = (row["backend"], *((escape(row["layer"]),) if named else ()), row["kind"])
        table.add_row(*names, *shape, _SHORT[row["dtype"]], *numbers, verdict)
    console.print(table)
    for name in dict.fromkeys(row["backend"] for row in rows):
        own = [row["verdict"] == "ok" for row in rows if row["backend"] == name]
        skipped = report["skipped"].get(name.partition("/")[0], {})
        rest = "".join(f"; {count} not taken: {reason}" for reason, count in skipped.items())
        console.print(f"{name}: {sum(own)} of {len(own)} ok{rest}", markup=False, soft_wrap=True)
    for name, entry in report["unsupported"].items():
        console.print(f"{name}: can't run here: {_why(entry)}", markup=False, soft_wrap=True)
    if report["device_lost"]:
        console.print(f"the device failed: {report['device_lost']}", markup=False, soft_wrap=True)
    wrong = sum(row["verdict"] != "ok" for row in rows)
    verdict = "All right" if report["ok"] else f"{wrong} WRONG"
    console.print(f"{verdict}: {len(rows)} rows in {report['seconds']:.1f} s", markup=False, soft_wrap=True)


# ---------------------------------------------------------------------------------------------------- command line
def _rows(text: str) -> list[int]:
    try:
        rows = [int(part) for part in text.split(",")]
    except ValueError:
        rows = [-1]
    if min(rows) < 0:
        raise ArgumentError(f"--rows {text}: expected numbers of rows, 0 or more, for example 1,16,1000")
    return rows


def _shapes(text: str) -> list[tuple[int, int]]:
    shapes = []
    for part in text.split(","):
        n, _, k = part.partition("x")
        if not (n.isdigit() and k.isdigit() and int(n) and int(k)) or int(k) % 16:
            raise ArgumentError(f"--shapes {part}: expected NxK with K a multiple of 16, for example 4096x4096,1000x48")
        shapes.append((int(n), int(k)))
    return shapes


def run(argv: Sequence[str] | None = None) -> int:
    """Verify and print; the exit status 0 or 1.

    Raises:
        ArgumentError: a bad argument, or a named backend that can't run here (exit status 2).
    """
    parser = ArgumentParser("python -m sglang.verify_fp4", "Hold the FP4 GEMM backends against the exact product.")
    add = parser.add_argument
    add("--backend", nargs="+", action="extend", default=[], metavar="NAME", help="Default: every one that can run.")
    add("--model-path", metavar="M", help="Verify the distinct NVFP4 layers of this model: folder or hub id.")
    add("--shapes", type=_shapes, metavar="NxK,...", help="Layers of random weights. Default: odd ones and large ones.")
    add("--rows", type=_rows, metavar="M,...", help=f"Default: {', '.join(map(str, ROWS))}, as far as a CPU is fast.")
    usual = "; ".join(f"on {device} {', '.join(dtypes)}" for device, dtypes in DEFAULT_DTYPES.items())
    add("--dtype", choices=(*DTYPES, "all"), help=f"Of inputs and outputs. Default: a model's own; else {usual}.")
    add("--device", help="cpu, cuda or cuda:N. Default: cuda if there is a usable GPU.")
    add("--seed", type=int, default=0, help="Of weights and inputs. Default: 0.")
    add("--json", action="store_true", help="Print one JSON object.")
    options = parser.parse_args(argv)
    if options.model_path is not None and options.shapes:
        raise ArgumentError("--shapes and --model-path: give one of them")
    report = verify(options)
    if options.json:
        json.dump(report, sys.stdout, indent=2)
        print()
    else:
        # A table that is piped or written to a file needs its full width.
        print_report(report, Console() if sys.stdout.isatty() else Console(width=200))
    return 0 if report["ok"] else 1


def main() -> None:
    """Entry point of ``python -m sglang.verify_fp4``."""
    run_main(lambda: sys.exit(run()))


if __name__ == "__main__":
    main()
