"""Logits of several tensor-parallel ranks against those of one, on the same random weights.

    python benchmark/bench_gpu_tp.py --output benchmark/results/h200_tp_logits.json
    python benchmark/bench_gpu_tp.py --device cpu --shape tiny

A bf16 checkpoint of ``--shape`` is written to a temporary folder and loaded by one rank and by ``--tp``, as it is and
quantised to ``w4a16_nvfp4`` while it loads; the logits behind a prompt of ``--tokens`` and behind each of 16 further
tokens are compared. ``error`` is the norm of a difference over the norm of the logits: ``one`` and ``several`` against
one rank in float32 (quantised: the exact ``torch`` backend), ``between`` of both against each other. Equal within the
rounding of bf16 means that ``several`` is hardly larger than ``one``: partial sums are rounded once more.
``same_best``: how often both choose the same token.

``--share-gpu`` gives all ranks the first GPU, slowly: each says to NCCL that it is a machine of its own (NCCL_HOSTID),
since NCCL takes a GPU only once of a machine. They then exchange what they would over a network.

How much faster several ranks are is measured by ``bench_gpu_steps.py --tp 1,2``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import torch
from bench_gpu_steps import Steps
from dummy_models import QUANTS, Shape, write_report, write_weights
from safetensors.torch import load_file, save_file

from sglang import __version__
from sglang.srt.entrypoints.scheduler_process import SchedulerProcesses
from sglang.srt.managers.io_struct import PortArgs
from sglang.srt.managers.scheduler_main import make_model_runner
from sglang.srt.platforms import device_name
from sglang.srt.server_args import ServerArgs

DECODED = 16


def run_rank(tokens: int, file: str, args: ServerArgs, port_args: PortArgs, writer: Connection, rank: int) -> None:
    """Body of a process; rank 0 writes float32 logits [1 + DECODED, vocabulary] to ``file``."""
    import time
    import traceback

    if args.nnodes > 1:
        os.environ["NCCL_HOSTID"] = f"node{args.node_rank}"
    try:
        runner = make_model_runner(args, port_args.rendezvous, rank, quiet=rank > 0)
        steps = Steps(runner, steps=DECODED)
        batch = steps.batch(1, tokens, computed=tokens)
        rows = []
        for i in range(1 + DECODED):
            batch.prepare_for_decode() if i else batch.prepare_for_extend()
            rows.append(runner.forward(batch.forward_batch).next_token_logits.float().clone())
            batch.input_ids = torch.full_like(batch.req_pool_indices, (37 * i) % 1000)
        if rank == 0:
            save_file({"logits": torch.cat(rows).cpu()}, file)
        writer.send({"status": "ready"})
    except Exception as error:
        traceback.print_exc()
        writer.send({"status": "error", "message": f"{type(error).__name__}: {error}"})
    time.sleep(600)  # until it is ended


async def logits(options: argparse.Namespace, folder: Path, tp: int, **arguments: Any) -> torch.Tensor:
    nnodes = tp if options.share_gpu else 1
    make_args = partial(
        ServerArgs.from_kwargs,
        model_path=str(folder),
        device=options.device,
        tp_size=tp,
        nnodes=nnodes,
        dist_init_addr="127.0.0.1:1" if nnodes > 1 else None,  # which nobody asks: ranks share a file
        random_seed=0,
        context_length=options.tokens + 256,
        max_total_tokens=2 * options.tokens + 512,
        max_running_requests=2,
        chunked_prefill_size=options.tokens,
        log_level="warning",
        **arguments,
    )
    port_args = PortArgs.create()
    port_args = msgspec.structs.replace(port_args, rendezvous=replace(port_args.rendezvous, nnodes=nnodes))
    with tempfile.TemporaryDirectory() as temporary:
        file = str(Path(temporary) / "logits.safetensors")
        run = partial(run_rank, options.tokens, file)
        nodes = [SchedulerProcesses(run, make_args(node_rank=node), port_args) for node in range(nnodes)]
        try:
            await asyncio.gather(*(node.ready() for node in nodes))
            return load_file(file)["logits"]
        finally:
            for node in nodes:
                node.stop(grace=0)
            port_args.remove()


def error(ours: torch.Tensor, reference: torch.Tensor) -> float:
    return float(f"{(ours - reference).norm() / reference.norm():.3e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--shape", type=Shape.parse, default=Shape.parse("llama-3.3-70b:2"))
    parser.add_argument("--quants", default=",".join(QUANTS))
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--share-gpu", action="store_true")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    machine = {"device": device_name(torch.device(options.device)), "torch": torch.__version__}
    report: dict[str, Any] = {"machine": {**machine, "sglang-nvfp4": __version__}, "rows": []}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_weights(folder, options.shape, options.device)
        for quant in options.quants.split(","):
            quantized = {} if quant == "bf16" else {"quantization": quant}
            exact = {**quantized, "dtype": "float32"}
            if quantized:
                exact["fp4_gemm_runner_backend"] = "torch"
            reference = asyncio.run(logits(options, folder, 1, **exact))
            one, several = (
                asyncio.run(logits(options, folder, tp, dtype="bfloat16", **quantized)) for tp in (1, options.tp)
            )
            row: dict[str, Any] = {"shape": options.shape.name, "quant": quant, "tp": options.tp}
            row |= {"tokens": options.tokens, "share_gpu": options.share_gpu}
            row |= {"one": error(one, reference), "several": error(several, reference), "between": error(several, one)}
            row["same_best"] = round(float((one.argmax(-1) == several.argmax(-1)).float().mean()), 4)
            report["rows"].append(row)
            print(json.dumps(row), flush=True)
    if options.output:
        write_report(options.output, report)


if __name__ == "__main__":
    main()
