"""``decode_attention.cu``: rotation, write to the KV cache and attention of a decode step of few requests, in one
launch that nothing is planned for."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from sglang.kernels import layers
from sglang.srt.layers.attention.base_attn_backend import AttentionTarget, Rotary

THREADS = 128
# Blocks that a multiprocessor has registers for, by the size of a head.
BLOCKS = {64: 4, 128: 3, 256: 2}
LARGEST_GROUP = 8
# Blocks that share a request's KV head: the last of them merges what all found. For 8 pairs on an H200, 32 of them make
# steps of short contexts slower (all have to be started, few have a share), and 65536 tokens take 88 us rather than 75.
MOST_SPLITS = 24
# What a block costs beside its share, where all of a pair's tokens cost 1.
BLOCK_COST = 1 / 32
NO_WINDOW = 2**31 - 1
VECTOR = 16  # bytes of one load


class NewTokens(NamedTuple):
    """Keys and values [requests, kv_heads, dim] that are not in the cache yet.

    Attributes:
        rotary: what ``Operators.cos_sin`` returned for them; None: they are rotated, and so are the queries. The first
            half of each row is read: the second has the same cosines, and the sines negated.
    """

    k: torch.Tensor
    v: torch.Tensor
    rotary: Rotary | None

    def readable(self, dtype: torch.dtype) -> bool:
        """Whether the kernel reads them as they lie in memory, for queries of ``dtype``."""
        requests, kv_heads, dim = self.k.shape
        together = 0
        for x in (self.k, self.v):
            if x.dtype != dtype or x.stride(2) != 1 or (x.stride(1) != dim and kv_heads > 1):
                return False
            together |= x.data_ptr() | x.stride(0) * x.itemsize
        for x in self.rotary or ():
            if x.dtype != dtype or x.shape != (requests, 1, dim) or not x.is_contiguous():
                return False
            together |= x.data_ptr()
        return together % VECTOR == 0


class DecodeKernel:
    """Attention of one new token per request, for at most ``most_pairs`` pairs of a request and a KV head.

    Its calls share memory, so they must be ordered, as those of one stream are.

    Args:
        processors: multiprocessors of the device; None: those that it has.
    """

    @staticmethod
    def takes(target: AttentionTarget) -> bool:
        """16-bit queries, a cache in their type or in e4m3, groups of at most ``LARGEST_GROUP`` query heads."""
        types = (target.dtype, torch.float8_e4m3fn)
        if target.dtype not in (torch.bfloat16, torch.float16) or target.kv_cache_dtype not in types:
            return False
        if target.head_dim not in BLOCKS or target.num_heads // target.num_kv_heads > LARGEST_GROUP:
            return False
        index = target.device.index
        return (
            target.device.type == "cuda"
            and layers.unavailable(torch.cuda.current_device() if index is None else index) is None
        )

    def __init__(self, target: AttentionTarget, most_pairs: int, processors: int | None = None) -> None:
        device, dim, kv_heads = target.device, target.head_dim, target.num_kv_heads
        if processors is None:
            processors = torch.cuda.get_device_properties(device).multi_processor_count
        group = target.num_heads // kv_heads
        self._kv_heads = kv_heads
        self._options = options_of(dim, group, target.kv_cache_dtype == torch.float8_e4m3fn)
        room = BLOCKS[dim] * processors
        # By the number of requests.
        self._splits = [1, *(splits_of(pairs, room) for pairs in range(kv_heads, most_pairs + 1, kv_heads))]
        blocks = max(requests * kv_heads * splits for requests, splits in enumerate(self._splits))
        self._sums = torch.empty(blocks * group * dim, dtype=torch.float32, device=device)
        self._found = torch.empty(blocks * group * 2, dtype=torch.float32, device=device)
        self._arrived = torch.zeros(most_pairs, dtype=torch.int32, device=device)

    def __call__(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        table: torch.Tensor,
        rows: torch.Tensor,
        lengths: torch.Tensor,
        window: int | None,
        scaling: float,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
        new: NewTokens | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Enqueue it on the current stream. Lengths and slots are the device's when it runs.

        Args:
            q: [requests, heads, dim], a head's values behind each other, from multiples of 16 bytes on.
            keys, values: [slots, kv_heads, dim], what belongs to a slot behind each other.
            table: int32 [any, most tokens], the slots of a request in a row.
            rows, lengths: int64 [requests], of the table and, from 1 on, with the new token.
            window: how many tokens a token sees, itself included; None for all.
            new: readable ones; with the bits of ``rotate_and_store`` they are written to the slot of each request's
                last token, and the queries are rotated, which stay as they are in memory. None: the cache has the new
                tokens, and q is rotated.
            out: contiguous, where the result is to be; None: in new memory.

        Returns:
            [requests, heads * dim] in q's type.
        """
        requests, heads, dim = q.shape
        if out is None:
            out = torch.empty((requests, heads * dim), dtype=q.dtype, device=q.device)
        splits = self._splits[requests]
        grid = (splits * self._kv_heads, requests)
        k = v = cos = signed_sin = k_stride = v_stride = 0
        if new is not None:
            k, v, k_stride, v_stride = new.k.data_ptr(), new.v.data_ptr(), new.k.stride(0), new.v.stride(0)
            if new.rotary is not None:
                cos, signed_sin = new.rotary[0].data_ptr(), new.rotary[1].data_ptr()
        params = layers.DECODE.pack(
            q.data_ptr(), k, v, cos, signed_sin, keys.data_ptr(), values.data_ptr(), table.data_ptr(),
            rows.data_ptr(), lengths.data_ptr(), out.data_ptr(), self._sums.data_ptr(), self._found.data_ptr(),
            self._arrived.data_ptr(),
            q.stride(0), q.stride(1), k_stride, v_stride, keys.stride(0), values.stride(0), table.stride(0),
            self._kv_heads, splits, NO_WINDOW if window is None else window,
            scaling * k_scale * math.log2(math.e), k_scale, v_scale,
        )  # fmt: skip
        layers.launch("decode_attention", q.dtype, q.get_device(), grid, THREADS, params, self._options)
        return out


def options_of(dim: int, group: int, fp8: bool) -> tuple[str, ...]:
    """Macros of the source."""
    return f"-DE4M3={fp8:d}", f"-DDIM={dim}", f"-DGROUP={group}", f"-DBLOCKS={BLOCKS[dim]}"


def splits_of(pairs: int, room: int) -> int:
    """How many blocks share each of ``pairs`` where ``room`` run at once, so that the last ones end early."""
    return min(range(1, MOST_SPLITS + 1), key=lambda splits: -(-pairs * splits // room) * (1 / splits + BLOCK_COST))
