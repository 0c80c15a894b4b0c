from types import SimpleNamespace

import pytest
import torch

from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool

CPU = torch.device("cpu")


def layer(layer_id: int = 0, k_scale: float | None = None, v_scale: float | None = None) -> SimpleNamespace:
    return SimpleNamespace(layer_id=layer_id, k_scale=k_scale, v_scale=v_scale)


def pool(dtype: torch.dtype) -> MHATokenToKVPool:
    return MHATokenToKVPool(8, 4, dtype, head_num=2, head_dim=3, layer_num=2, device=CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_writes_go_to_the_layer_and_slots(dtype: torch.dtype) -> None:
    kv = pool(dtype)
    for layer_id in (0, 1):
        kv.get_key_buffer(layer_id).zero_()
    k, v = torch.randn(2, 2, 3).to(dtype), torch.randn(2, 2, 3).to(dtype)
    kv.set_kv_buffer(layer(1), torch.tensor([9, 4]), k, v.view(2, 6))
    assert kv.get_key_buffer(1).shape == (12, 2, 3)
    assert torch.equal(kv.get_key_buffer(1)[[9, 4]], k)
    assert torch.equal(kv.get_value_buffer(1)[[9, 4]], v)
    untouched = [i for i in range(12) if i not in (4, 9)]
    assert not kv.get_key_buffer(1)[untouched].any() and not kv.get_key_buffer(0).any()
    assert kv.get_kv_size_bytes() == 12 * 2 * 3 * dtype.itemsize * 2 * 2


def test_fp8_divides_by_the_scale_saturates_and_rounds_once() -> None:
    kv = pool(torch.float8_e4m3fn)
    k = torch.tensor([1.0, -3.0, 1000.0, -1000.0, 0.0, 5.25]).view(1, 2, 3).bfloat16()
    kv.set_kv_buffer(layer(0, k_scale=0.5, v_scale=3.0), torch.tensor([5]), k, k)
    keys, values = kv.get_key_buffer(0), kv.get_value_buffer(0)
    assert keys.dtype == torch.float8_e4m3fn
    # 2 * 5.25 = 10.5 lies between 10 and 11: ties to even.
    assert keys[5].float().flatten().tolist() == [2.0, -6.0, 448.0, -448.0, 0.0, 10.0]
    exact = (k.float() / 3.0).to(torch.float8_e4m3fn)
    assert torch.equal(values[5].float(), exact[0].float())


def test_fp8_is_not_rounded_to_bfloat16_first() -> None:
    x = (torch.arange(600).float() / 128 + 0.1).bfloat16().view(100, 2, 3)
    kv = MHATokenToKVPool(100, 1, torch.float8_e4m3fn, 2, 3, 1, CPU)
    kv.set_kv_buffer(layer(0, k_scale=0.7), torch.arange(1, 101), x, x)
    once = (x.float() / 0.7).to(torch.float8_e4m3fn).float()
    assert not torch.equal(once, (x / 0.7).to(torch.float8_e4m3fn).float())  # else this test shows nothing
    assert torch.equal(kv.get_key_buffer(0)[1:].float(), once)


def test_rows_are_handed_out_once_and_that_of_padding_never() -> None:
    rows = ReqToTokenPool(3, 5, CPU)
    taken = [rows.alloc() for _ in range(3)]
    assert sorted(taken) == [0, 1, 2] and rows.available_size() == 0
    with pytest.raises(IndexError):
        rows.alloc()
    rows.free(taken[1])
    assert rows.alloc() == taken[1]
    assert rows.padding_row == 3 and rows.req_to_token.shape == (4, 5)


def test_write_of_single_positions() -> None:
    rows = ReqToTokenPool(3, 5, CPU)
    rows.write(torch.tensor([2, 0, 2]), torch.tensor([4, 0, 1]), torch.tensor([7, 8, 9]))
    expected = torch.zeros(4, 5, dtype=torch.int32)
    expected[2, 4], expected[0, 0], expected[2, 1] = 7, 8, 9
    assert torch.equal(rows.req_to_token, expected)
