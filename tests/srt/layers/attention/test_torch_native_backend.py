"""The paged attention against a direct computation in float64."""

import pytest
import torch

from sglang.srt.layers.attention.base_attn_backend import AttentionTarget
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

HEADS, KV_HEADS, DIM = 6, 2, 10
CPU = torch.device("cpu")
GPU = pytest.param(
    torch.device("cuda"),
    marks=[pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")],
)


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float, window: int | None) -> torch.Tensor:
    """q [n, heads, dim] at the end of k, v [length, kv_heads, dim]."""
    q, k, v = (x.double() for x in (q, k, v))
    out = torch.empty_like(q)
    for i in range(q.shape[0]):
        position = k.shape[0] - q.shape[0] + i
        first = 0 if window is None else max(0, position - window + 1)
        for head in range(q.shape[1]):
            kv_head = head // (q.shape[1] // k.shape[1])
            scores = k[first : position + 1, kv_head] @ q[i, head] * scaling
            out[i, head] = scores.softmax(0) @ v[first : position + 1, kv_head]
    return out


@pytest.mark.parametrize("device", [CPU, GPU])
@pytest.mark.parametrize("window", [None, 1, 6])
@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "tolerance"),
    [
        (torch.float32, torch.float32, 1e-6),
        (torch.float32, torch.float8_e4m3fn, 1e-6),
        (torch.bfloat16, torch.bfloat16, 2e-2),
        (torch.float16, torch.float16, 3e-3),
    ],
)
@pytest.mark.parametrize("gather_tokens", [20, 16384])
@pytest.mark.parametrize("lengths", [[(0, 9), (12, 1), (5, 4), (3, 8)], [(0, 1), (1, 1), (15, 1)]])
def test_against_direct_computation(
    device: torch.device,
    window: int | None,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    tolerance: float,
    lengths: list[tuple[int, int]],
    gather_tokens: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """``lengths``: cached and new tokens of each request; query blocks of 3 and gathers of 20 are crossed."""
    monkeypatch.setattr("sglang.srt.layers.attention.torch_native_backend.QUERY_BLOCK", 3)
    monkeypatch.setattr("sglang.srt.layers.attention.torch_native_backend.GATHER_TOKENS", gather_tokens)
    torch.manual_seed(0)
    layer = RadixAttention(HEADS, DIM, 0.4, KV_HEADS, layer_id=1, sliding_window=window)
    scales = (1.0, 1.0)
    if kv_dtype == torch.float8_e4m3fn:
        scales = layer.k_scale, layer.v_scale = (0.37, 0.021)
    rows = ReqToTokenPool(7, 32, device)
    pool = MHATokenToKVPool(96, 4, kv_dtype, KV_HEADS, DIM, 2, device)
    other_layer = pool.get_key_buffer(0).view(torch.uint8).clone()
    backend = TorchNativeAttnBackend(AttentionTarget(device, dtype, kv_dtype, HEADS, KV_HEADS, DIM, page_size=4))
    slots = torch.randperm(96).to(device) + 4
    wanted = []
    new_q, new_k, new_v, out_slots, used = [], [], [], [], 0
    row_order = [5, 0, 3, 6][: len(lengths)]
    for row, (cached, new) in zip(row_order, lengths, strict=True):
        mine = slots[used : used + cached + new]
        used += cached + new
        rows.req_to_token[row, : cached + new] = mine.int()
        q, k, v = (torch.randn(cached + new, heads, DIM).to(device, dtype) for heads in (HEADS, KV_HEADS, KV_HEADS))
        pool.set_kv_buffer(layer, mine[:cached], k[:cached], v[:cached])
        stored_k, stored_v = k, v
        if kv_dtype == torch.float8_e4m3fn:
            stored_k, stored_v = ((x / s).to(kv_dtype).float() * s for x, s in zip((k, v), scales, strict=True))
        wanted.append(reference(q[cached:], stored_k, stored_v, 0.4, window))
        new_q.append(q[cached:])
        new_k.append(k[cached:])
        new_v.append(v[cached:])
        out_slots.append(mine[cached:])
    totals = [cached + new for cached, new in lengths]
    decode = all(new == 1 for _, new in lengths)
    batch = ForwardBatch(
        forward_mode=ForwardMode.DECODE if decode else ForwardMode.EXTEND,
        input_ids=torch.zeros(sum(new for _, new in lengths), dtype=torch.int64, device=device),
        positions=torch.zeros(sum(new for _, new in lengths), dtype=torch.int64, device=device),
        req_pool_indices=torch.tensor(row_order, device=device),
        seq_lens=torch.tensor(totals, device=device),
        seq_lens_list=totals,
        out_cache_loc=torch.cat(out_slots),
        extend_seq_lens=[new for _, new in lengths],
        sampling_info=SamplingBatchInfo(()),
        req_to_token_pool=rows,
        token_to_kv_pool=pool,
        attn_backend=backend,
    )
    backend.init_forward_metadata(batch)
    out = layer(torch.cat(new_q), torch.cat(new_k), torch.cat(new_v), batch)
    assert out.dtype == dtype
    expected = torch.cat(wanted).flatten(1)
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(pool.get_key_buffer(0).view(torch.uint8), other_layer)
