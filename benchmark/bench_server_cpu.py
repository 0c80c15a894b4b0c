"""Tokens per second of the whole server on a CPU, beside transformers' ``generate`` on the same dequantised weights.

    python benchmark/bench_server_cpu.py --model-path "$(python -m sglang.demo_model)" --output benchmark/results/X.json

Decode: tokens after the first, over the time after the first, at batch 1 and 8 (greedy, end of text ignored). Prefill:
512 prompt tokens that are in no cache, over the time to one token. Every figure is the median of ``--repeats``; both
engines run in this one process tree, one after the other, with the same number of threads.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

BATCHES = (1, 8)
PROMPT, DECODE, PREFILL = 32, 128, 512

# generate(prompts, new tokens): runs the batch to its end.
Generate = Callable[[list[list[int]], int], None]


class Prompts:
    """Random token ids, different on every call, so that no prefix cache helps."""

    def __init__(self, vocab_size: int) -> None:
        import random

        self._random = random.Random(0)
        self._vocab_size = vocab_size

    def draw(self, batch: int, length: int) -> list[list[int]]:
        return [[self._random.randrange(100, self._vocab_size) for _ in range(length)] for _ in range(batch)]


def measure(generate: Generate, prompts: Prompts, repeats: int) -> list[dict[str, Any]]:
    def seconds(batch: int, length: int, new_tokens: int) -> float:
        drawn = prompts.draw(batch, length)
        start = time.perf_counter()
        generate(drawn, new_tokens)
        return time.perf_counter() - start

    rows = []
    seconds(max(BATCHES), PROMPT, 8)  # warm up
    seconds(1, PREFILL, 1)
    for batch in BATCHES:
        rates = []
        for _ in range(repeats):
            first, whole = seconds(batch, PROMPT, 1), seconds(batch, PROMPT, 1 + DECODE)
            rates.append(batch * DECODE / (whole - first))
        rows.append({"phase": "decode", "batch": batch, "tokens_per_s": round(statistics.median(rates), 1)})
    rates = [PREFILL / seconds(1, PREFILL, 1) for _ in range(repeats)]
    rows.append({"phase": "prefill", "batch": 1, "tokens_per_s": round(statistics.median(rates), 1)})
    return rows


def ours(model_path: str, dtype: str, prompts: Prompts, repeats: int, backend: str) -> list[dict[str, Any]]:
    import sglang as sgl
    from sglang.srt.layers.quantization.fp4_utils import get_fp4_gemm_resolution

    engine = sgl.Engine(
        model_path=model_path, device="cpu", dtype=dtype, fp4_gemm_runner_backend=backend, log_level="error"
    )

    def generate(batch: list[list[int]], new_tokens: int) -> None:
        parameters = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
        outputs = engine.generate(input_ids=batch, sampling_params=parameters)
        assert all(len(output["output_ids"]) == new_tokens for output in outputs)

    try:
        resolution = get_fp4_gemm_resolution()
        assert resolution is not None
        return [{**row, "fp4_gemm_backend": resolution.name} for row in measure(generate, prompts, repeats)]
    finally:
        engine.shutdown()


def transformers(model_path: str, dtype: str, prompts: Prompts, repeats: int) -> list[dict[str, Any]]:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from sglang.srt.layers.quantization.nvfp4_utils import dequantize_nvfp4
    from sglang.srt.model_loader.weight_utils import iterate_tensors

    config = AutoConfig.from_pretrained(model_path)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    tensors = dict(iterate_tensors(model_path, progress=False))
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

    return measure(generate, prompts, repeats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", required=True, help="an NVFP4 checkpoint in ModelOpt's format")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"], choices=["bfloat16", "float32"])
    parser.add_argument("--fp4-gemm-backend", default="auto")
    parser.add_argument("--output", type=Path, help="write the rows as JSON to this file")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)  # before torch, and for the scheduler process

    import torch
    import transformers as hf

    import sglang

    torch.set_num_threads(arguments.threads)
    vocab_size = hf.AutoConfig.from_pretrained(arguments.model_path).vocab_size
    prompts = Prompts(vocab_size)
    rows: list[dict[str, Any]] = []
    for dtype in arguments.dtypes:
        for name in ("sglang-nvfp4", "transformers"):
            if name == "sglang-nvfp4":
                found = ours(arguments.model_path, dtype, prompts, arguments.repeats, arguments.fp4_gemm_backend)
            else:
                found = transformers(arguments.model_path, dtype, prompts, arguments.repeats)
            rows += [{"engine": name, "dtype": dtype, **row} for row in found]
            for row in rows[-len(found) :]:
                print(
                    "{engine:14} {dtype:9} {phase:8} batch {batch}: {tokens_per_s:8.1f} tokens/s".format(**row),
                    flush=True,
                )

    def best(engine: str, phase: str, batch: int) -> float:
        return max(
            row["tokens_per_s"] for row in rows if (row["engine"], row["phase"], row["batch"]) == (engine, phase, batch)
        )

    ratios = {
        f"{phase} batch {batch}": round(best("sglang-nvfp4", phase, batch) / best("transformers", phase, batch), 2)
        for phase, batch in (*(("decode", batch) for batch in BATCHES), ("prefill", 1))
    }
    print("ratio to transformers (best dtype of each):", ratios)
    if arguments.output:
        machine = {
            "processor": _processor(),
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


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


if __name__ == "__main__":
    main()
