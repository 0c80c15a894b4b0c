"""Tokens per second of the whole server on a CPU, beside transformers' ``generate`` on the same dequantised weights
and, with ``--llama-gguf``, llama.cpp on the same NVFP4 weights. With ``--w4a4-model-path`` a second server multiplies
with quantised activations.

    python benchmark/bench_server_cpu.py --model-path "$(python -m sglang.demo_model)" --output benchmark/results/X.json

Decode: tokens after the first, over the time after the first, at batch 1 and 8 (greedy, end of text ignored). Prefill:
512 prompt tokens that are in no cache, over the time to one token. Each engine has a process of its own, with the same
number of threads; they stay up together and take turns within each repetition, so that a busy machine is equally busy
for all. Before a turn is a rest, since llama.cpp's threads look for work for a third of a second after their last, and
its first prompts are not timed: what has waited for its turn is slow at first. ``tokens_per_s`` is the median of
``--repeats``, ``best`` the largest. ``peak_rss_mb`` is that of an engine's processes together.

The GGUF file is llama.cpp's own conversion of the checkpoint (in the source of llama-cpp-python 0.3.36, which also has
the ``gguf`` that it wants; ``pip install sentencepiece`` beside it):

    python vendor/llama.cpp/convert_hf_to_gguf.py "$(python -m sglang.demo_model)" --outfile demo.gguf
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

BATCHES = (1, 8)
PROMPT, DECODE, PREFILL = 32, 128, 512
REST = 0.5  # seconds
UNTIMED = 2  # prompts at the beginning of a turn
MEASUREMENTS = (*(("decode", batch) for batch in BATCHES), ("prefill", 1))

# generate(prompts, new tokens): runs the batch to its end.
Generate = Callable[[list[list[int]], int], None]


@dataclass(frozen=True)
class Settings:
    """What a process needs to start one engine; ``model`` is a folder, or llama.cpp's file."""

    engine: str
    dtype: str
    model: str
    threads: int
    backend: str


class Prompts:
    """Random token ids, different on every call, so that no prefix cache helps."""

    def __init__(self, vocab_size: int) -> None:
        import random

        self._random = random.Random(0)
        self._vocab_size = vocab_size

    def draw(self, batch: int, length: int) -> list[list[int]]:
        return [[self._random.randrange(100, self._vocab_size) for _ in range(length)] for _ in range(batch)]


def ours(settings: Settings) -> tuple[Generate, dict[str, Any]]:
    import sglang as sgl
    from sglang.srt.layers.quantization.fp4_utils import get_fp4_gemm_resolution

    engine = sgl.Engine(
        model_path=settings.model,
        device="cpu",
        dtype=settings.dtype,
        fp4_gemm_runner_backend=settings.backend,
        disable_radix_cache=True,  # so that each prompt does not take memory which nobody has touched yet
        log_level="error",
    )

    def generate(batch: list[list[int]], new_tokens: int) -> None:
        parameters = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
        outputs = engine.generate(input_ids=batch, sampling_params=parameters)
        assert all(len(output["output_ids"]) == new_tokens for output in outputs)

    resolution = get_fp4_gemm_resolution()
    assert resolution is not None
    return generate, {"fp4_gemm_backend": resolution.name}


def transformers(settings: Settings) -> tuple[Generate, dict[str, Any]]:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from sglang.srt.layers.quantization.nvfp4_utils import dequantize_nvfp4
    from sglang.srt.model_loader.weight_utils import iterate_tensors

    torch.set_num_threads(settings.threads)
    config = AutoConfig.from_pretrained(settings.model)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, settings.dtype))
    tensors = dict(iterate_tensors(settings.model, progress=False))
    weights = {
        name: dequantize_nvfp4(value, tensors[name + "_scale"], tensors[name + "_scale_2"])
        if value.dtype == torch.uint8
        else value
        for name, value in tensors.items()
        if not name.endswith(("_scale", "_scale_2"))
    }
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    model.tie_weights()
    model.eval()

    def generate(batch: list[list[int]], new_tokens: int) -> None:
        with torch.inference_mode():
            ids = torch.tensor(batch)
            output = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
                pad_token_id=0,
            )
        assert output.shape[1] == ids.shape[1] + new_tokens

    return generate, {}


llama_log: list[Any] = []  # llama.cpp calls it as long as the process lives


def llama_cpp(settings: Settings) -> tuple[Generate, dict[str, Any]]:
    """``pip install llama-cpp-python``; its C interface, since its Python one has no batches."""
    import llama_cpp as llama
    import numpy as np

    most = max(BATCHES)
    llama_log.append(llama.llama_log_callback(lambda *_: None))
    llama.llama_log_set(llama_log[0], None)
    llama.llama_backend_init()
    model = llama.llama_model_load_from_file(settings.model.encode(), llama.llama_model_default_params())
    parameters = llama.llama_context_default_params()
    parameters.n_ctx = most * (PROMPT + DECODE + 1) + PREFILL
    parameters.n_batch = parameters.n_ubatch = max(PREFILL, most * PROMPT)
    parameters.n_seq_max = most
    parameters.n_threads = parameters.n_threads_batch = settings.threads
    parameters.kv_unified = True
    context = llama.llama_init_from_model(model, parameters)
    vocab_size = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
    batch = llama.llama_batch_init(parameters.n_batch, 0, 1)

    def step(tokens: list[tuple[int, int, int, bool]]) -> list[int]:
        """(token, position, sequence, whether its logits are wanted) to the best token of each that wants them."""
        batch.n_tokens = len(tokens)
        for i, (token, position, sequence, wanted) in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        if llama.llama_decode(context, batch):
            raise RuntimeError("llama_decode failed")
        rows = [i for i, (*_, wanted) in enumerate(tokens) if wanted]
        logits = [np.ctypeslib.as_array(llama.llama_get_logits_ith(context, i), (vocab_size,)) for i in rows]
        return [int(row.argmax()) for row in logits]

    def generate(prompts: list[list[int]], new_tokens: int) -> None:
        llama.llama_memory_clear(llama.llama_get_memory(context), True)
        length = len(prompts[0])
        found = step(
            [(token, i, n, i == length - 1) for n, prompt in enumerate(prompts) for i, token in enumerate(prompt)]
        )
        for done in range(new_tokens - 1):
            found = step([(token, length + done, n, True) for n, token in enumerate(found)])

    return generate, {"version": llama.__version__}


OURS = ("sglang-nvfp4", "sglang-nvfp4 W4A4")
ENGINES = {**dict.fromkeys(OURS, ours), "transformers": transformers, "llama.cpp": llama_cpp}


def serve(settings: Settings, pipe: Connection) -> None:
    """A process: start the engine, say what it is, then answer (phase, batch) with tokens per second."""
    from transformers import AutoConfig

    generate, facts = ENGINES[settings.engine](settings)
    folder = os.environ["BENCH_MODEL"]
    prompts = Prompts(AutoConfig.from_pretrained(folder).vocab_size)

    def seconds(batch: int, length: int, new_tokens: int) -> float:
        drawn = prompts.draw(batch, length)
        start = time.perf_counter()
        generate(drawn, new_tokens)
        return time.perf_counter() - start

    seconds(max(BATCHES), PROMPT, 8)  # warm up
    seconds(1, PREFILL, 1)
    pipe.send(facts)
    try:
        while (asked := pipe.recv()) is not None:
            phase, batch = asked
            for _ in range(UNTIMED):
                seconds(1, PREFILL, 1)
            if phase == "prefill":
                pipe.send(PREFILL / seconds(batch, PREFILL, 1))
            else:
                first, whole = seconds(batch, PROMPT, 1), seconds(batch, PROMPT, 1 + DECODE)
                pipe.send(batch * DECODE / (whole - first))
        pipe.send(peak_rss_mb())
    except EOFError:  # the benchmark has ended
        pass


def peak_rss_mb() -> int:
    """Of this process and its children, each at its own peak."""
    import psutil

    me = psutil.Process()
    total = 0
    for process in (me, *me.children(recursive=True)):
        for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                total += int(line.split()[1])
    return total // 1024


def run(engines: list[Settings], repeats: int) -> list[dict[str, Any]]:
    context = multiprocessing.get_context("spawn")
    pipes: list[Connection] = []
    try:
        facts = []
        for settings in engines:
            pipe, other = context.Pipe()
            pipes.append(pipe)
            context.Process(target=serve, args=(settings, other)).start()
            other.close()
            facts.append(pipe.recv())
            print(f"{settings.engine} {settings.dtype} is up", file=sys.stderr)
        rates: dict[tuple[int, str, int], list[float]] = {}
        for _ in range(repeats):
            for phase, batch in MEASUREMENTS:
                for index, pipe in enumerate(pipes):
                    time.sleep(REST)
                    pipe.send((phase, batch))
                    rates.setdefault((index, phase, batch), []).append(pipe.recv())
        rows = []
        for index, (settings, pipe) in enumerate(zip(engines, pipes, strict=True)):
            pipe.send(None)
            rss = pipe.recv()
            for phase, batch in MEASUREMENTS:
                found = rates[index, phase, batch]
                row = {"engine": settings.engine, "dtype": settings.dtype, "phase": phase, "batch": batch}
                row |= {"tokens_per_s": round(statistics.median(found), 1), "best": round(max(found), 1)}
                rows.append({**row, "peak_rss_mb": rss, **facts[index]})
        return rows
    finally:  # ends those that still wait for a question
        for pipe in pipes:
            pipe.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", required=True, help="an NVFP4 checkpoint in ModelOpt's format")
    parser.add_argument("--llama-gguf", type=Path, help="the same checkpoint as llama.cpp's file; adds llama.cpp")
    parser.add_argument("--w4a4-model-path", help="a checkpoint of the same model with input scales; adds its server")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"], choices=["bfloat16", "float32"])
    parser.add_argument("--fp4-gemm-backend", default="auto")
    parser.add_argument("--output", type=Path, help="write the rows as JSON to this file")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)  # of every process, before torch
    os.environ["BENCH_MODEL"] = arguments.model_path

    import torch
    import transformers as hf

    import sglang
    from sglang.check_env import devices

    def settings(engine: str, dtype: str, model: str) -> Settings:
        return Settings(engine, dtype, model, arguments.threads, arguments.fp4_gemm_backend)

    engines = [
        settings(engine, dtype, arguments.model_path)
        for dtype in arguments.dtypes
        for engine in ("sglang-nvfp4", "transformers")
    ]
    if arguments.w4a4_model_path is not None:
        engines += [settings(OURS[1], dtype, arguments.w4a4_model_path) for dtype in arguments.dtypes]
    if arguments.llama_gguf is not None:
        engines.append(settings("llama.cpp", "gguf", str(arguments.llama_gguf)))
    rows = run(engines, arguments.repeats)
    for row in rows:
        print(
            "{engine:17} {dtype:9} {phase:8} batch {batch}: {tokens_per_s:8.1f} tokens/s (best {best:.1f}), "
            "peak RSS {peak_rss_mb} MB".format(**row)
        )

    def fastest(engine: str, phase: str, batch: int) -> float:
        return max(
            row["tokens_per_s"] for row in rows if (row["engine"], row["phase"], row["batch"]) == (engine, phase, batch)
        )

    names = list(dict.fromkeys(one.engine for one in engines))
    ratios = {
        f"{mine} / {peer}": {
            f"{phase} batch {batch}": round(fastest(mine, phase, batch) / fastest(peer, phase, batch), 2)
            for phase, batch in MEASUREMENTS
        }
        for mine in names
        for peer in names
        if mine in OURS and peer not in OURS
    }
    for pair, found in ratios.items():
        print(f"{pair}, the fastest dtype of each: {found}")
    if arguments.output:
        cpu = devices()[-1]
        machine = {
            "processor": f"{cpu['name']}, {cpu['instructions']}",
            "threads": arguments.threads,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": hf.__version__,
            "sglang-nvfp4": sglang.__version__,
        }
        command = "python benchmark/bench_server_cpu.py " + " ".join(
            word if not word.startswith("/") else Path(word).name for word in sys.argv[1:]
        )
        result = {"command": command, "machine": machine, "ratios": ratios, "rows": rows}
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
