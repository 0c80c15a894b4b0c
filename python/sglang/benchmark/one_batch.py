"""``python -m sglang.bench_one_batch``: prefill and decode of one static batch, straight through the model runner.

No server, no scheduler, no prefix cache: what the device needs for the steps themselves.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import itertools
import json
import logging
import statistics
import sys
import time
from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sglang.srt.errors import ArgumentError, StartupError
from sglang.srt.server_args import ServerArgs, prepare_server_args
from sglang.srt.utils.cli import ArgumentParser, check_appendable, run_main
from sglang.srt.utils.log import configure_logging
from sglang.srt.utils.net import Rendezvous

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import PortArgs

# SGLang draws synthetic prompts from this many token ids.
SYNTHETIC_VOCABULARY = 10000
WARMUP_OUTPUT_LEN = 32
# Decode steps that are printed one by one.
FIRST_STEPS = 5

REFUSED_FLAGS = (
    "--correctness-test", "--correct", "--cut-len", "--profile", "--profile-record-shapes", "--profile-activities",
    "--profile-stage", "--profile-prefix", "--profile-filename-prefix", "--profile-start-step", "--profile-steps",
)  # fmt: skip


def parse_args(argv: Sequence[str]) -> tuple[ServerArgs, argparse.Namespace]:
    """The server's arguments and the benchmark's own, both in ``argv``.

    Raises:
        ArgumentError: one is unknown, not supported or out of range.
    """
    parser = ArgumentParser(
        "python -m sglang.bench_one_batch",
        "Benchmark one static batch without a server. Takes every flag of sglang.launch_server besides its own: "
        "--model-path is required.",
    )
    parser.add_argument("--run-name", default="default", help="put into the results (default: default)")
    for flag, default in (("--batch-size", 1), ("--input-len", 1024), ("--output-len", 16)):
        parser.add_argument(flag, type=int, nargs="+", default=[default], help=f"one or several (default: {default})")
    parser.add_argument("--prompt-filename", default="", help="a text file with a prompt in each line (not synthetic)")
    parser.add_argument("--result-filename", default="result.jsonl", help="appended to; empty: no file")
    parser.add_argument("--log-decode-step", type=int, default=0, help="print every N-th decode step; 0: the first 5")
    for word in argv:
        if (flag := word.partition("=")[0]) in REFUSED_FLAGS:
            raise ArgumentError(f"{flag} is known from SGLang but not supported by this version")
    bench_args, rest = parser.parse_known_args(argv)
    for name in ("batch_size", "input_len", "output_len"):
        for value in getattr(bench_args, name):
            if value < 1:
                raise ArgumentError(f"--{name.replace('_', '-')} must be 1 or more, not {value}")
    server_args = prepare_server_args(rest)
    if server_args.nnodes > 1:
        raise ArgumentError(
            "--nnodes: this command runs on one machine; start servers and measure them with "
            "`python -m sglang.bench_serving`"
        )
    return server_args, bench_args


class OneBatch:
    """A loaded model, and one batch at a time on it. With several ranks each has one, and all do the same.

    Args:
        rendezvous, rank: where ranks meet, and which one this is.

    Attributes:
        runner: the ModelRunner.

    Raises:
        StartupError: the model can't be loaded.
    """

    def __init__(self, server_args: ServerArgs, rendezvous: Rendezvous | None = None, rank: int = 0) -> None:
        from sglang.srt.managers.schedule_batch import MemoryPools
        from sglang.srt.managers.scheduler_main import make_model_runner
        from sglang.srt.mem_cache.chunk_cache import ChunkCache

        self.runner = runner = make_model_runner(server_args, rendezvous or Rendezvous(), rank, quiet=rank > 0)
        self._pools = MemoryPools.of(runner, ChunkCache, runner.model_config.vocab_size)

    def why_not(self, prompts: Sequence[Sequence[int]], output_len: int) -> str:
        """What keeps this batch from running; empty if it can."""
        runner = self.runner
        longest = max(len(prompt) for prompt in prompts) + output_len
        needed = sum(-(-(len(prompt) + output_len) // runner.page_size) * runner.page_size for prompt in prompts)
        if len(prompts) > runner.max_running_requests:
            return f"max batch size limit: --max-running-requests {runner.max_running_requests}"
        if longest > runner.model_config.context_len:
            return f"context length limit: {longest} tokens, the model has {runner.model_config.context_len}"
        if needed > runner.max_total_num_tokens:
            return f"max batch size limit: {needed} tokens, the KV cache holds {runner.max_total_num_tokens}"
        return ""

    def run(self, prompts: Sequence[list[int]], output_len: int) -> tuple[float, list[float], list[list[int]]]:
        """Generate ``output_len`` tokens greedily for each prompt: one prefill step, then decode steps.

        Returns:
            Seconds of the prefill with its sampling, of each decode step, and the tokens by prompt.
        """
        from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
        from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
        from sglang.srt.sampling.sampling_params import SamplingParams

        params = SamplingParams(temperature=0.0, max_new_tokens=output_len, ignore_eos=True)
        reqs = []
        for i, prompt in enumerate(prompts):
            recv = TokenizedGenerateReqInput(rid=str(i), input_ids=prompt, sampling_params=params)
            req = Req(recv, output_len)
            req.prefix_indices = self._pools.tree_cache.match_prefix([]).device_indices
            req.fill_len = len(prompt)
            reqs.append(req)
        batch = ScheduleBatch(self._pools, reqs)

        def step(is_prefill: bool) -> tuple[float, list[int]]:
            self._synchronize()
            begin = time.perf_counter()
            batch.prepare_for_extend() if is_prefill else batch.prepare_for_decode()
            output = self.runner.forward(batch.forward_batch)
            batch.input_ids = self.runner.sample(output, batch.forward_batch)
            self._synchronize()
            return time.perf_counter() - begin, batch.input_ids.tolist()

        steps = [step(is_prefill=i == 0) for i in range(output_len)]
        for req in reqs:
            self._pools.release(req)
        tokens = [list(row) for row in zip(*(ids for _, ids in steps), strict=True)]
        if any(token < 0 for row in tokens for token in row):
            raise StartupError("the model computed NaN or infinite logits; try --dtype bfloat16 or float32")
        return steps[0][0], [seconds for seconds, _ in steps[1:]], tokens

    def _synchronize(self) -> None:
        if self.runner.device.type == "cuda":
            import torch

            torch.cuda.synchronize(self.runner.device)


def latency_test_run_once(
    model: OneBatch, run_name: str, prompts: Sequence[list[int]], input_len: int, output_len: int, log_decode_step: int
) -> dict[str, Any] | None:
    """Run one batch and print it; its result in SGLang's keys (seconds, tokens per second), None if it was skipped."""
    batch_size = len(prompts)
    if reason := model.why_not(prompts, output_len):
        print(f"skipping ({batch_size}, {input_len}, {output_len}) due to {reason}")
        return None
    prefill, decode, _ = model.run(prompts, output_len)
    result = {"run_name": run_name, "batch_size": batch_size, "input_len": input_len, "output_len": output_len}
    rate = sum(len(prompt) for prompt in prompts) / prefill
    print(f"Prefill. latency: {prefill:6.5f} s, throughput: {rate:9.2f} token/s")
    result |= {"prefill_latency": prefill, "prefill_throughput": rate}
    for i, latency in enumerate(decode):
        if i < FIRST_STEPS or (log_decode_step > 0 and i % log_decode_step == 0):
            rate = batch_size / latency
            print(f"Decode {i}. Batch size: {batch_size}, latency: {latency:6.5f} s, throughput: {rate:9.2f} token/s")
    if decode:
        median = statistics.median(decode)
        rate = batch_size / median
        print(f"Decode.  median latency: {median:6.5f} s, median throughput: {rate:9.2f} token/s")
        result |= {"median_decode_latency": median, "median_decode_throughput": rate}
    total = prefill + sum(decode)
    rate = sum(len(prompt) + output_len for prompt in prompts) / total
    print(f"Total. latency: {total:6.3f} s, throughput: {rate:9.2f} token/s")
    return result | {"total_latency": total, "overall_throughput": rate}


def _prompts(batch_size: int, input_len: int, vocab_size: int, custom: list[list[int]]) -> list[list[int]]:
    """``batch_size`` prompts: the custom ones (the last one repeated where they are too few), or random ids."""
    if custom:
        return (custom + [custom[-1]] * batch_size)[:batch_size]
    ids: list[list[int]] = np.random.randint(0, min(SYNTHETIC_VOCABULARY, vocab_size), (batch_size, input_len)).tolist()
    return ids


def _custom_prompts(server_args: ServerArgs, filename: str) -> list[list[int]]:
    if not filename:
        return []
    from sglang.srt.managers.hf_tokenizer import encode, get_tokenizer

    try:
        lines = [line.strip() for line in Path(filename).read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"--prompt-filename {filename} can't be read: {error}") from None
    tokenizer = get_tokenizer(server_args.tokenizer_path)
    found = [encode(tokenizer, line) for line in lines if line]
    if not found:
        raise ArgumentError(f"--prompt-filename {filename} has no prompt")
    return found


def latency_test(
    server_args: ServerArgs, bench_args: argparse.Namespace, rendezvous: Rendezvous | None = None, rank: int = 0
) -> list[dict[str, Any]]:
    """Warm up, run every combination of batch size, input and output length; the results of those that ran.

    Every rank does this, and rank 0 writes the file.

    Raises:
        StartupError: the model can't be loaded, or nothing could be run.
    """
    if bench_args.result_filename and rank == 0:
        check_appendable(Path(bench_args.result_filename))
    custom = _custom_prompts(server_args, bench_args.prompt_filename)
    np.random.seed(server_args.random_seed)  # the same prompts on all ranks
    model = OneBatch(server_args, rendezvous, rank)
    print(f"max_total_num_tokens={model.runner.max_total_num_tokens}")
    vocab_size = model.runner.model_config.vocab_size
    sizes = list(itertools.product(bench_args.batch_size, bench_args.input_len, bench_args.output_len))
    results = []
    for i, (batch_size, input_len, output_len) in enumerate([sizes[0], *sizes]):
        if i < 2:
            print("Warmup ..." if i == 0 else "Benchmark ...", flush=True)
        new_tokens = min(WARMUP_OUTPUT_LEN, output_len) if i == 0 else output_len
        prompts = _prompts(batch_size, input_len, vocab_size, custom)
        log_step = bench_args.log_decode_step if i else 0
        result = latency_test_run_once(model, bench_args.run_name, prompts, input_len, new_tokens, log_step)
        if i and result is not None:
            results.append(result)
    if not results:
        raise StartupError("no batch could be run; see above what each one exceeds")
    if bench_args.result_filename and rank == 0:
        with Path(bench_args.result_filename).open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(result) + "\n" for result in results)
    return results


def _run_rank(
    bench_args: argparse.Namespace, server_args: ServerArgs, port_args: PortArgs, ready_writer: Connection, rank: int
) -> None:
    """Body of a rank's process, where there are several. Rank 0 prints."""
    configure_logging(server_args.log_level if rank == 0 else "warning", f" TP{rank}")
    try:
        with contextlib.redirect_stdout(sys.stdout if rank == 0 else io.StringIO()):
            latency_test(server_args, bench_args, port_args.rendezvous, rank)
        ready_writer.send({"status": "ready"})
    except StartupError as error:
        ready_writer.send({"status": "error", "message": str(error), "exit_code": error.exit_code})


def _run_ranks(server_args: ServerArgs, bench_args: argparse.Namespace) -> None:
    from sglang.srt.entrypoints.scheduler_process import SchedulerProcesses
    from sglang.srt.managers.io_struct import PortArgs

    port_args = PortArgs.create()
    processes = SchedulerProcesses(partial(_run_rank, bench_args), server_args, port_args)
    try:
        asyncio.run(processes.ready())
    finally:
        processes.stop(grace=0)
        port_args.remove()


def main() -> None:
    server_args, bench_args = parse_args(sys.argv[1:])
    configure_logging(server_args.log_level)
    logging.getLogger("sglang").setLevel(server_args.log_level.upper())
    if server_args.tp_size > 1:
        _run_ranks(server_args, bench_args)
    else:
        latency_test(server_args, bench_args)


if __name__ == "__main__":
    run_main(main)
