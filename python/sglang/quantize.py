"""``python -m sglang.quantize --model-path BF16 --output DIR``: a dense checkpoint to NVFP4 in ModelOpt's format.

Weights are rounded to nearest and become byte for byte those of NVIDIA's ModelOpt. With the scheme ``nvfp4``
activations are 4-bit too and get static scales from a run of the model over calibration text; ``w4a16_nvfp4`` leaves
them alone.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isfinite, prod
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from tqdm import tqdm

from sglang import __version__
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.errors import ArgumentError, CheckpointError, StartupError
from sglang.srt.layers.quantization.base_config import PACKED_MODULES
from sglang.srt.layers.quantization.nvfp4_utils import BLOCK_SIZE
from sglang.srt.layers.quantization.nvfp4_weight import (
    global_scale_from_amax,
    quantize_nvfp4_weight,
    unify_fused_amax,
)
from sglang.srt.layers.quantization.patterns import ModulePatterns
from sglang.srt.model_loader.calibration import (
    calibrate_input_amax,
    read_calibration_text,
    tokenize_calibration_text,
)
from sglang.srt.model_loader.checkpoint_reader import FLOAT_DTYPES, CheckpointReader
from sglang.srt.model_loader.loader import load_weights
from sglang.srt.model_loader.weight_utils import INDEX_NAME
from sglang.srt.models.registry import get_model_class
from sglang.srt.platforms import resolve_device
from sglang.srt.utils.cli import ArgumentParser, run_main
from sglang.srt.utils.hub import CONFIG_PATTERNS, WEIGHT_PATTERNS, resolve_folder

logger = logging.getLogger(__name__)

Scheme = Literal["nvfp4", "w4a16_nvfp4"]

ALWAYS_EXCLUDED = ("lm_head", "model.embed_tokens")
MAX_SHARD_BYTES = 5 * 10**9

_PROJECTIONS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
# Beside the weights and config.json, which are written anew.
_COPIED_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "*.jinja",
    "chat_template.json",
    "generation_config.json",
    "LICENSE*",
    "NOTICE*",
)


@dataclass(frozen=True)
class QuantizationSummary:
    """What :func:`quantize_checkpoint` did; sizes in bytes of tensors, times in seconds."""

    output: Path
    scheme: Scheme
    layers_quantized: int
    layers_excluded: int
    bytes_before: int
    bytes_after: int
    seconds: float
    peak_memory: int

    def __str__(self) -> str:
        return (
            f"{self.output}: {self.layers_quantized} linear layers quantised to {self.scheme}, "
            f"{self.layers_excluded} excluded. Size {self.bytes_before / 1e6:,.1f} MB -> "
            f"{self.bytes_after / 1e6:,.1f} MB, {self.seconds:.1f} s, peak memory {self.peak_memory / 1e6:,.0f} MB"
        )


def quantize_checkpoint(
    model_path: str,
    output: str,
    scheme: Scheme = "nvfp4",
    calibration_text: str | None = None,
    exclude: Sequence[str] = (),
    show_progress: bool = True,
) -> QuantizationSummary:
    """Write the NVFP4 version of a bf16, fp16 or fp32 checkpoint.

    One tensor is worked on at a time and one output file (at most 5 GB) collected in memory; calibration holds one
    decoder layer. The result is written beside ``output`` and renamed at the end.

    Args:
        model_path: folder with ``config.json`` and safetensors weights, or a hub id.
        output: folder to create; it may exist if it is empty.
        scheme: ``nvfp4`` (weights and activations) or ``w4a16_nvfp4`` (weights only).
        calibration_text: UTF-8 file to calibrate with instead of the built-in text; only for ``nvfp4``. Its hidden
            states stay in memory: tokens x hidden size x bytes of the dtype.
        exclude: globs of module names (``model.layers.0.*``) to leave as they are. ``lm_head`` and
            ``model.embed_tokens`` always are.
        show_progress: draw progress bars on stderr.

    Raises:
        ArgumentError: unknown scheme, an output folder in use, a pattern that matches nothing, an unusable text.
        CheckpointError: the input is damaged, incomplete, not finite, already quantised or not supported.
        StartupError: not enough disk space, or the output can't be written.
    """
    started = time.perf_counter()
    if scheme not in get_args(Scheme):
        raise ArgumentError(f"--scheme {scheme}: unknown; valid: {', '.join(get_args(Scheme))}")
    if calibration_text is not None and scheme != "nvfp4":
        raise ArgumentError(f"--calibration-text has no effect with --scheme {scheme}, which leaves activations alone")
    target = _check_output(output)
    text = read_calibration_text(calibration_text) if scheme == "nvfp4" else None
    source = resolve_folder(model_path, None, (*CONFIG_PATTERNS, *WEIGHT_PATTERNS))
    config = ModelConfig.from_folder(source)
    if config.quantization_config or config.hf_quant_config:
        raise CheckpointError(f"{source} is already quantised; give the bf16 or fp16 checkpoint it was made from")
    reader = CheckpointReader(source)
    linears = [f"model.layers.{i}.{name}" for i in range(config.num_hidden_layers) for name in _PROJECTIONS]
    excluded = _excluded_modules(linears, exclude)
    quantized = [name for name in linears if name not in excluded]
    _check_tensors(source, reader, linears, quantized)
    _check_model(source, reader, config)
    shards = _plan_shards(reader, quantized)
    bytes_after = sum(_quantized_bytes(reader, name, quantized) for name in reader.tensors)
    _check_disk_space(target, bytes_after)

    device = resolve_device()
    weight_amax = _measure_weights(source, reader, quantized, show_progress)
    weight_amax = unify_fused_amax(weight_amax, PACKED_MODULES.values())
    input_amax: dict[str, float] = {}
    if text is not None:
        token_ids = tokenize_calibration_text(source, text, config.context_len)
        measured = calibrate_input_amax(config.hf_config, reader, token_ids, device, show_progress=show_progress)
        input_amax = {name: measured[name] for name in quantized}  # parts of a fused layer have the same input

    # What is killed leaves a folder whose name says so, without a config.json. A mount point can't be replaced.
    mounted = target.is_mount()
    partial = (target if mounted else target.parent) / f"{target.name}.incomplete-{os.getpid()}"
    try:
        partial.mkdir(parents=True)
        _write_shards(partial, shards, _converted(reader, weight_amax, input_amax, device), show_progress)
        for file in _files_to_copy(source):
            shutil.copy(file, partial / file.name)
        _write_configs(partial, source, scheme, excluded)
        if mounted:
            for file in sorted(partial.iterdir(), key=lambda file: file.name == "config.json"):
                file.rename(target / file.name)
        else:
            partial.rename(target)
    except (OSError, SafetensorError) as error:
        raise StartupError(f"--output {output}: writing failed: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return QuantizationSummary(
        output=target,
        scheme=scheme,
        layers_quantized=len(quantized),
        layers_excluded=len(linears) - len(quantized),
        bytes_before=sum(info.nbytes for info in reader.tensors.values()),
        bytes_after=bytes_after,
        seconds=time.perf_counter() - started,
        peak_memory=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024),
    )


def _check_output(output: str) -> Path:
    target = Path(output).expanduser().resolve()
    if target.is_dir() and any(target.iterdir()):
        raise ArgumentError(f"--output {output}: the folder is not empty; remove it or choose another")
    if target.exists() and not target.is_dir():
        raise ArgumentError(f"--output {output}: is a file; choose a folder")
    return target


def _excluded_modules(linears: Sequence[str], patterns: Sequence[str]) -> list[str]:
    """Names for the exclusion list: the two that always are, and every linear layer that a pattern matches."""
    known = [*ALWAYS_EXCLUDED, *linears]
    matched: set[str] = set()
    for pattern in patterns:
        try:
            matcher = ModulePatterns([pattern])
        except CheckpointError as error:
            raise ArgumentError(f"--exclude {pattern}: {error.__cause__}") from error
        names = [name for name in known if matcher.match(name)]
        if not names:
            raise ArgumentError(
                f"--exclude {pattern}: matches no layer; names look like {linears[0]}, lm_head; '*' crosses dots"
            )
        matched.update(names)
    if matched.issuperset(linears):
        raise ArgumentError("--exclude leaves no layer to quantise")
    return [name for name in known if name in matched or name in ALWAYS_EXCLUDED]


def _check_tensors(source: Path, reader: CheckpointReader, linears: Sequence[str], quantized: Sequence[str]) -> None:
    for name, info in reader.tensors.items():
        if info.dtype not in FLOAT_DTYPES:
            raise CheckpointError(
                f"{info.file}: tensor {name} has dtype {info.dtype}; only bf16, fp16 and fp32 checkpoints can be "
                "quantised, and this one may be quantised already"
            )
    for module in linears:
        if f"{module}.weight" not in reader.tensors:
            raise CheckpointError(f"{source}: tensor {module}.weight is missing from the weights")
    for module in quantized:
        shape = reader.tensors[f"{module}.weight"].shape
        if len(shape) != 2:
            raise CheckpointError(f"{source}: tensor {module}.weight has shape {list(shape)}, not two dimensions")
        if shape[1] % BLOCK_SIZE:
            raise CheckpointError(
                f"{source}: tensor {module}.weight has {shape[1]} input features, not a multiple of {BLOCK_SIZE}; "
                f"leave it out with --exclude '*.{module.rpartition('.')[2]}'"
            )


def _check_model(source: Path, reader: CheckpointReader, config: ModelConfig) -> None:
    """Let the loader judge names and shapes without values: those of the output follow from them."""
    with torch.device("meta"):
        model = get_model_class(config.architecture)(config.hf_config)
        stored = (
            (name, torch.empty(info.shape, dtype=FLOAT_DTYPES[info.dtype])) for name, info in reader.tensors.items()
        )
        try:
            load_weights(model, stored)
        except CheckpointError as error:
            raise CheckpointError(f"{source} is not what its config.json says: {error}") from error


def _quantized_bytes(reader: CheckpointReader, name: str, quantized: Sequence[str]) -> int:
    """What tensor ``name`` and its scales take in the output (input scales are not worth counting)."""
    info = reader.tensors[name]
    if name.removesuffix(".weight") not in quantized:
        return info.nbytes
    return prod(info.shape) // 2 + prod(info.shape) // BLOCK_SIZE


def _plan_shards(reader: CheckpointReader, quantized: Sequence[str]) -> list[list[str]]:
    """Input tensor names by output file, in the order of the input files."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name in reader.tensors:
        size = _quantized_bytes(reader, name, quantized)
        if shards[-1] and filled + size > MAX_SHARD_BYTES:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def _check_disk_space(target: Path, needed: int) -> None:
    folder = next(folder for folder in (target, *target.parents) if folder.is_dir())
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise StartupError(f"--output: {needed / 1e9:.1f} GB are needed in {folder}, {free / 1e9:.1f} GB are free")


def _measure_weights(
    source: Path, reader: CheckpointReader, quantized: Sequence[str], show_progress: bool
) -> dict[str, float]:
    """Check that every tensor is finite; return the largest magnitude of each weight to quantise by module name."""
    amax: dict[str, float] = {}
    wanted = set(quantized)
    total = sum(info.nbytes for info in reader.tensors.values())
    with tqdm(total=total, desc="Reading weights", unit="B", unit_scale=True, disable=not show_progress) as progress:
        for name, tensor in reader.read(reader.tensors):
            largest = 0.0
            if tensor.numel():
                low, high = torch.aminmax(tensor)
                largest = max(-float(low), float(high))
            if not isfinite(largest):
                raise CheckpointError(f"{source}: tensor {name} has NaN or infinite values")
            if (module := name.removesuffix(".weight")) in wanted:
                amax[module] = largest
            progress.update(tensor.nbytes)
    return amax


def _converted(
    reader: CheckpointReader, weight_amax: dict[str, float], input_amax: dict[str, float], device: torch.device
) -> Iterator[dict[str, torch.Tensor]]:
    """For each input tensor, in order, the tensors that take its place."""
    for name, tensor in reader.read(reader.tensors):
        module = name.removesuffix(".weight")
        if module not in weight_amax:
            yield {name: tensor}
            continue
        weight_scale_2 = global_scale_from_amax(weight_amax[module])
        packed, weight_scale = quantize_nvfp4_weight(tensor.to(device), weight_scale_2)
        result = {name: packed.cpu(), f"{module}.weight_scale": weight_scale.cpu()}
        result[f"{module}.weight_scale_2"] = weight_scale_2
        if module in input_amax:
            result[f"{module}.input_scale"] = global_scale_from_amax(input_amax[module])
        yield result


def _write_shards(
    folder: Path, shards: list[list[str]], converted: Iterator[dict[str, torch.Tensor]], show_progress: bool
) -> None:
    weight_map: dict[str, str] = {}
    size = 0
    with tqdm(total=sum(map(len, shards)), desc="Quantizing", unit="tensor", disable=not show_progress) as progress:
        for number, names in enumerate(shards, 1):
            file = f"model-{number:05}-of-{len(shards):05}.safetensors" if len(shards) > 1 else "model.safetensors"
            tensors: dict[str, torch.Tensor] = {}
            for _ in names:
                tensors.update(next(converted))
                progress.update()
            path = folder / file
            path.touch()
            mode = path.stat().st_mode
            save_file(tensors, path, metadata={"format": "pt"})
            path.chmod(mode)  # safetensors makes files that only their owner can read
            weight_map.update(dict.fromkeys(tensors, file))
            size += sum(tensor.nbytes for tensor in tensors.values())
    if len(shards) > 1:
        _write_json(
            folder / INDEX_NAME, {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
        )


def _files_to_copy(source: Path) -> list[Path]:
    return sorted({file for pattern in _COPIED_FILES for file in source.glob(pattern) if file.is_file()})


def _write_configs(folder: Path, source: Path, scheme: Scheme, excluded: list[str]) -> None:
    """``hf_quant_config.json`` and ``config.json``, each with the quantisation in its own layout of ModelOpt's."""
    producer = {"name": "sglang-nvfp4", "version": __version__}
    algorithm = scheme.upper()
    values = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": BLOCK_SIZE}
    group: dict[str, Any] = {"input_activations": values} if scheme == "nvfp4" else {}
    group |= {"weights": values, "targets": ["Linear"]}
    details = {
        "quant_algo": algorithm,
        "kv_cache_quant_algo": None,
        "group_size": BLOCK_SIZE,
        "exclude_modules": excluded,
    }
    _write_json(folder / "hf_quant_config.json", {"producer": producer, "quantization": details})
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = {
        "config_groups": {"group_0": group},
        "ignore": excluded,
        "quant_algo": algorithm,
        "producer": producer,
        "quant_method": "modelopt",
    }
    _write_json(folder / "config.json", config)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> None:
    """The command line; ``argv`` defaults to the process's."""
    parser = ArgumentParser("python -m sglang.quantize", "Quantise a dense checkpoint to NVFP4 (ModelOpt format).")
    add = parser.add_argument
    add("--model-path", required=True, metavar="BF16", help="bf16, fp16 or fp32 checkpoint: folder or hub id")
    add("--output", required=True, metavar="DIR", help="folder to create")
    add("--scheme", default="nvfp4", choices=get_args(Scheme), help="weights and activations, or weights only")
    add("--calibration-text", metavar="FILE", help="UTF-8 text for the input scales (default: a built-in one)")
    add("--exclude", nargs="+", action="extend", default=[], metavar="PATTERN", help="layers to leave, names or globs")
    args = parser.parse_args(argv)
    # Let an ended process clean up as an interrupted one does.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    print(quantize_checkpoint(args.model_path, args.output, args.scheme, args.calibration_text, args.exclude))


if __name__ == "__main__":
    run_main(main)
