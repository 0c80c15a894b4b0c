r"""Faults that a server has to survive, measured: every row is a figure and the bound that it has to keep.

    python benchmark/reliability --model-path "$(python -m sglang.demo_model)" \
        --output benchmark/results/reliability.json

Starts real servers, one after another, and treats them badly. ``--checks`` takes some of the checks by name, ``--list``
names them. The soak takes ``--minutes``; what else there is takes about ten on two cores. Exits with status 1 if a row
is not ok.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import check_caches
import check_crowd
import check_grammars
import check_lifecycle
import check_memory
import check_odd
import check_secrets
from rows import Row
from servers import ROOT, Setup

CHECKS: dict[str, Callable[[Setup], Iterator[Row]]] = {
    "fuzz": check_odd.fuzz,
    "odd": check_odd.odd,
    "crowd": check_crowd.crowd,
    "queue": check_lifecycle.queue_full,
    "scheduler-killed": check_lifecycle.scheduler_killed,
    "server-killed": check_lifecycle.server_killed,
    "sigterm": check_lifecycle.sigterm,
    "kv-exhausted": check_memory.kv_exhausted,
    "caches": check_caches.caches_unusable,
    "shared-caches": check_caches.caches_shared,
    "grammars": check_grammars.grammars,
    "secrets": check_secrets.secrets,
    "soak": check_memory.soak,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    fixture = ROOT / "tests" / "fixtures" / "tiny-llama-modelopt-w4a16"
    parser.add_argument("--model-path", type=Path, default=fixture)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--minutes", type=float, default=30.0, help="of the soak")
    parser.add_argument("--requests", type=int, default=500, help="of the crowd")
    parser.add_argument("--checks", type=lambda text: text.split(","), default=list(CHECKS), metavar="NAME,NAME")
    parser.add_argument("--list", action="store_true", help="name the checks")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--server-flag", action="append", default=[], help="for every server, such as --page-size=16")
    args = parser.parse_args()
    if args.list:
        print(*CHECKS, sep="\n")
        return
    if unknown := set(args.checks) - set(CHECKS):
        parser.error(f"no checks {sorted(unknown)}; there are {', '.join(CHECKS)}")
    setup = Setup(args.model_path, args.device, args.minutes, args.requests, tuple(args.server_flag))
    rows: list[Row] = []
    began = time.monotonic()
    for name in args.checks:
        start = time.monotonic()
        for row in CHECKS[name](setup):
            rows.append(row)
            print(f"{'ok ' if row.ok else 'NOT'} {row.check}: {row.figure:.4g} {row.unit} - {row.what}", flush=True)
        print(f"    ({name}: {time.monotonic() - start:.0f} s)", flush=True)
    if args.output is not None:
        report = {
            "model": args.model_path.name,
            "device": args.device,
            "cpu": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "seconds": round(time.monotonic() - began),
            "rows": [row.as_dict() for row in rows],
        }
        args.output.write_text(json.dumps(report, indent=1) + "\n")
    failed = sum(not row.ok for row in rows)
    print(f"{len(rows)} rows, {failed} not ok")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
