"""``python -m sglang.check_env [--json]``: what is installed, what the machine has, which FP4 backends run on it."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib import metadata
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import sglang
from sglang.srt.environ import envs
from sglang.srt.errors import ArgumentError, StartupError
from sglang.srt.layers.quantization.fp4_utils import (
    Target,
    backends,
    resolve_fp4_gemm_backend,
    unsupported_reasons,
)
from sglang.srt.platforms import available_memory, device_capability, device_name, resolve_device, total_memory
from sglang.srt.utils.cli import ArgumentParser, run_main

_DISTRIBUTIONS = (
    "transformers",
    "flashinfer-python",
    "nvidia-cudnn-cu12",
    "nvidia-cudnn-cu13",
    "nvidia-cudnn-frontend",
    "nvidia-cutlass-dsl",
)


def versions() -> dict[str, str | None]:
    """Version of everything that decides what runs here; None for what is absent."""
    cudnn = torch.backends.cudnn.version()
    found: dict[str, str | None] = {
        "sglang-nvfp4": sglang.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "CUDA (of torch)": torch.version.cuda,
        "NVIDIA driver": _driver_version(),
        "cuDNN (loaded)": None if cudnn is None else f"{cudnn // 10000}.{cudnn // 100 % 100}.{cudnn % 100}",
    }
    for name in _DISTRIBUTIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def _driver_version() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(output.split()), None)


def devices() -> list[dict[str, Any]]:
    """Every device, GPUs first; memory in bytes."""
    names = [f"cuda:{index}" for index in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    found = []
    for name in [*names, "cpu"]:
        device = resolve_device(name)
        found.append(
            {
                "device": name,
                "name": device_name(device),
                "capability": device_capability(device),
                "memory_total": total_memory(device),
                "memory_available": available_memory(device),
            }
        )
    return found


def fp4_report(target: Target, flag: str, env_value: str | None) -> dict[str, Any]:
    """What each FP4 backend says about ``target``, and what is chosen there.

    ``error`` is the text with which the server would refuse to start, None if it would start.
    """
    w4a4 = unsupported_reasons(replace(target, weight_only=False))
    weight_only = unsupported_reasons(replace(target, weight_only=True))
    report: dict[str, Any] = {
        "target": str(target),
        "flag": flag,
        "environment": env_value,
        "backends": [
            {"name": name, "aliases": list(backend.aliases), "w4a4": w4a4[name], "weight_only": weight_only[name]}
            for name, backend in backends().items()
        ],
        "auto": {
            "w4a4": resolve_fp4_gemm_backend("auto", None, replace(target, weight_only=False)).name,
            "weight_only": resolve_fp4_gemm_backend("auto", None, replace(target, weight_only=True)).name,
        },
        "resolution": None,
        "warnings": [],
        "error": None,
    }
    try:
        resolution = resolve_fp4_gemm_backend(flag, env_value, target)
        report |= {"resolution": resolution.as_dict(), "warnings": list(resolution.warnings)}
    except StartupError as error:
        report["error"] = str(error)
    return report


def collect(device: str | None, flag: str) -> dict[str, Any]:
    """The whole report as JSON-compatible values.

    Raises:
        ArgumentError: there is no such device.
    """
    target = Target.current(resolve_device(device))
    return {
        "versions": versions(),
        "devices": devices(),
        "fp4_gemm": fp4_report(target, flag, envs.SGLANG_FLASHINFER_FP4_GEMM_BACKEND.get()),
    }


def print_report(report: dict[str, Any], console: Console) -> None:
    """Show :func:`collect`'s result as tables."""
    table = Table("package", "version", title="Versions", title_justify="left")
    for name, version in report["versions"].items():
        table.add_row(name, version or "[dim]none[/dim]")
    console.print(table)

    table = Table("device", "name", "capability", "memory, GiB (free)", title="Devices", title_justify="left")
    for device in report["devices"]:
        capability = ".".join(map(str, device["capability"] or ())) or "-"
        total, free = (device[key] / 2**30 for key in ("memory_total", "memory_available"))
        table.add_row(device["device"], escape(device["name"]), capability, f"{total:.1f} ({free:.1f})")
    console.print(table)

    fp4 = report["fp4_gemm"]
    title = f"FP4 GEMM backends on {fp4['target']}"
    table = Table("--fp4-gemm-backend", "W4A4", "weight-only", title=title, title_justify="left")
    for backend in fp4["backends"]:
        verdicts = [escape(backend[kind] or "runs") for kind in ("w4a4", "weight_only")]
        if verdicts[0] == verdicts[1]:
            verdicts[1] = "[dim]the same[/dim]"
        table.add_row(backend["name"], *verdicts)
    table.add_section()
    table.add_row("auto takes", fp4["auto"]["w4a4"], fp4["auto"]["weight_only"])
    console.print(table)
    for warning in fp4["warnings"]:
        console.print(f"warning: {warning}", markup=False, soft_wrap=True)
    if fp4["resolution"]:
        chosen = fp4["resolution"]
        origin = "" if chosen["source"] == "default" else f" (from {chosen['source']})"
        text = f"A server started now asks for {chosen['requested']}{origin} and gets {chosen['resolved']}."
        console.print(text, markup=False, soft_wrap=True)


def run(argv: Sequence[str] | None = None) -> None:
    """Print the report; exit status 2 if the chosen FP4 backend could not be used here."""
    parser = ArgumentParser("python -m sglang.check_env", "What is installed and which FP4 GEMM backends run here.")
    parser.add_argument("--json", action="store_true", help="Print one JSON object.")
    parser.add_argument("--device", default=None, help="cpu, cuda or cuda:N. Default: cuda if there is a usable GPU.")
    parser.add_argument("--fp4-gemm-backend", default="auto", help="Explain what the server would do with this flag.")
    options = parser.parse_args(argv)
    report = collect(options.device, options.fp4_gemm_backend)
    if options.json:
        json.dump(report, sys.stdout, indent=2)
        print()
    else:
        print_report(report, Console())
    if report["fp4_gemm"]["error"]:
        raise ArgumentError(report["fp4_gemm"]["error"])


def main() -> None:
    """Entry point of the command ``sglang-check-env``."""
    run_main(run)


if __name__ == "__main__":
    main()
