"""Loads whole models over generated checkpoints and holds every linear layer against the oracle.

Each layer's output is compared for the very input that the layer got, part by part and row by row, so that nothing
hides behind a large neighbour or drifts in from before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import FUSED
from oracle import TOLERANCE, Oracle, relative_error
from safetensors.torch import save_file
from torch import nn

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed import SINGLE, TensorParallelGroup
from sglang.srt.errors import CheckpointError
from sglang.srt.layers.linear import LinearBase, MergedColumnParallelLinear, RowParallelLinear
from sglang.srt.layers.quantization.base_config import QuantizationConfig
from sglang.srt.layers.quantization.modelopt_quant import ModelOptFp4Config
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_loader.loader import load_model
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from thread_ranks import on_every_rank, thread_groups

TOKENS = tuple(range(5, 18))


def load(folder: Path, tp: TensorParallelGroup = SINGLE, **args: Any) -> ModelRunner:
    """A whole model runner, as the scheduler makes it; bf16 unless ``args`` say otherwise."""
    given = {"device": "cpu", "dtype": "bfloat16", "max_total_tokens": 64, "max_running_requests": 2, **args}
    server_args = ServerArgs.from_kwargs(
        model_path=str(folder), random_seed=0, context_length=64, tp_size=tp.size, **given
    )
    return ModelRunner(server_args, ModelConfig.from_server_args(server_args), tp)


def load_ranks(folder: Path, size: int, dtype: str = "bfloat16", **args: Any) -> list[ModelRunner]:
    """The runners of ``size`` ranks (threads) that share one model."""
    if size == 1:
        return [load(folder, dtype=dtype, **args)]
    groups = thread_groups(size)
    previous = torch.get_default_dtype()
    # Each rank sets the process's default dtype while it builds its model, and sets back what it found.
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        return on_every_rank(size, lambda rank: load(folder, groups[rank], dtype=dtype, **args))
    finally:
        torch.set_default_dtype(previous)


def assert_refused(folder: Path, *words: str, error: type[Exception] = CheckpointError, **args: Any) -> None:
    """Loading fails, and the message has all of ``words``."""
    with pytest.raises(error) as caught:
        load(folder, **args)
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in: {caught.value}"


def prompt_batch(runner: ModelRunner, tokens: Sequence[int] = TOKENS, temperature: float = 0.0) -> ForwardBatch:
    """One prompt in an empty cache."""
    count = len(tokens)
    slots = torch.arange(1, count + 1)
    runner.req_to_token_pool.req_to_token[0, :count] = slots
    params = [SamplingParams(temperature=temperature)]
    return ForwardBatch(
        forward_mode=ForwardMode.EXTEND,
        input_ids=torch.tensor(tokens),
        positions=torch.arange(count),
        req_pool_indices=torch.tensor([0]),
        seq_lens=torch.tensor([count]),
        seq_lens_list=[count],
        out_cache_loc=slots,
        extend_seq_lens=[count],
        sampling_info=SamplingBatchInfo.from_params(params, runner.model_config.vocab_size, runner.device),
        req_to_token_pool=runner.req_to_token_pool,
        token_to_kv_pool=runner.token_to_kv_pool,
        attn_backend=runner.attn_backend,
    )


def forward(runner: ModelRunner, tokens: Sequence[int] = TOKENS) -> torch.Tensor:
    """float32 logits [1, vocabulary] after the prompt ``tokens``."""
    return runner.forward(prompt_batch(runner, tokens)).next_token_logits


def logits_of(folder: Path, **args: Any) -> torch.Tensor:
    return forward(load(folder, **args))


def linear_layers(runner: ModelRunner) -> dict[str, LinearBase]:
    """The layers that the model calls, by name; a fused layer under its fused name."""
    found = {name: module for name, module in runner.model.named_modules() if isinstance(module, LinearBase)}
    return {name: module for name, module in found.items() if name.rpartition(".")[0] not in found}


def parts_of(name: str) -> list[str]:
    parent, _, leaf = name.rpartition(".")
    return [f"{parent}.{part}" for part in FUSED.get(leaf, ())] or [name]


Call = tuple[torch.Tensor, torch.Tensor]


def watch(layers: dict[str, LinearBase]) -> dict[str, Call]:
    """Will hold the last input and output of each layer."""
    calls: dict[str, Call] = {}
    for name, module in layers.items():

        def keep(_: object, inputs: tuple[torch.Tensor, ...], output: torch.Tensor, name: str = name) -> None:
            calls[name] = inputs[0].clone(), output.clone()

        module.register_forward_hook(keep)
    return calls


def part_errors(layer: LinearBase, y: torch.Tensor, expected: Sequence[Any]) -> list[float]:
    """Error of each part of one rank's output. Row-parallel layers and heads return whole rows on every rank."""
    if layer.input_is_sharded or isinstance(layer, ParallelLMHead):
        return [relative_error(y, expected[0])]
    assert sum(part.size for part in layer.parts) == y.shape[-1]
    return [
        relative_error(y[..., part.offset : part.offset + part.size], whole[..., part.start : part.start + part.size])
        for part, whole in zip(layer.parts, expected, strict=True)
    ]


def layer_errors(runners: Sequence[ModelRunner], oracle: Oracle) -> tuple[dict[str, float], list[torch.Tensor]]:
    """Largest error over the ranks of every part of every linear layer in one forward pass, by checkpoint name, and
    each rank's logits."""
    calls = [watch(linear_layers(runner)) for runner in runners]
    logits = on_every_rank(len(runners), lambda rank: forward(runners[rank]))
    errors: dict[str, float] = {}
    for name, layer in linear_layers(runners[0]).items():
        inputs = [call[name][0] for call in calls]
        x = torch.cat(inputs, dim=-1) if layer.input_is_sharded else inputs[0]
        expected = oracle.outputs(parts_of(name), x)
        for runner, call in zip(runners, calls, strict=True):
            y = call[name][1]
            for part, error in zip(parts_of(name), part_errors(linear_layers(runner)[name], y, expected), strict=True):
                errors[part] = max(error, errors.get(part, 0.0))
    return errors, logits


def assert_layers_match(
    folder: Path,
    activation: Callable[[str], str] | None = None,
    dtypes: Sequence[str] = ("bfloat16", "float32"),
    tp_size: int = 1,
    source: Path | None = None,
    **args: Any,
) -> torch.Tensor:
    """Load the folder in each dtype and hold every part of every layer against its bytes; the last dtype's logits.

    Args:
        activation: see :class:`Oracle`.
        tp_size: ranks (threads) that share the model.
        source: folder of a checkpoint with the same tensors under plain names, where the file has others.
    """
    oracle = Oracle((source or folder) / "model.safetensors", activation)
    for dtype in dtypes:
        runners = load_ranks(folder, tp_size, dtype, **args)
        errors, logits = layer_errors(runners, oracle)
        wrong = {name: error for name, error in errors.items() if not error <= TOLERANCE[runners[0].dtype]}
        assert not wrong, (dtype, wrong)
        assert all(each.isfinite().all() and torch.equal(each, logits[0]) for each in logits)
    return logits[0]


def load_linear(
    folder: Path,
    tensors: dict[str, torch.Tensor],
    sizes: dict[str, int],
    k: int,
    dtype: torch.dtype,
    config: QuantizationConfig | None = None,
    tp: TensorParallelGroup = SINGLE,
    row_parallel: bool = False,
) -> LinearBase:
    """One layer with parts of these sizes, loaded from a file with ``tensors`` (names below ``model.``). It is sharded
    by rows, or by columns if ``row_parallel`` (one part)."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: value.contiguous() for name, value in tensors.items()}, folder / "model.safetensors")
    config = config or ModelOptFp4Config()
    name = next(iter(sizes)) if len(sizes) == 1 else "fused_proj"
    config.packed_modules_mapping = {} if len(sizes) == 1 else {name: list(sizes)}
    bias = any(key.endswith(".bias") for key in tensors)
    options: dict[str, Any] = {"bias": bias, "params_dtype": dtype, "quant_config": config, "tp": tp}
    parts = list(sizes.values())
    layer: LinearBase
    if row_parallel:
        layer = RowParallelLinear(k, parts[0], prefix=f"model.{name}", **options)
    else:
        layer = MergedColumnParallelLinear(k, parts, prefix=f"model.{name}", **options)
    model = nn.Module()
    model.packed_modules_mapping = config.packed_modules_mapping  # type: ignore[assignment]
    model.model = nn.Module()
    model.model.add_module(name, layer)
    load_model(model, folder, progress=False)
    return layer
