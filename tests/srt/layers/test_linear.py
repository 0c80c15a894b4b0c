"""Sharding: what every rank loads, put together again, is the checkpoint's tensor."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.srt.distributed import TensorParallelGroup
from sglang.srt.errors import CheckpointError
from sglang.srt.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from sglang.srt.layers.quantization.modelopt_quant import ModelOptFp4Config

NVFP4 = ModelOptFp4Config()


def tensors(n: int, k: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """One NVFP4 linear as a checkpoint stores it."""
    g = torch.Generator().manual_seed(seed)
    return {
        "weight": torch.randint(0, 256, (n, k // 2), generator=g, dtype=torch.uint8),
        "weight_scale": torch.randint(1, 0x7F, (n, k // 16), generator=g, dtype=torch.uint8).view(torch.float8_e4m3fn),
        "weight_scale_2": torch.tensor(0.01 * (seed + 1)),
        "input_scale": torch.tensor(0.1 * (seed + 1)),
    }


@settings(max_examples=30, deadline=None)
@given(st.sampled_from([1, 2, 4]), st.integers(1, 3), st.integers(1, 3), st.sampled_from([1, 2, 4, 8]))
def test_qkv_shards(ranks: int, q_per_kv: int, blocks: int, kv_heads: int) -> None:
    head, k = 8, blocks * 16
    heads = kv_heads * q_per_kv * (ranks if kv_heads < ranks else 1)
    if heads % ranks or max(kv_heads, ranks) % min(kv_heads, ranks):
        return
    files = {
        name: tensors(count * head, k, seed)
        for seed, (name, count) in enumerate({"q": heads, "k": kv_heads, "v": kv_heads}.items())
    }
    for rank in range(ranks):
        layer = QKVParallelLinear(
            k, head, heads, kv_heads, quant_config=NVFP4, prefix="qkv_proj", tp=TensorParallelGroup(rank, ranks)
        )
        for shard_id, file in files.items():
            for key, value in file.items():
                layer.weight_loader(getattr(layer, key), value, shard_id)
        q = layer.num_heads * head
        kv = layer.num_kv_heads * head
        kv_start = rank * kv if kv_heads >= ranks else rank // (ranks // kv_heads) * kv
        for key in ("weight", "weight_scale"):
            expected = torch.cat(
                [
                    files["q"][key].view(torch.uint8)[rank * q : (rank + 1) * q],
                    files["k"][key].view(torch.uint8)[kv_start : kv_start + kv],
                    files["v"][key].view(torch.uint8)[kv_start : kv_start + kv],
                ]
            )
            assert torch.equal(getattr(layer, key).view(torch.uint8), expected)
        assert torch.allclose(layer.weight_scale_2, torch.tensor([0.01, 0.02, 0.03]))
        assert torch.allclose(layer.input_scale, torch.tensor([0.1, 0.2, 0.3]))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_column_and_row_shards(ranks: int) -> None:
    n, k = 64, 128
    file = tensors(n, k)
    columns = [ColumnParallelLinear(k, n, quant_config=NVFP4, tp=TensorParallelGroup(r, ranks)) for r in range(ranks)]
    rows = [RowParallelLinear(k, n, quant_config=NVFP4, tp=TensorParallelGroup(r, ranks)) for r in range(ranks)]
    for layer in (*columns, *rows):
        for key, value in file.items():
            layer.weight_loader(getattr(layer, key), value)
    for key in ("weight", "weight_scale"):
        whole = file[key].view(torch.uint8)
        assert torch.equal(torch.cat([getattr(layer, key).view(torch.uint8) for layer in columns]), whole)
        assert torch.equal(torch.cat([getattr(layer, key).view(torch.uint8) for layer in rows], dim=1), whole)


def test_a_file_that_stores_the_fused_layer() -> None:
    gate, up = tensors(32, 32, 1), tensors(32, 32, 2)
    by_part, at_once = (
        MergedColumnParallelLinear(32, [32, 32], quant_config=NVFP4, prefix="gate_up_proj") for _ in "ab"
    )
    for key in gate:
        by_part.weight_loader(getattr(by_part, key), gate[key], 0)
        by_part.weight_loader(getattr(by_part, key), up[key], 1)
        both = (gate[key], up[key])
        fused = (
            torch.cat([t.view(torch.uint8) for t in both]).view(gate[key].dtype)
            if gate[key].dim()
            else torch.stack(both)
        )
        at_once.weight_loader(getattr(at_once, key), fused)
    for key in gate:
        assert torch.equal(getattr(by_part, key).data.view(torch.uint8), getattr(at_once, key).data.view(torch.uint8))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: {"weight": t["weight"].T.contiguous()}, r"expected shape \[64, 16\], found \[16, 64\]"),
        (
            lambda t: {"weight": torch.zeros(64, 32, dtype=torch.bfloat16)},
            "expected dtype torch.uint8, found torch.bfloat16",
        ),
        (lambda t: {"weight_scale": t["weight_scale"][:, :1]}, r"expected shape \[64, 2\], found \[64, 1\]"),
        (lambda t: {"weight_scale_2": torch.ones(2)}, "expected one value"),
    ],
)
def test_wrong_tensors(change, words: str) -> None:  # type: ignore[no-untyped-def]
    layer = ReplicatedLinear(32, 64, quant_config=NVFP4)
    for key, value in change(tensors(64, 32)).items():
        with pytest.raises(CheckpointError, match=words):
            layer.weight_loader(getattr(layer, key), value)


def test_scale_bytes_are_reinterpreted_never_converted() -> None:
    layer = ReplicatedLinear(32, 64, quant_config=NVFP4)
    scale = tensors(64, 32)["weight_scale"]
    layer.weight_loader(layer.weight_scale, scale.view(torch.uint8))
    assert torch.equal(layer.weight_scale.view(torch.uint8), scale.view(torch.uint8))


def test_sizes_that_ranks_cannot_share() -> None:
    with pytest.raises(CheckpointError, match=r"mlp: output size \(30\) can't be divided by --tp-size 4"):
        ColumnParallelLinear(32, 30, prefix="mlp", tp=TensorParallelGroup(0, 4))
    with pytest.raises(CheckpointError, match=r"multiple of 16, it is 24 per rank \(K=48 in all\)"):
        RowParallelLinear(48, 32, quant_config=NVFP4, prefix="down", tp=TensorParallelGroup(0, 2))


def test_bias_is_added_once_and_by_part() -> None:
    layer = MergedColumnParallelLinear(16, [8, 8], bias=True, params_dtype=torch.float32)
    weight, bias = torch.randn(16, 16), torch.randn(16)
    for part in (0, 1):
        layer.weight_loader(layer.weight, weight[part * 8 : part * 8 + 8], part)
        layer.weight_loader(layer.bias, bias[part * 8 : part * 8 + 8], part)
    layer.quant_method.process_weights_after_loading(layer)
    x = torch.randn(3, 16)
    assert torch.allclose(layer(x), x @ weight.T + bias, atol=1e-6)
