"""Any linear layer in any format, shared by any number of ranks, computes what one rank computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from sglang.srt.distributed import SINGLE, TensorParallelGroup
from sglang.srt.errors import CheckpointError
from sglang.srt.layers.linear import (
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from sglang.srt.layers.quantization.base_config import LinearMethodBase, QuantizationConfig
from sglang.srt.layers.quantization.fp8 import Fp8LinearMethod
from sglang.srt.layers.quantization.nvfp4 import Activation, NvFp4LinearMethod
from sglang.srt.layers.quantization.nvfp4_online import OnlineNvFp4LinearMethod
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead
from thread_ranks import on_every_rank, thread_groups

METHODS: dict[str, Callable[[], LinearMethodBase]] = {
    "plain": UnquantizedLinearMethod,
    "fp8": Fp8LinearMethod,
    "nvfp4": NvFp4LinearMethod,
    "nvfp4 dynamic": lambda: NvFp4LinearMethod(activation=Activation.DYNAMIC),
    "nvfp4 weight-only": lambda: NvFp4LinearMethod(activation=Activation.NONE),
    "online": lambda: OnlineNvFp4LinearMethod(Activation.DYNAMIC),
    "online weight-only": lambda: OnlineNvFp4LinearMethod(Activation.NONE),
}


class OneMethod(QuantizationConfig):
    def __init__(self, name: str) -> None:
        self.name = name

    @classmethod
    def get_name(cls) -> str:
        return "one"

    def get_quant_method(self, layer: nn.Module, prefix: str) -> LinearMethodBase:
        return METHODS[self.name]()


def tensors(method: str, n: int, k: int, g: torch.Generator) -> dict[str, torch.Tensor]:
    """One checkpoint layer; rows and columns differ in size, so that a wrong piece or scale shows."""
    own_scale = 0.001 + 0.01 * torch.rand((), generator=g)
    if method == "fp8":
        weight = torch.randn(n, k, generator=g).mul(60).clamp(-448, 448).to(torch.float8_e4m3fn)
        return {"weight": weight, "weight_scale": own_scale, "input_scale": 10 * own_scale}
    if method.startswith("nvfp4"):
        return {
            "weight": torch.randint(0, 256, (n, k // 2), generator=g, dtype=torch.uint8),
            "weight_scale": torch.randint(1, 0x7F, (n, k // 16), generator=g, dtype=torch.uint8),
            "weight_scale_2": own_scale,
            "input_scale": own_scale,
        }
    return {"weight": torch.randn(n, k, generator=g) * torch.rand(n, 1, generator=g) * torch.rand(1, k, generator=g)}


def fill(layer: LinearBase, stored: dict[Any, dict[str, torch.Tensor]]) -> LinearBase:
    for param in layer.parameters():
        param.data.view(torch.uint8).fill_(0xFF)  # NaN in every floating point format
    for shard_id, values in stored.items():
        for key, value in values.items():
            if getattr(layer, key, None) is not None:
                layer.weight_loader(getattr(layer, key), value, shard_id)
    layer.quant_method.process_weights_after_loading(layer)
    return layer


@st.composite
def layers(draw: st.DrawFn, ranks: int) -> tuple[Callable[..., LinearBase], int, dict[Any, int]]:
    """A layer's constructor, its K, and N of each of its checkpoint tensors by shard id."""
    blocks = draw(st.integers(1, 5))
    kind = draw(st.sampled_from(["replicated", "row", "merged", "qkv", "head"]))
    if kind == "replicated":
        n = draw(st.integers(1, 50))
        return (lambda **args: ReplicatedLinear(16 * blocks, n, **args)), 16 * blocks, {None: n}
    if kind == "row":
        k, n = 16 * blocks * ranks, draw(st.integers(1, 50))
        return (lambda **args: RowParallelLinear(k, n, **args)), k, {None: n}
    k = 16 * blocks
    if kind == "merged":
        sizes = [ranks * size for size in draw(st.lists(st.integers(1, 20), min_size=1, max_size=3))]
        ids = list(range(len(sizes))) if len(sizes) > 1 else [None]
        parts = dict(zip(ids, sizes, strict=True))
        return (lambda **args: MergedColumnParallelLinear(k, sizes, **args)), k, parts
    if kind == "head":
        vocab = draw(st.integers(ranks * (ranks - 1) + 1, 300))
        return (lambda **args: ParallelLMHead(vocab, k, **without_bias(args))), k, {None: vocab}
    head = draw(st.sampled_from([1, 3, 8]))
    kv_heads = draw(st.sampled_from([1, 2, 4, 8]))
    heads = max(kv_heads, ranks) * draw(st.integers(1, 3))
    parts = {"q": heads * head, "k": kv_heads * head, "v": kv_heads * head}
    return (lambda **args: QKVParallelLinear(k, head, heads, kv_heads, **args)), k, parts


def without_bias(arguments: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in arguments.items() if key != "bias"}


@settings(max_examples=120, deadline=None)
@given(st.data(), st.sampled_from([2, 4]), st.sampled_from(sorted(METHODS)), st.booleans(), st.integers(0, 9))
def test_ranks_compute_what_one_computes(data: st.DataObject, ranks: int, method: str, bias: bool, seed: int) -> None:
    make, k, sizes = data.draw(layers(ranks))
    g = torch.Generator().manual_seed(seed)
    stored = {shard_id: tensors(method, n, k, g) for shard_id, n in sizes.items()}
    if bias:
        for shard_id, n in sizes.items():
            stored[shard_id]["bias"] = torch.randn(n, generator=g)
    x = torch.randn(3, k, generator=g) * torch.rand(1, k, generator=g)

    def made(tp: TensorParallelGroup) -> LinearBase:
        layer = make(bias=bias, params_dtype=torch.float32, quant_config=OneMethod(method), prefix="a", tp=tp)
        return fill(layer, stored)

    with torch.inference_mode():
        whole = made(SINGLE)(x).split(list(sizes.values()), dim=-1)
    groups = thread_groups(ranks)

    @torch.inference_mode()
    def run(rank: int) -> tuple[LinearBase, torch.Tensor]:
        layer = made(groups[rank])
        columns = layer.input_size_per_partition
        return layer, layer(x[:, rank * columns :][:, :columns] if layer.input_is_sharded else x)

    held = [torch.zeros(size, dtype=torch.bool) for size in sizes.values()]
    for layer, y in on_every_rank(ranks, run):
        if not isinstance(layer, MergedColumnParallelLinear | QKVParallelLinear):  # whole rows on every rank
            close(y, whole[0])
            continue
        for part, expected, mark in zip(layer.parts, whole, held, strict=True):
            rows = slice(part.start, part.start + part.size)
            close(y[:, part.offset :][:, : part.size], expected[:, rows])
            mark[rows] = True
    assert all(mark.all() or not mark.any() for mark in held)


def close(y: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-5 * max(1.0, float(expected.abs().max())))


@pytest.mark.parametrize("method", ["nvfp4", "online"])
def test_a_block_over_two_ranks_is_refused_before_loading(method: str) -> None:
    with pytest.raises(
        CheckpointError, match=r"layer a.down_proj: .* 24 per rank \(K=48 in all\); use a smaller --tp-size"
    ):
        RowParallelLinear(48, 32, quant_config=OneMethod(method), prefix="a.down_proj", tp=TensorParallelGroup(0, 2))


def test_a_weight_with_nan_is_refused_by_all_ranks() -> None:
    """Else the others would wait for the one that has it."""
    weight = torch.ones(4, 64)
    weight[1, 40] = float("nan")
    groups = thread_groups(2)

    def run(rank: int) -> str:
        layer = RowParallelLinear(64, 4, quant_config=OneMethod("online"), prefix="a", tp=groups[rank])
        with pytest.raises(CheckpointError) as caught:
            fill(layer, {None: {"weight": weight}})
        return str(caught.value)

    assert on_every_rank(2, run) == ["layer a: the weight holds NaN or infinity"] * 2
