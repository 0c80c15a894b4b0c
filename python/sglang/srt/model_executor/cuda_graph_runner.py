"""Decode steps as recorded graphs: on a GPU the host has one launch to make instead of hundreds.

A graph reads and writes fixed addresses, so a batch's tensors are copied into static ones before it is replayed. On a
GPU there is a graph for each of some batch sizes, captured at the start, and a batch takes the next larger one: the
rows behind its own are padding, a request of one token that owns the pools' padding row and padding page.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.model_executor.base_cuda_graph_runner import BaseCudaGraphRunner
from sglang.srt.model_executor.device_graph import Capture, DeviceGraph, GraphUnavailable
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

# Largest size that is recorded by default.
MAX_CAPTURED = 256
# Graphs that are kept where each batch size gets its own.
KEPT_GRAPHS = 32

# What of a batch a graph reads, and what a row of padding has there (None: the pool's padding row).
STATIC_FIELDS: dict[str, int | None] = {
    "input_ids": 0,
    "positions": 0,
    "req_pool_indices": None,
    "seq_lens": 1,
    "out_cache_loc": 0,
}


def why_no_graphs(args: ServerArgs, attn_backend: AttentionBackend) -> str | None:
    """Why decode steps are not recorded; None if they are."""
    if args.disable_cuda_graph:
        return "--disable-cuda-graph"
    if not attn_backend.captures_decode:
        return f"attention backend {attn_backend.name} can't be captured"
    return None


def captured_sizes(args: ServerArgs, running: int, pads: bool) -> Sequence[int]:
    """Batch sizes to record, ascending, where at most ``running`` requests run: those of --cuda-graph-bs (larger ones
    become ``running``), else SGLang's up to the largest one, or all of them where a batch isn't padded."""
    if args.cuda_graph_bs is not None:
        return sorted({min(size, running) for size in args.cuda_graph_bs})
    largest = min(args.cuda_graph_max_bs or MAX_CAPTURED, running)
    if not pads:
        return range(1, largest + 1)
    usual = [1, 2, 4, 8, 12, *range(16, 257, 8), *range(272, 512, 16), *range(512, largest, 32)]
    return [*(size for size in usual if size < largest), largest]


@dataclass
class RecordedStep:
    """A graph, the batch of static tensors that it reads and the logits that it writes."""

    batch: ForwardBatch
    graph: DeviceGraph
    logits: torch.Tensor


class DecodeGraphRunner(BaseCudaGraphRunner):
    """Records decode steps and replays them.

    Args:
        forward: the model, from a batch to float32 logits [B, vocabulary]. What it does must depend on the batch's
            static fields, the pools and the attention backend's metadata alone.
        capture: records it.
        sizes: batch sizes to record, ascending. A larger batch is not for graphs.
        pads: a batch may run in a graph of a larger size. Else graphs are made when a size is first seen, and the
            ``KEPT_GRAPHS`` that were used last are kept.
        repeats_first: padding computes the batch's first request once more instead of one of its own, for a model in
            which what one row gets depends on all of them (a scale computed from each call's input).
    """

    kind, log_name, unit = "decode", "cuda graph", "bs"
    step = "the decode step of {} requests"
    smaller, off = "--cuda-graph-max-bs", "--disable-cuda-graph"

    def __init__(
        self,
        forward: Callable[[ForwardBatch], torch.Tensor],
        capture: Capture,
        attn_backend: AttentionBackend,
        req_to_token_pool: ReqToTokenPool,
        token_to_kv_pool: MHATokenToKVPool,
        sizes: Sequence[int],
        pads: bool,
        repeats_first: bool = False,
    ) -> None:
        self.sizes = sizes
        self._forward = forward
        self._capture = capture
        self._attn_backend = attn_backend
        self._req_to_token_pool = req_to_token_pool
        self._token_to_kv_pool = token_to_kv_pool
        self._pads = pads
        self._repeats_first = repeats_first
        self._steps: dict[int, RecordedStep] = {}
        padding = [req_to_token_pool.padding_row if value is None else value for value in STATIC_FIELDS.values()]
        device = req_to_token_pool.req_to_token.device
        self._padding = torch.tensor(padding, dtype=torch.int64, device=device).unsqueeze(1).repeat(1, sizes[-1])
        self._static = self._padding.clone()
        # By the number of requests: rows of the static tensors, first theirs and then those of padding, and its values.
        self._views: dict[int, tuple[list[torch.Tensor], tuple[torch.Tensor, ...]]] = {}

    @torch.inference_mode()
    def record(self, size: int) -> RecordedStep:
        """Record the step of ``size`` requests, of whatever the static tensors hold.

        Raises:
            GraphUnavailable: it can't be recorded here.
        """
        static = dict(zip(STATIC_FIELDS, self._static[:, :size].unbind(), strict=True))
        batch = ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            input_ids=static["input_ids"],
            positions=static["positions"],
            req_pool_indices=static["req_pool_indices"],
            seq_lens=static["seq_lens"],
            seq_lens_list=static["seq_lens"].tolist(),
            out_cache_loc=static["out_cache_loc"],
            extend_seq_lens=[1] * size,
            sampling_info=SamplingBatchInfo(groups=()),
            req_to_token_pool=self._req_to_token_pool,
            token_to_kv_pool=self._token_to_kv_pool,
            attn_backend=self._attn_backend,
        )
        self._attn_backend.init_graph_metadata(batch)
        graph, logits = self._capture(lambda: self._forward(batch))
        step = self._steps[size] = RecordedStep(batch, graph, logits)
        return step

    def run(self, batch: ForwardBatch) -> torch.Tensor | None:
        """Compute a step: its logits, float32 [B, vocabulary], or None if it is not one for graphs.

        The logits lie in memory that the next replay overwrites, on the same stream.
        """
        size = self._size_for(batch)
        if size is None:
            return None
        self._fill(batch, size)
        step = self._steps.get(size) if self._pads else self._steps.pop(size, None)
        if step is None:
            try:
                step = self.record(size)
            except GraphUnavailable as reason:
                logger.info("Decode steps are not recorded: %s", reason)
                self.sizes = ()
                return None
        padding = batch.seq_lens_list[0] if self._repeats_first else 1
        step.batch.seq_lens_list = batch.seq_lens_list + [padding] * (size - batch.batch_size)
        self._attn_backend.init_graph_metadata(step.batch)
        step.graph.replay()
        if not self._pads:  # the one that was used last stands last
            self._steps[size] = step
            if len(self._steps) > KEPT_GRAPHS:
                del self._steps[next(iter(self._steps))]
        return step.logits[: batch.batch_size]

    def _size_for(self, batch: ForwardBatch) -> int | None:
        if not batch.forward_mode.is_decode():
            return None
        count = batch.batch_size
        index = bisect_left(self.sizes, count)
        if index == len(self.sizes) or not (self._pads or self.sizes[index] == count):
            return None
        return self.sizes[index]

    def _fill(self, batch: ForwardBatch, size: int) -> None:
        """Copy the batch into the static tensors and pad it up to ``size``, in one launch."""
        count = batch.batch_size
        values: list[torch.Tensor] = [getattr(batch, name) for name in STATIC_FIELDS]
        if count not in self._views:  # to make them takes several times as long as to copy
            static = [*self._static[:, :count].unbind()]
            if count < size:
                static += self._static[:, count:size].unbind()
            self._views[count] = static, self._padding[:, count:size].unbind() if count < size else ()
        static, padding = self._views[count]
        if padding and self._repeats_first:
            padding = (*(value[:1].expand(size - count) for value in values[:-1]), padding[-1])
        torch._foreach_copy_(static, [*values, *padding])
