"""``python -m sglang.check_env [--json]``: what is installed, what the machine has, which backends run on it."""

from __future__ import annotations

import glob
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sglang.kernels.cpu_extension import isas
from sglang.srt.environ import envs
from sglang.srt.errors import ArgumentError, StartupError
from sglang.srt.layers.attention.attention_registry import attention_backends, unsupported_reasons
from sglang.srt.layers.attention.base_attn_backend import AttentionTarget
from sglang.srt.layers.quantization.fp4_utils import (
    Target,
    backends,
    resolve_fp4_gemm_backend,
)
from sglang.srt.platforms import available_memory, device_capability, device_name, resolve_device, total_memory
from sglang.srt.utils.cli import ArgumentParser, run_main
from sglang.srt.utils.versions import versions

# Below SGLANG_CACHE_DIR.
AUTOTUNE_FOLDER = "fp4_autotune"


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
                "instructions": isas()[0].name if device.type == "cpu" else None,
                "memory_total": total_memory(device),
                "memory_available": available_memory(device),
            }
        )
    return found


def _shown(folder: Path) -> str:
    """A report is made to be passed on: without the name of the user's home."""
    home = Path.home()
    return f"~/{folder.relative_to(home)}" if folder.is_relative_to(home) else str(folder)


def cache_report() -> dict[str, Any]:
    """Where files that can be made again are kept: whether that folder can be written (or made), and how many files of
    measured FP4 GEMM choices it has.

    Raises:
        ArgumentError: the variable that names the folder has a value that can't be used.
    """
    folder = envs.SGLANG_CACHE_DIR.get()
    # Not Path's methods, which raise below a folder that may not be searched.
    existing = next(path for path in (folder, *folder.parents) if os.path.exists(path))  # noqa: PTH110
    return {
        "path": _shown(folder),
        "writable": existing.is_dir() and os.access(existing, os.W_OK | os.X_OK),
        "fp4_autotune_files": len(glob.glob("*.json", root_dir=folder / AUTOTUNE_FOLDER)),  # noqa: PTH207
    }


def fp4_report(target: Target, flag: str, env_value: str | None) -> dict[str, Any]:
    """What each FP4 backend says about ``target``, and what is chosen there.

    A backend's ``fix`` is the command that removes the first reason that a command can remove. ``error`` is the text
    with which the server would refuse to start, None if it would start.
    """
    kinds = {"w4a4": replace(target, weight_only=False), "weight_only": replace(target, weight_only=True)}
    entries = []
    for name, backend in backends().items():
        reasons = {kind: backend.unsupported_reason(on) for kind, on in kinds.items()}
        fixes = [backend.fix(kinds[kind]) for kind, reason in reasons.items() if reason is not None]
        fix = next((command for command in fixes if command is not None), None)
        entries.append({"name": name, "aliases": list(backend.aliases), **reasons, "fix": fix})
    report: dict[str, Any] = {
        "target": str(target),
        "flag": flag,
        "environment": env_value,
        "backends": entries,
        "auto": {kind: resolve_fp4_gemm_backend("auto", None, on).name for kind, on in kinds.items()},
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


def attention_report(device: torch.device) -> dict[str, Any]:
    """What each attention backend says about a usual model on ``device``: bfloat16, heads of 128 values."""
    target = AttentionTarget(device, torch.bfloat16, torch.bfloat16, num_heads=32, num_kv_heads=8, head_dim=128)
    reasons = unsupported_reasons(target)
    entries = [{"name": name, "reason": reasons.get(name)} for name in attention_backends()]
    return {
        "target": str(target),
        "backends": entries,
        "auto": next(entry["name"] for entry in entries if entry["reason"] is None),
    }


def collect(device: str | None, flag: str) -> dict[str, Any]:
    """The whole report as JSON-compatible values.

    Raises:
        ArgumentError: there is no such device, or an environment variable has a value that can't be used.
    """
    resolved = resolve_device(device)
    target = Target.current(resolved)
    return {
        "versions": versions() | {"nvcc (for FlashInfer)": target.nvcc},
        "devices": devices(),
        "cache": cache_report(),
        "fp4_gemm": fp4_report(target, flag, envs.SGLANG_FLASHINFER_FP4_GEMM_BACKEND.get()),
        "attention": attention_report(resolved),
    }


def print_report(report: dict[str, Any], console: Console) -> None:
    """Show :func:`collect`'s result as tables."""
    table = Table("package", "version", title="Versions", title_justify="left")
    for name, version in report["versions"].items():
        table.add_row(name, version or "[dim]none[/dim]")
    console.print(table)

    table = Table("device", "name", "capability", "memory, GiB (free)", title="Devices", title_justify="left")
    for device in report["devices"]:
        capability = device["instructions"] or ".".join(map(str, device["capability"]))
        total, free = (device[key] / 2**30 for key in ("memory_total", "memory_available"))
        table.add_row(device["device"], escape(device["name"]), capability, f"{total:.1f} ({free:.1f})")
    console.print(table)

    cache = report["cache"]
    state = "" if cache["writable"] else ", which can't be written"
    text = f"Cache folder: {cache['path']}{state}; files of measured FP4 GEMM choices: {cache['fp4_autotune_files']}"
    console.print(text, markup=False, soft_wrap=True)

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
    for backend in fp4["backends"]:
        if backend["fix"]:
            console.print(f"To have {backend['name']}: {backend['fix']}", markup=False, soft_wrap=True)
    for warning in fp4["warnings"]:
        console.print(f"warning: {warning}", markup=False, soft_wrap=True)
    if fp4["resolution"]:
        chosen = fp4["resolution"]
        origin = "" if chosen["source"] == "default" else f" (from {chosen['source']})"
        text = f"A server started now asks for {chosen['requested']}{origin} and gets {chosen['resolved']}."
        console.print(text, markup=False, soft_wrap=True)

    attention = report["attention"]
    title = f"Attention backends on {attention['target']}"
    table = Table("--attention-backend", "", title=title, title_justify="left")
    for backend in attention["backends"]:
        table.add_row(backend["name"], escape(backend["reason"] or "runs"))
    table.add_section()
    table.add_row("auto takes", attention["auto"])
    console.print(table)


def run(argv: Sequence[str] | None = None) -> None:
    """Print the report; exit status 2 if the chosen FP4 backend could not be used here."""
    parser = ArgumentParser("python -m sglang.check_env", "What is installed and which backends run here.")
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
