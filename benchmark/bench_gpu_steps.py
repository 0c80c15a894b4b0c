"""Time of decode and prefill steps on a GPU, beside the least time that bytes and products would take.

    python benchmark/bench_gpu_steps.py --output benchmark/results/h200_steps.json
    python benchmark/bench_gpu_steps.py --shapes llama-3.3-70b:40 --output ...      # 40 of its layers
    python benchmark/bench_gpu_steps.py --tp 1,2 --shapes llama-3.3-70b:40 --output benchmark/results/h200_tp_steps.json
    python benchmark/bench_gpu_steps.py --device cpu --shapes tiny --prefill 64 --context 64 --batches 1,2 --steps 3

Weights are random (``--load-format dummy``); every shape and quantisation has a process of its own, one per rank.

decode: one token for each of ``--batches`` requests that have ``--context`` tokens, through batches as the scheduler
makes them and the model runner (graphs, sampling). ``ms`` is the time of a step while steps follow each other without
a wait; ``host_ms`` what it takes the host to enqueue one. prefill: ``--prefill`` tokens in one step, with sampling and
the wait for it; where prompts are replayed from graphs, once more without.

``floor_ms`` is the larger of two times: the bytes that a step must read (weights as stored, all but the embedding, and
the keys and values of all requests) at the rate of a large copy on the same device, and its multiplications and
additions at the rate of a large bf16 product. ``ratio`` is ``floor_ms / ms``.

scheduler: the whole loop with messages, at ``--loop-batches``. ``ms`` is a turn of it, ``busy_ms`` the time within it
in which some kernel ran (torch.profiler, in a second run), ``gap`` the rest as a part of ``ms``.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from dummy_models import QUANTS, Shape, write_config, write_report
from gpu_measures import busy_ms, device_memory, device_rates, floor_ms, synchronize

from sglang import __version__
from sglang.srt.entrypoints.scheduler_process import SchedulerProcesses
from sglang.srt.errors import StartupError
from sglang.srt.managers.io_struct import (
    AbortReq,
    BatchTokenIDOutput,
    PortArgs,
    TokenizedGenerateReqInput,
    ToScheduler,
    ToTokenizer,
    encode,
)
from sglang.srt.managers.schedule_batch import MemoryPools, Req, ScheduleBatch
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_main import make_model_runner
from sglang.srt.mem_cache.chunk_cache import ChunkCache
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_loader.loader import weight_bytes
from sglang.srt.platforms import device_name
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs

Row = dict[str, Any]


def output_len(steps: int) -> int:
    """More tokens than any measurement of so many steps takes from a request."""
    return 4 * steps + 64


class Steps:
    """Batches on one model runner, without a scheduler."""

    def __init__(self, runner: ModelRunner, steps: int) -> None:
        self.runner, self.steps = runner, steps
        self.pools = MemoryPools.of(runner, ChunkCache, runner.model_config.vocab_size)

    def batch(self, batch_size: int, context: int, computed: int) -> ScheduleBatch:
        """Requests of ``context`` tokens, of which the first step computes the last ``computed``; the keys and values
        of the others are whatever is in the cache."""
        output = output_len(self.steps)
        params = SamplingParams(temperature=0.0, max_new_tokens=output, ignore_eos=True)
        reqs = []
        for i in range(batch_size):
            tokens = [(7 * i + j) % 1000 for j in range(context)]
            req = Req(TokenizedGenerateReqInput(rid=str(i), input_ids=tokens, sampling_params=params), output)
            req.kv_len, req.fill_len = context - computed, context
            slots = self.pools.allocator.alloc_extend([0], [context - computed], None)
            assert slots is not None, "the KV cache is too small"
            req.prefix_indices = slots
            reqs.append(req)
        return ScheduleBatch(self.pools, reqs)

    def release(self, batch: ScheduleBatch) -> None:
        for req in batch.reqs:
            self.pools.release(req)

    def step(self, batch: ScheduleBatch, prepare: Callable[[], None]) -> None:
        prepare()
        output = self.runner.forward(batch.forward_batch)
        batch.input_ids = self.runner.sample(output, batch.forward_batch)

    def decode(self, batch_size: int, context: int) -> tuple[float, float]:
        """Milliseconds of a step, and of the host's part in one."""
        batch = self.batch(batch_size, context, computed=1)
        self.step(batch, batch.prepare_for_extend)
        for _ in range(3):
            self.step(batch, batch.prepare_for_decode)
        times, host = [], []
        for _ in range(3):
            synchronize(self.runner.device)
            began = time.perf_counter()
            for _ in range(self.steps):
                self.step(batch, batch.prepare_for_decode)
            host.append(time.perf_counter() - began)
            synchronize(self.runner.device)
            times.append(time.perf_counter() - began)
        self.release(batch)
        return min(times) * 1e3 / self.steps, min(host) * 1e3 / self.steps

    def prefill(self, tokens: int) -> tuple[float, float]:
        """Milliseconds of a step that computes one prompt, and of the host's part in it."""
        times, host = [], []
        for _ in range(6):
            batch = self.batch(1, tokens, computed=tokens)
            synchronize(self.runner.device)
            began = time.perf_counter()
            self.step(batch, batch.prepare_for_extend)
            host.append(time.perf_counter() - began)
            synchronize(self.runner.device)
            times.append(time.perf_counter() - began)
            self.release(batch)
        return statistics.median(times[1:]) * 1e3, statistics.median(host[1:]) * 1e3


class Inbox:
    """A scheduler's channel that leads nowhere; what is sent is encoded as it would be."""

    def __init__(self) -> None:
        self._messages: list[ToScheduler] = []

    def recv(self, block: bool) -> list[ToScheduler]:
        messages, self._messages = self._messages, []
        return messages

    def send(self, message: ToTokenizer) -> None:
        encode(message)
        if isinstance(message, BatchTokenIDOutput):
            for output in message.outputs:
                reason = output.finish_reason or {}
                if "message" in reason and reason["status_code"] >= 500:
                    raise StartupError(f"a request ended: {reason['message']}")

    def post(self, message: ToScheduler) -> None:
        self._messages.append(message)

    def close(self) -> None: ...


def scheduler_loop(args: ServerArgs, runner: ModelRunner, batch_size: int, context: int, steps: int) -> Row:
    """A turn of the scheduler's loop while ``batch_size`` requests decode."""
    inbox = Inbox()
    scheduler = Scheduler(args, runner.model_config, runner, inbox)
    params = SamplingParams(temperature=0.0, max_new_tokens=output_len(steps), ignore_eos=True)
    for i in range(batch_size):
        tokens = [(7 * i + j) % 1000 for j in range(context)]
        inbox.post(TokenizedGenerateReqInput(rid=str(i), input_ids=tokens, sampling_params=params))
    while len(scheduler.running_batch.reqs) < batch_size:
        scheduler.step()

    def turns(count: int) -> None:
        for _ in range(count):
            scheduler.step()
        synchronize(runner.device)

    turns(5)
    times = []
    for _ in range(3):
        began = time.perf_counter()
        turns(steps)
        times.append((time.perf_counter() - began) * 1e3 / steps)
    row: Row = {"ms": round(min(times), 4)}
    busy = busy_ms(runner.device, lambda: turns(20))
    if busy is not None:
        row |= {"busy_ms": round(busy / 20, 4), "gap": round(1 - busy / 20 / min(times), 4)}
    for i in range(batch_size):
        inbox.post(AbortReq(rid=str(i)))
    while scheduler.step():
        pass
    return row


def measure(options: argparse.Namespace, shape: Shape, quant: str, args: ServerArgs, runner: ModelRunner) -> list[Row]:
    """All rows of one model."""
    rates = options.rates
    head: Row = {"shape": shape.name, "layers": shape.layers, "quant": quant, "tp": args.tp_size}
    weights = weight_bytes(runner.model) - 2 * shape.head_parameters / args.tp_size  # the embedding is not read whole
    parameters = (shape.layers * shape.layer_parameters) / args.tp_size
    head_flops = 2 * shape.head_parameters / args.tp_size
    kv_bytes = shape.kv_bytes(runner.kv_cache_dtype.itemsize) / args.tp_size
    rows: list[Row] = []

    def add(phase: str, batch: int, context: int, tokens: int, ms: float, floor: Row, **more: Any) -> None:
        row = {**head, "phase": phase, "batch": batch, "context": context, "ms": round(ms, 4)}
        row |= {"floor_ms": round(floor["ms"], 4), "bound": floor["bound"], "ratio": round(floor["ms"] / ms, 4)}
        rows.append({**row, "tokens_per_s": round(tokens * 1e3 / ms, 1), **more})
        if runner.tp.rank == 0:
            print(json.dumps(rows[-1]), flush=True)

    steps = Steps(runner, options.steps)
    for batch in options.batches:
        ms, host_ms = steps.decode(batch, options.context)
        context = options.context + 2 * options.steps
        flops = batch * (2 * parameters + head_flops + shape.attention_flops(context) / args.tp_size)
        floor = floor_ms(rates, weights + batch * context * kv_bytes, flops)
        add("decode", batch, options.context, batch, ms, floor, host_ms=round(host_ms, 4))
    graphs = runner.prefill_graphs
    for tokens in options.prefill:
        flops = tokens * (2 * parameters + shape.attention_flops(tokens) / 2 / args.tp_size) + head_flops
        floor = floor_ms(rates, weights + tokens * kv_bytes, flops)
        replayed = graphs is not None and tokens <= graphs.sizes[-1]
        for phase in ("prefill", "prefill, no graph")[: 1 + replayed]:
            runner.prefill_graphs = graphs if phase == "prefill" else None
            ms, host_ms = steps.prefill(tokens)
            add(phase, 1, tokens, tokens, ms, floor, host_ms=round(host_ms, 4))
    runner.prefill_graphs = graphs
    for batch in options.loop_batches:
        found = scheduler_loop(args, runner, batch, options.loop_context, options.steps)
        flops = batch * (2 * parameters + head_flops)
        floor = floor_ms(rates, weights + batch * options.loop_context * kv_bytes, flops)
        ms = found.pop("ms")
        add("scheduler", batch, options.loop_context, batch, ms, floor, **found)
    return rows


def run_rank(
    options: argparse.Namespace,
    shape: Shape,
    quant: str,
    args: ServerArgs,
    port_args: PortArgs,
    writer: Connection,
    rank: int,
) -> None:
    """Body of a process; its report has the rows."""
    try:
        device = torch.device("cpu") if args.device == "cpu" else torch.device("cuda", rank)
        if options.rates is None:
            options.rates = device_rates(device)
        began = time.perf_counter()
        runner = make_model_runner(args, port_args.rendezvous, rank, quiet=rank > 0)
        start = time.perf_counter() - began
        rows = measure(options, shape, quant, args, runner)
        writer.send({"status": "ready", "rows": rows, "rates": options.rates, "start_s": round(start, 1)})
    except Exception as error:
        if not isinstance(error, StartupError):
            import traceback

            traceback.print_exc()
        writer.send({"status": "error", "message": f"{type(error).__name__}: {error}"})
    time.sleep(600)  # until it is ended


async def run(options: argparse.Namespace, shape: Shape, quant: str, tp: int, folder: Path) -> Row:
    """The report of rank 0.

    Raises:
        StartupError: a rank failed.
    """
    write_config(folder, shape, quant)
    decoding = max(options.context, options.loop_context) + output_len(options.steps)
    longest = max(decoding, *options.prefill)
    most = max(*options.batches, *options.loop_batches, 1)
    tokens = max(most * decoding, longest) + 64
    args = ServerArgs.from_kwargs(
        model_path=str(folder),
        load_format="dummy",
        device=options.device,
        tp_size=tp,
        random_seed=0,
        context_length=longest + 64,
        max_total_tokens=tokens,
        max_running_requests=most,
        chunked_prefill_size=max(options.prefill, default=2048),
        cuda_graph_bs=tuple(sorted({*options.batches, *options.loop_batches})),
        attention_backend=options.attention_backend,
        disable_radix_cache=True,
        log_level="warning",
    )
    port_args = PortArgs.create()
    processes = SchedulerProcesses(partial(run_rank, options, shape, quant), args, port_args)
    try:
        return await processes.ready()
    finally:
        processes.stop(grace=0)
        port_args.remove()


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--device", default="cuda", choices=("cuda", "cpu"))
    add("--shapes", default="llama-3.1-8b,qwen3-32b,llama-3.3-70b", help="NAME or NAME:LAYERS, several with commas")
    add("--quants", default=",".join(QUANTS))
    add("--layers", type=int, help="of every shape")
    add("--batches", type=numbers, default=[1, 8, 32, 128])
    add("--context", type=int, default=1024)
    add("--prefill", type=numbers, default=[128, 1024, 8192])
    add("--loop-batches", type=numbers, default=[16, 64])
    add("--loop-context", type=int, default=256)
    add("--steps", type=int, default=40, help="decode steps of a measurement")
    add("--tp", type=numbers, default=[1], help="ranks; several to compare")
    add("--attention-backend", default="auto")
    add("--output", type=Path)
    return parser.parse_args()


def main() -> None:
    options = parse_args()
    options.rates = None
    shapes = [Shape.parse(text) for text in options.shapes.split(",")]
    if options.layers:
        shapes = [Shape.parse(f"{shape.name.partition(':')[0]}:{options.layers}") for shape in shapes]
    report: Row = {
        "machine": {
            "device": device_name(torch.device(options.device)),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "sglang-nvfp4": __version__,
        },
        "rates": None,
        "rows": [],
        "failed": [],
    }
    memory = device_memory(options.device)
    for shape, quant, tp in itertools.product(shapes, options.quants.split(","), options.tp):
        name = f"{shape.name} {quant} tp {tp}"
        if shape.weight_bytes(quant) / tp > 0.85 * memory:
            report["failed"].append({"model": name, "why": "too large for the device's memory"})
            print(f"{name}: skipped, too large for the device's memory", flush=True)
            continue
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            try:
                found = asyncio.run(run(options, shape, quant, tp, Path(folder)))
            except StartupError as error:
                report["failed"].append({"model": name, "why": str(error)[:2000]})
                print(f"{name}: {error}", flush=True)
                continue
        report["rows"] += found["rows"]
        report["rates"] = options.rates = found["rates"]
        seconds = time.perf_counter() - began
        print(f"{name}: {seconds:.0f} s, of which {found['start_s']} s to load and capture", flush=True)
        if options.output:
            write_report(options.output, report)
    sys.exit(1 if not report["rows"] else 0)


if __name__ == "__main__":
    main()
