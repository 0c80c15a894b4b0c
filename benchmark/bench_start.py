"""Time of a start on a GPU with backend w4a16: the kernels compiled, and then taken from the cache.

    python benchmark/bench_start.py --output benchmark/results/h200_start.json

A model of Llama-3.1-8B's shape with random weights (``--load-format dummy``; the script writes its configuration) is
started twice, each time in a new process, with caches (ours and NVRTC's own) that are empty the first time.
``kernels_s`` is what compiling or reading the kernels and loading them takes, ``start_s`` all from the first import to
a model that is ready.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from dummy_models import Shape, write_config


def start(folder: Path) -> dict[str, float]:
    """In this process."""
    first = time.perf_counter()
    import torch

    from sglang.kernels import w4a16
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.server_args import ServerArgs

    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    torch.zeros(1, device="cuda")
    context = time.perf_counter()
    w4a16.prepare(torch.bfloat16, 0)
    torch.cuda.synchronize()
    kernels = time.perf_counter()
    args = ServerArgs.from_kwargs(
        model_path=str(folder), load_format="dummy", fp4_gemm_runner_backend="w4a16", device="cuda"
    )
    ModelRunner(args, ModelConfig.from_server_args(args))
    torch.cuda.synchronize()
    end = time.perf_counter()
    times = {"imports_s": context - first, "kernels_s": kernels - context, "model_s": end - kernels}
    return {name: round(seconds, 2) for name, seconds in (times | {"start_s": end - first}).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="JSON file")
    parser.add_argument("--start", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.start:
        print(json.dumps(start(args.start)))
        return
    report: dict[str, object] = {"cpus": os.cpu_count()}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_config(folder, Shape.parse("llama-3.1-8b"), "w4a16_nvfp4")
        for name in ("cold", "warm"):
            done = subprocess.run(
                [sys.executable, __file__, "--start", temporary],
                env={**os.environ, "SGLANG_CACHE_DIR": str(folder / "cache"), "CUDA_CACHE_PATH": str(folder / "cuda")},
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
            report[name] = json.loads(done.stdout.splitlines()[-1])
            print(name, report[name], flush=True)
    if args.output:
        args.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
