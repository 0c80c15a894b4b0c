"""Steps of attention over a paged KV cache with everything that makes them hard: shuffled pages, unused slots full of
NaN, rows of one projection's output; and the same step in float32 by the formula."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from sglang.srt.layers.attention.base_attn_backend import AttentionBackend, AttentionTarget, Rotary
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

FP8 = torch.float8_e4m3fn
SCALING = 0.11


@dataclass(frozen=True)
class Shape:
    heads: int = 8
    kv_heads: int = 2
    dim: int = 64
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype = torch.bfloat16
    page_size: int = 1
    windows: tuple[int | None, ...] = (None,)
    context: int = 4096
    device: str = "cpu"

    def target(self) -> AttentionTarget:
        return AttentionTarget(
            torch.device(self.device),
            self.dtype,
            self.kv_dtype,
            self.heads,
            self.kv_heads,
            self.dim,
            self.page_size,
            frozenset(self.windows),
        )


class World:
    """The pools of a model with one layer for each of the shape's windows."""

    def __init__(self, shape: Shape, requests: int, longest: int, seed: int = 0) -> None:
        self.shape, self.generator = shape, torch.Generator().manual_seed(seed)
        device, size = torch.device(shape.device), shape.page_size
        self.layers = [
            RadixAttention(shape.heads, shape.dim, SCALING, shape.kv_heads, number, sliding_window=window)
            for number, window in enumerate(shape.windows)
        ]
        pages = requests * -(-longest // size)
        self.pool = MHATokenToKVPool(
            pages * size, size, shape.kv_dtype, shape.kv_heads, shape.dim, len(self.layers), device
        )
        for layer in self.layers:
            if shape.kv_dtype == FP8:
                layer.k_scale, layer.v_scale = 0.37, 0.021
            for buffer in self.buffers(layer):
                buffer.view(torch.uint8).fill_(0xFF)  # NaN in every dtype
        self.rows = ReqToTokenPool(requests, shape.context, device)
        order = torch.randperm(pages, generator=self.generator) + 1
        self.slots = (order.unsqueeze(1) * size + torch.arange(size)).view(requests, -1).to(device)
        self.row_of = torch.randperm(requests, generator=self.generator).tolist()

    def buffers(self, layer: RadixAttention) -> tuple[torch.Tensor, torch.Tensor]:
        return self.pool.get_key_buffer(layer.layer_id), self.pool.get_value_buffer(layer.layer_id)

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(self.shape.device, self.shape.dtype)

    def step(self, lengths: list[tuple[int, int]], padding: int = 0, rotate: bool = True) -> Step:
        """(cached, new) tokens of each request, the cached ones filled with random values; a decode step if all have
        one new token. ``padding`` rows as those of a captured batch are put behind."""
        shape = self.shape
        for number, (cached, new) in enumerate(lengths):
            mine = self.slots[number, : cached + new]
            self.rows.req_to_token[self.row_of[number], : cached + new] = mine.int()
            for layer in self.layers:
                k, v = self.random(2, cached, shape.kv_heads, shape.dim)
                self.pool.set_kv_buffer(layer, mine[:cached], k, v)
        news, totals = [new for _, new in lengths], [cached + new for cached, new in lengths]
        where = [self.slots[number, cached : cached + new] for number, (cached, new) in enumerate(lengths)]
        padded = [torch.zeros(padding, dtype=torch.int64, device=shape.device)]
        rows = [*self.row_of[: len(lengths)], *[self.rows.padding_row] * padding]
        totals, news = [*totals, *[1] * padding], [*news, *[1] * padding]
        tokens = sum(news)
        heads = shape.heads + 2 * shape.kv_heads
        batch = ForwardBatch(
            forward_mode=ForwardMode.DECODE if set(news) == {1} else ForwardMode.EXTEND,
            input_ids=torch.zeros(tokens, dtype=torch.int64, device=shape.device),
            positions=torch.zeros(tokens, dtype=torch.int64, device=shape.device),
            req_pool_indices=torch.tensor(rows, device=shape.device),
            seq_lens=torch.tensor(totals, device=shape.device),
            seq_lens_list=totals,
            out_cache_loc=torch.cat(where + padded),
            extend_seq_lens=news,
            sampling_info=SamplingBatchInfo(()),
            req_to_token_pool=self.rows,
            token_to_kv_pool=self.pool,
            attn_backend=None,  # type: ignore[arg-type]
        )
        angles = 6.28 * torch.rand(tokens, 1, shape.dim // 2, generator=self.generator).repeat(1, 1, 2)
        angles[..., : shape.dim // 2] *= -1  # the sines of a head's first half are negative
        rotary = tuple(x.to(shape.device, shape.dtype) for x in (angles.cos(), angles.sin())) if rotate else None
        return Step(self, batch, [self.random(tokens, heads, shape.dim) for _ in self.layers], rotary, len(lengths))


@dataclass
class Step:
    """``qkv``: one projection's output [T, heads + 2 kv_heads, dim] per layer. ``real``: how many requests are no
    padding."""

    world: World
    batch: ForwardBatch
    qkv: list[torch.Tensor]
    rotary: Rotary | None
    real: int

    def forward(self, backend: AttentionBackend) -> list[torch.Tensor]:
        """Every layer's output, after the step was prepared. The projections' outputs stay as they are."""
        shape = self.world.shape
        batch = replace(self.batch, attn_backend=backend)
        outputs = []
        for layer, qkv in zip(self.world.layers, self.qkv, strict=True):
            q, k, v = qkv.clone().split_with_sizes((shape.heads, shape.kv_heads, shape.kv_heads), dim=1)
            outputs.append(layer(q, k, v, batch, self.rotary))
        return outputs

    def run(self, backend: AttentionBackend) -> list[torch.Tensor]:
        backend.init_forward_metadata(self.batch)
        return self.forward(backend)

    def reference(self) -> list[torch.Tensor]:
        """Every layer's output for the real requests, from what the cache holds once the step was run."""
        return [self._reference(layer, qkv) for layer, qkv in zip(self.world.layers, self.qkv, strict=True)]

    def _reference(self, layer: RadixAttention, qkv: torch.Tensor) -> torch.Tensor:
        shape, batch = self.world.shape, self.batch
        q = qkv[:, : shape.heads]
        if self.rotary is not None:
            cos, signed_sin = self.rotary
            q = torch.addcmul(q * cos, q.roll(shape.dim // 2, dims=-1), signed_sin)
        keys, values = self.world.buffers(layer)
        scales = (layer.k_scale or 1.0, layer.v_scale or 1.0) if shape.kv_dtype == FP8 else (1.0, 1.0)
        outputs, start = [], 0
        for number in range(self.real):
            length, new = batch.seq_lens_list[number], batch.extend_seq_lens[number]
            mine = self.world.slots[number, :length]
            group = shape.heads // shape.kv_heads
            k, v = (
                x.view(torch.uint8)[mine].view(x.dtype).float().repeat_interleave(group, dim=1).transpose(0, 1) * scale
                for x, scale in ((keys, scales[0]), (values, scales[1]))
            )
            queries = torch.arange(length - new, length, device=qkv.device).unsqueeze(1)
            tokens = torch.arange(length, device=qkv.device)
            hidden = tokens > queries
            if layer.sliding_window is not None:
                hidden |= tokens <= queries - layer.sliding_window
            scores = q[start : start + new].float().transpose(0, 1) @ k.transpose(1, 2) * layer.scaling
            weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            outputs.append((weights @ v).transpose(0, 1).flatten(1))
            start += new
        return torch.cat(outputs)


def error(ours: torch.Tensor, wanted: torch.Tensor, heads: int) -> float:
    """The largest relative error of one head's output, by its norm; NaN counts as infinite."""
    ours, wanted = (x.float().unflatten(1, (heads, -1)) for x in (ours[: len(wanted)], wanted))
    relative = (ours - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    return float(relative.nan_to_num(nan=torch.inf).max())
