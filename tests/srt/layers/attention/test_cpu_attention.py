"""Attention backend ``cpu`` against ``torch_native``, on every instruction set that runs here."""

from dataclasses import replace

import pytest
import torch

from sglang.kernels import cpu_extension
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend, AttentionTarget
from sglang.srt.layers.attention.cpu_backend import CpuAttnBackend
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

CPU = torch.device("cpu")
FP8 = torch.float8_e4m3fn
SCALING = 0.125
# Neither backend looks at the model when it computes.
TARGET = AttentionTarget(CPU, torch.float32, torch.float32, num_heads=6, num_kv_heads=2, head_dim=64)


@pytest.fixture(params=cpu_extension.isas(), ids=lambda isa: isa.name)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> CpuAttnBackend:
    library = cpu_extension.load(request.param)
    monkeypatch.setattr(cpu_extension, "load", lambda: library)
    return CpuAttnBackend(TARGET)


class Step:
    """A step of requests with (cached, new) tokens each: q, k, v, and a cache that holds the cached tokens.

    Random values of a request depend on its number only, so a request alone is what it is in a batch.
    """

    def __init__(
        self,
        lengths: list[tuple[int, int]],
        *,
        heads: int = 6,
        kv_heads: int = 2,
        dim: int = 64,
        dtype: torch.dtype = torch.float32,
        kv_dtype: torch.dtype = torch.float32,
        window: int | None = None,
        page_size: int = 1,
        only: int | None = None,
    ) -> None:
        self.layer = RadixAttention(heads, dim, SCALING, kv_heads, layer_id=1, sliding_window=window)
        if kv_dtype == FP8:
            self.layer.k_scale, self.layer.v_scale = 0.37, 0.021
        longest = max(map(sum, lengths))
        pages = -(-longest // page_size) * len(lengths)
        self.pool = MHATokenToKVPool(pages * page_size, page_size, kv_dtype, kv_heads, dim, 2, CPU)
        for buffer in (self.pool.get_key_buffer(1), self.pool.get_value_buffer(1)):
            buffer.view(torch.uint8).fill_(0xFF)  # NaN in every dtype
        order = torch.randperm(pages, generator=torch.Generator().manual_seed(1)) + 1
        slots = (order.unsqueeze(1) * page_size + torch.arange(page_size)).view(len(lengths), -1)
        rows = ReqToTokenPool(len(lengths) + 1, longest + 3, CPU)
        numbers = range(len(lengths)) if only is None else [only]
        parts = []
        for number in numbers:
            cached, new = lengths[number]
            generator = torch.Generator().manual_seed(number)
            values = torch.randn(cached + new, heads + 2 * kv_heads, dim, generator=generator).to(dtype)
            mine = slots[number, : cached + new]
            rows.req_to_token[number + 1, : cached + new] = mine.int()
            k, v = values[:cached, heads : heads + kv_heads], values[:cached, heads + kv_heads :]
            self.pool.set_kv_buffer(self.layer, mine[:cached], k, v)
            parts.append((values[cached:], mine[cached:]))
        qkv = torch.cat([values for values, _ in parts])
        self.q, self.k, self.v = qkv.split_with_sizes((heads, kv_heads, kv_heads), dim=1)
        totals = [sum(lengths[number]) for number in numbers]
        self.rotary: tuple[torch.Tensor, torch.Tensor] | None = None
        self.batch = ForwardBatch(
            forward_mode=ForwardMode.EXTEND,
            input_ids=torch.zeros(len(qkv), dtype=torch.int64),
            positions=torch.zeros(len(qkv), dtype=torch.int64),
            req_pool_indices=torch.tensor([number + 1 for number in numbers]),
            seq_lens=torch.tensor(totals),
            seq_lens_list=totals,
            out_cache_loc=torch.cat([slots for _, slots in parts]),
            extend_seq_lens=[lengths[number][1] for number in numbers],
            sampling_info=SamplingBatchInfo(()),
            req_to_token_pool=rows,
            token_to_kv_pool=self.pool,
            attn_backend=TorchNativeAttnBackend(TARGET),
        )

    def run(self, backend: AttentionBackend) -> torch.Tensor:
        batch = replace(self.batch, attn_backend=backend)
        backend.init_forward_metadata(batch)
        # A backend may overwrite what it rotates.
        return self.layer(self.q.clone(), self.k.clone(), self.v, batch, self.rotary)

    def cache(self) -> torch.Tensor:
        return torch.cat([self.pool.get_key_buffer(1), self.pool.get_value_buffer(1)]).view(torch.uint8)

    def new_keys(self) -> torch.Tensor:
        return self.pool.get_key_buffer(1)[self.batch.out_cache_loc].float()


DECODE = [(0, 1), (63, 1), (64, 1), (70, 1), (511, 1), (512, 1), (2999, 1), (5, 1)]
MIXED = [(0, 9), (130, 1), (700, 70), (64, 2), (0, 300)]
DTYPES = {
    "float32": (torch.float32, torch.float32, 5e-6),
    "float32-bf16": (torch.float32, torch.bfloat16, 5e-6),
    "float32-fp8": (torch.float32, FP8, 5e-6),
    "bf16": (torch.bfloat16, torch.bfloat16, 2e-2),
    "bf16-fp8": (torch.bfloat16, FP8, 2e-2),
}


def compare(step: Step, backend: AttentionBackend, tolerance: float) -> None:
    wanted = step.run(TorchNativeAttnBackend(TARGET))
    cache, keys = step.cache().clone(), step.new_keys()
    step.pool.get_key_buffer(1).view(torch.uint8)[step.batch.out_cache_loc] = 0xFF
    step.pool.get_value_buffer(1).view(torch.uint8)[step.batch.out_cache_loc] = 0xFF
    ours = step.run(backend)
    if step.rotary is None:
        assert torch.equal(step.cache(), cache)
    else:  # whether a product and a sum are rounded once or twice depends on the machine, in torch too
        limit = {torch.float32: 2.0**-22, torch.bfloat16: 2.0**-7, FP8: 2.0**-3}[step.pool.dtype]
        torch.testing.assert_close(step.new_keys(), keys, rtol=limit, atol=limit)
        assert step.pool.dtype == torch.float32 or (step.new_keys() != keys).sum() <= 0.003 * keys.numel()
    assert ours.dtype == step.q.dtype and ours.shape == wanted.shape
    torch.testing.assert_close(ours, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("window", [None, 1, 100])
@pytest.mark.parametrize("lengths", [DECODE, MIXED], ids=["decode", "mixed"])
@pytest.mark.parametrize("dtypes", DTYPES)
def test_equals_torch_native(
    backend: CpuAttnBackend, dtypes: str, lengths: list[tuple[int, int]], window: int | None
) -> None:
    dtype, kv_dtype, tolerance = DTYPES[dtypes]
    compare(Step(lengths, dtype=dtype, kv_dtype=kv_dtype, window=window, page_size=4), backend, tolerance)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 7, 8])
@pytest.mark.parametrize(("dim", "kv_heads"), [(10, 1), (80, 3), (128, 1)])
@pytest.mark.parametrize("page_size", [1, 16])
def test_heads(backend: CpuAttnBackend, group: int, dim: int, kv_heads: int, page_size: int) -> None:
    shape = {"heads": group * kv_heads, "kv_heads": kv_heads, "dim": dim, "page_size": page_size}
    compare(Step([(90, 1), (20, 50), (600, 1)], **shape), backend, 5e-6)


@pytest.mark.parametrize("dim", [10, 64, 80])
@pytest.mark.parametrize("dtypes", DTYPES)
def test_rotates(backend: CpuAttnBackend, dtypes: str, dim: int) -> None:
    """The cache and the result are those of a rotation before the attention, however q, k and v lie."""
    dtype, kv_dtype, tolerance = DTYPES[dtypes]
    step = Step([(90, 1), (20, 50), (0, 3), (600, 1)], dim=dim, dtype=dtype, kv_dtype=kv_dtype)
    angles = torch.outer(torch.arange(len(step.q)) + 3.0, torch.linspace(1, 0, dim)).unsqueeze(1)
    step.rotary = angles.cos().to(dtype), angles.sin().to(dtype)
    compare(step, backend, tolerance if kv_dtype == torch.float32 else 2e-2)  # a key may be rounded the other way
    views = step.run(backend)
    step.q, step.k = torch.cat([step.q] * 2, dim=1)[:, 6:], step.k.contiguous()
    assert torch.equal(step.run(backend), views)
    unrotated, step.rotary = step.rotary, None
    assert not torch.equal(step.run(backend), views)
    step.rotary = unrotated[0][1:], unrotated[1]
    with pytest.raises(ValueError, match="rotary: expected"):
        step.run(backend)


def exact(step: Step) -> torch.Tensor:
    """What the step computes, in float64 from keys and values as the cache has them."""
    layer, batch, outputs = step.layer, step.batch, []
    begin = 0
    for row, length, new in zip(batch.req_pool_indices, batch.seq_lens_list, batch.extend_seq_lens, strict=True):
        slots = batch.req_to_token_pool.req_to_token[row, :length].long()
        q = step.q[begin : begin + new].double().view(new, layer.num_kv_heads, -1, layer.head_dim)
        k, v = (buffer(1)[slots].double() for buffer in (step.pool.get_key_buffer, step.pool.get_value_buffer))
        if step.pool.dtype == FP8:
            k, v = k * layer.k_scale, v * layer.v_scale
        distance = torch.arange(length - new, length).unsqueeze(1) - torch.arange(length)
        seen = (distance >= 0) & (distance < (layer.sliding_window or length))
        scores = torch.einsum("nkgd,mkd->kgnm", q, k) * layer.scaling
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        outputs.append(torch.einsum("kgnm,mkd->nkgd", weights, v).flatten(1))
        begin += new
    return torch.cat(outputs)


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, FP8], ids=str)
@pytest.mark.parametrize(
    ("group", "dim", "window"),
    [(1, 64, None), (3, 64, 70), (4, 32, None), (7, 96, 70), (8, 128, None), (2, 160, 70), (5, 80, None)],
)
def test_bfloat16_prompts_are_rounded_once(
    backend: CpuAttnBackend, group: int, dim: int, window: int | None, kv_dtype: torch.dtype
) -> None:
    """Scores, softmax and sums are as good as float32 ones; a weight rounded to bfloat16 would be seen."""
    lengths = [(0, 200), (70, 33), (0, 2), (5, 1), (0, 65), (129, 64)]
    shape = {"heads": 2 * group, "kv_heads": 2, "dim": dim, "window": window}
    step = Step(lengths, dtype=torch.bfloat16, kv_dtype=kv_dtype, page_size=4, **shape)
    step.q *= 3  # few keys have most of the weight
    output = step.run(backend).double()
    wanted = exact(step)
    assert bool(((output - wanted).abs() <= 2.0**-8 * wanted.abs() + 1e-4 * wanted.abs().max()).all())


def test_many_heads_of_one_token(backend: CpuAttnBackend) -> None:
    compare(Step([(90, 1), (20, 3)], heads=60, kv_heads=1, kv_dtype=torch.bfloat16), backend, 5e-6)


@pytest.mark.parametrize("kv_dtype", [torch.float32, FP8], ids=str)
@pytest.mark.parametrize("window", [None, 100])
def test_neither_batch_nor_threads_change_a_bit(
    backend: CpuAttnBackend, kv_dtype: torch.dtype, window: int | None
) -> None:
    lengths = DECODE + MIXED
    before = torch.get_num_threads()
    try:
        outputs = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            outputs.append(Step(lengths, kv_dtype=kv_dtype, window=window).run(backend))
        assert all(torch.equal(output, outputs[0]) for output in outputs)
        alone = [Step(lengths, kv_dtype=kv_dtype, window=window, only=i).run(backend) for i in range(len(lengths))]
        assert torch.equal(torch.cat(alone), outputs[0])
    finally:
        torch.set_num_threads(before)


def test_fp8_values_are_those_of_the_pool(backend: CpuAttnBackend) -> None:
    """Ties, subnormal values, saturation, NaN: what is stored is what the pool stores."""
    halves = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.bfloat16).float()
    ties = torch.arange(0, 127).to(torch.uint8).view(FP8).float()
    ties = torch.cat((ties[:-1] + ties.diff() / 2, -ties))
    values = torch.cat((halves, ties, ties.nextafter(torch.tensor(torch.inf)), ties.nextafter(torch.tensor(0.0))))
    values = torch.nn.functional.pad(values, (0, -len(values) % 128)).view(-1, 2, 64)
    step = Step([(0, len(values))], kv_dtype=FP8)
    step.layer.k_scale = step.layer.v_scale = 1.0
    step.k, step.v = values, -values
    step.pool.set_kv_buffer(step.layer, step.batch.out_cache_loc, step.k, step.v)
    wanted = step.cache().clone()
    step.run(backend)
    stored = step.cache()
    nan = (stored & 0x7F) == 0x7F
    assert torch.equal(nan, (wanted & 0x7F) == 0x7F)  # a NaN's sign means nothing
    assert torch.equal(stored[~nan], wanted[~nan])


def test_a_request_with_nan_harms_no_other(backend: CpuAttnBackend) -> None:
    step = Step([(90, 1), (40, 1), (0, 3)])
    clean = step.run(backend)
    step.q[1] = torch.nan
    output = step.run(backend)
    assert output[1].isnan().all()
    assert torch.equal(output[[0, 2, 3, 4]], clean[[0, 2, 3, 4]])


def test_scales_of_the_checkpoint_are_of_an_fp8_cache_only(backend: CpuAttnBackend) -> None:
    step = Step([(90, 1), (4, 7)], kv_dtype=torch.bfloat16)
    step.layer.k_scale, step.layer.v_scale = 3.0, 0.5
    compare(step, backend, 5e-6)


def test_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = CpuAttnBackend.unsupported_reason
    assert reason(replace(TARGET, device=torch.device("cuda"))) == "needs a CPU; this device is cuda"
    assert reason(replace(TARGET, dtype=torch.float16)) == "takes float32 and bfloat16, not float16"
    assert reason(TARGET) is None and reason(replace(TARGET, dtype=torch.bfloat16)) is None
    monkeypatch.setattr(cpu_extension, "unavailable", lambda: "needs a C++ compiler")
    assert reason(TARGET) == "needs a C++ compiler"
