"""The serving benchmarks of SGLang's and vLLM's own wheels against a server, beside ours.

    pip download --no-deps -d /tmp/wheels sglang vllm; unzip each into a folder of its own
    python -m venv /tmp/bench && /tmp/bench/bin/pip install PACKAGES
    python benchmark/clients/serving_benchmarks.py --python /tmp/bench/bin/python --sglang DIR --vllm DIR --record

Neither wheel is installed: both need GPU packages, their benchmark modules only what they import. For SGLang 0.5.23 and
vLLM 0.33.0 PACKAGES are torch torchvision transformers datasets aiohttp apache-tvm-ffi cachetools cbor2 cloudpickle
compressed-tensors einops fastapi gguf ipython llguidance msgspec openai openai-harmony orjson partial-json-parser
pillow prometheus-client psutil py-cpuinfo pybase64 pyzmq requests sentencepiece uvloop xgrammar.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import ROOT, arguments, report, run_client, server

REQUESTS, PROMPT, OUTPUT, SEED = 12, 32, 8, 7
VLLM = """
import argparse, vllm.benchmarks.serve as serve
parser = argparse.ArgumentParser()
serve.add_cli_args(parser)
serve.main(parser.parse_args())
"""


def sglang_benchmark(python: str, folder: Path, backend: str, url: str, output: Path) -> dict[str, Any]:
    """The last line of the result file of `sglang.bench_serving`, the one whose package is in ``folder``."""
    run_client(
        [python, "-m", "sglang.bench_serving", "--backend", backend, "--base-url", url, "--dataset-name", "random-ids",
         "--num-prompts", REQUESTS, "--random-input-len", PROMPT, "--random-output-len", OUTPUT, "--seed", SEED,
         "--disable-tqdm", "--output-file", output],
        PYTHONPATH=str(folder),
    )  # fmt: skip
    found: dict[str, Any] = json.loads(output.read_text().splitlines()[-1])
    return found


def vllm_benchmark(python: str, folder: Path, model: Path, url: str, output: Path) -> dict[str, Any]:
    run_client(
        [python, "-c", VLLM, "--backend", "openai", "--base-url", url, "--model", model, "--dataset-name", "random",
         "--num-prompts", REQUESTS, "--random-input-len", PROMPT, "--random-output-len", OUTPUT, "--seed", SEED,
         "--disable-tqdm", "--ignore-eos", "--save-result", "--result-dir", output.parent,
         "--result-filename", output.name],
        PYTHONPATH=str(folder),
    )  # fmt: skip
    found: dict[str, Any] = json.loads(output.read_text())
    return found


def main() -> None:
    parser: argparse.ArgumentParser = arguments(__doc__ or "")
    parser.add_argument("--sglang", type=Path, help="folder with the contents of SGLang's wheel")
    parser.add_argument("--vllm", type=Path, help="folder with the contents of vLLM's wheel")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="serving-"))
    lines = []
    with server(args.model_path) as url:
        for backend in ("sglang", "sglang-oai", "sglang-oai-chat"):
            results = {"ours": sglang_benchmark(sys.executable, ROOT / "python", backend, url, folder / "ours.jsonl")}
            if args.sglang:
                results["SGLang's"] = sglang_benchmark(args.python, args.sglang, backend, url, folder / "theirs.jsonl")
                missing = set(results["SGLang's"]) - set(results["ours"])
                lines.append(f"{backend}: keys of SGLang's result that ours lacks: {sorted(missing) or 'none'}")
            for name, found in results.items():
                counts = {key: found[key] for key in ("completed", "total_input_tokens", "total_output_tokens")}
                lines.append(f"{backend}, {name}: {json.dumps(counts)}")
                assert found["completed"] == REQUESTS
            assert len({(found["total_input_tokens"], found["total_output_tokens"]) for found in results.values()}) == 1
        if args.vllm:
            found = vllm_benchmark(args.python, args.vllm, args.model_path, url, folder / "vllm.json")
            counts = {key: found[key] for key in ("completed", "failed", "total_input_tokens", "total_output_tokens")}
            assert (counts["completed"], counts["total_output_tokens"]) == (REQUESTS, REQUESTS * OUTPUT)
            lines.append(f"vLLM's `bench serve`, openai: {json.dumps(counts)}")
    wheels = [next(path.glob("*.dist-info")).stem for path in (args.sglang, args.vllm) if path]
    report(f"serving-benchmarks {' '.join(wheels)}", lines, args.record)


if __name__ == "__main__":
    main()
