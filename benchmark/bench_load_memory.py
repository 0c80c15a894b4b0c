"""Peak memory while a checkpoint loads on a CPU, beside what the loaded weights take.

    python benchmark/bench_load_memory.py --output benchmark/results/load_memory_cpu.json

Makes a ModelOpt W4A16_NVFP4 checkpoint of random bytes in the shape of a Llama with 1.2 billion parameters and as many
layers as fill ``--gigabytes`` (two gigabytes take about 8 GB once loaded, since backend ``torch`` holds float32 on a
CPU), loads it in a fresh process as the server does, and deletes it. The parent samples the child's /proc status;
VmHWM there is the kernel's own exact peak. Exits with status 1 unless

    peak < memory before loading + final weights + largest shard + 200 MB

where the weights are what ``/get_server_info`` reports and memory is VmRSS: private pages (RssAnon) and the pages of
files that are mapped (RssFile).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MB = 10**6
ALLOWANCE = 200 * MB
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 128256,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
QUANTIZATION = {"quant_algo": "W4A16_NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}


def layer_shapes() -> dict[str, tuple[int, int]]:
    """N and K of each linear layer of a decoder layer."""
    hidden, middle = CONFIG["hidden_size"], CONFIG["intermediate_size"]
    kv = CONFIG["num_key_value_heads"] * CONFIG["head_dim"]
    return {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (middle, hidden),
        "mlp.up_proj": (middle, hidden),
        "mlp.down_proj": (hidden, middle),
    }


def tensors(layers: int) -> Iterator[tuple[str, Any]]:
    """Every tensor of the checkpoint, in the order of the model."""
    import torch

    generator = torch.Generator().manual_seed(0)

    def plain(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16).uniform_(-0.05, 0.05, generator=generator)

    yield "model.embed_tokens.weight", plain(CONFIG["vocab_size"], CONFIG["hidden_size"])
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        for name, (n, k) in layer_shapes().items():
            packed = torch.randint(0, 256, (n, k // 2), generator=generator, dtype=torch.uint8)
            scale = torch.randint(0x28, 0x48, (n, k // 16), generator=generator, dtype=torch.uint8)
            yield f"{prefix}.{name}.weight", packed
            yield f"{prefix}.{name}.weight_scale", scale.view(torch.float8_e4m3fn)
            yield f"{prefix}.{name}.weight_scale_2", torch.tensor(1e-3)
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}.{name}.weight", plain(CONFIG["hidden_size"])
    yield "model.norm.weight", plain(CONFIG["hidden_size"])
    yield "lm_head.weight", plain(CONFIG["vocab_size"], CONFIG["hidden_size"])


def write_checkpoint(folder: Path, total: float, shard_size: float) -> list[int]:
    """The checkpoint, about ``total`` bytes in shards of at most about ``shard_size``; the shards' sizes."""
    from safetensors.torch import save_file

    heads = 2 * 2 * CONFIG["vocab_size"] * CONFIG["hidden_size"]
    layer = sum(n * k * 9 // 16 for n, k in layer_shapes().values())
    layers = max(1, round((total - heads) / layer))
    quantization = {"producer": {"name": "modelopt"}, "quantization": QUANTIZATION}
    (folder / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": layers}))
    (folder / "hf_quant_config.json").write_text(json.dumps(quantization))
    index: dict[str, str] = {}
    sizes: list[int] = []
    shard: dict[str, Any] = {}

    def flush() -> None:
        file = folder / f"model-{len(sizes) + 1:05}.safetensors"
        save_file(shard, file)
        index.update(dict.fromkeys(shard, file.name))
        sizes.append(file.stat().st_size)
        shard.clear()

    for name, tensor in tensors(layers):
        if shard and sum(value.nbytes for value in shard.values()) + tensor.nbytes > shard_size:
            flush()
        shard[name] = tensor
    flush()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return sizes


def memory(pid: int | str = "self") -> dict[str, int]:
    """Bytes in /proc/PID/status: VmRSS, VmHWM, RssAnon, RssFile."""
    lines = (line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {
        words[0][:-1]: int(words[1]) * 1024
        for words in lines
        if words and words[0][:-1].startswith(("VmRSS", "VmHWM", "Rss"))
    }


def load(folder: str) -> None:
    """The child: load as the server does; one JSON line before, one after."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.layers.quantization.fp4_utils import initialize_fp4_gemm_config
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.model_loader.loader import weight_bytes
    from sglang.srt.models.registry import get_model_class
    from sglang.srt.server_args import ServerArgs

    args = ServerArgs(
        model_path=folder,
        device="cpu",
        context_length=16,
        max_total_tokens=16,
        max_running_requests=1,
        fp4_gemm_runner_backend="torch",
    )
    config = ModelConfig.from_server_args(args)
    initialize_fp4_gemm_config(args, config.dtype)
    get_model_class(config.architecture)  # the imports count as memory before loading
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
    print(json.dumps(memory()), flush=True)
    runner = ModelRunner(args, config)
    print(json.dumps({"weight_bytes": weight_bytes(runner.model), **memory()}), flush=True)


def measure(folder: Path) -> dict[str, int]:
    """Load ``folder`` in a child; bytes before, after and at most."""
    command = [sys.executable, __file__, "--load", str(folder)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    before = json.loads(child.stdout.readline())
    peak = {"RssAnon": 0, "RssFile": 0}
    done = threading.Event()

    def sample() -> None:
        while not done.wait(0.002):
            try:
                now = memory(child.pid)
            except (FileNotFoundError, ProcessLookupError):
                return
            for key in peak:
                peak[key] = max(peak[key], now.get(key, 0))

    sampler = threading.Thread(target=sample)
    sampler.start()
    line = child.stdout.readline()
    done.set()
    sampler.join()
    if child.wait() or not line:
        sys.exit(f"loading failed with status {child.returncode}")
    after = json.loads(line)
    return {
        "rss_before": before["VmRSS"],
        "rss_file_before": before["RssFile"],
        "rss_after": after["VmRSS"],
        "weight_bytes": after["weight_bytes"],
        "peak_rss": after["VmHWM"],
        "peak_rss_anon": peak["RssAnon"],
        "peak_rss_file": peak["RssFile"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.0, help="size of the checkpoint (at least 1.1)")
    parser.add_argument("--shard-gigabytes", type=float, default=0.55, help="largest size of one of its files")
    parser.add_argument("--output", type=Path, help="write the result as JSON to this file")
    parser.add_argument("--load", metavar="FOLDER", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.load:
        load(arguments.load)
        return
    import torch

    needed = int(6 * (arguments.gigabytes - 1) * 1e9 + 4e9)
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if available < needed:
        sys.exit(f"{available / 1e9:.1f} GB of memory are free, {needed / 1e9:.1f} are needed; use less --gigabytes")
    with tempfile.TemporaryDirectory(prefix="sglang-load-memory-") as name:
        shards = write_checkpoint(Path(name), arguments.gigabytes * 1e9, arguments.shard_gigabytes * 1e9)
        found = measure(Path(name))
    over = found["peak_rss"] - found["rss_before"] - found["weight_bytes"] - max(shards)
    result = {
        "command": "python benchmark/bench_load_memory.py"
        f" --gigabytes {arguments.gigabytes:g} --shard-gigabytes {arguments.shard_gigabytes:g}",
        "machine": {"python": platform.python_version(), "torch": torch.__version__, "system": platform.machine()},
        "checkpoint_bytes": sum(shards),
        "shards": len(shards),
        "largest_shard_bytes": max(shards),
        **found,
        "peak_over_weights_and_shard": over,
        "allowed": ALLOWANCE,
    }
    for key, value in result.items():
        print(f"{key:28} {value / MB:9.1f} MB" if isinstance(value, int) and key != "shards" else f"{key:28} {value}")
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    sys.exit(over >= ALLOWANCE)


if __name__ == "__main__":
    main()
