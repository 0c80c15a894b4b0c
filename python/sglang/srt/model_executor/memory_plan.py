"""How much memory the KV cache gets: on a GPU the largest steps are run and what they take is measured."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from sglang.srt.errors import StartupError
from sglang.srt.managers.schedule_policy import MAX_PREFILL_TOKENS
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.platforms import available_memory, release_unused_memory
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import SamplingParams

if TYPE_CHECKING:
    from sglang.srt.model_executor.base_cuda_graph_runner import BaseCudaGraphRunner
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)

GB = 1 << 30

# Without --mem-fraction-static this part of a GPU stays free, and no less than so many bytes: for what fragments, and
# for kernels that are loaded at their first use.
MARGIN_FRACTION, LEAST_MARGIN = 0.02, 1 << 30


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of one device, seen when everything that stays is there but the KV cache and the graphs.

    Attributes:
        total: what the device has.
        available: what is free.
        activations: what the largest step takes while it runs, its sampling included.
        graphs: what captured steps will take.
    """

    total: int
    available: int
    activations: int = 0
    graphs: int = 0

    @property
    def room(self) -> int:
        """What the KV cache can have at most."""
        return self.available - self.activations - self.graphs

    def budget(self, fraction: float | None) -> int:
        """What it gets: with a ``fraction``, what is left of that part of the device when everything in use is taken
        off, but no more than there is room; else all the room but a margin."""
        if fraction is None:
            return self.room - max(int(self.total * MARGIN_FRACTION), LEAST_MARGIN)
        wanted = self.available - int(self.total * (1 - fraction))
        if wanted > self.room:
            logger.warning(
                "--mem-fraction-static %s leaves %.2f GB beside weights and KV cache, but the largest step and CUDA "
                "graphs take %.2f GB: the KV cache gets %.2f GB less.",
                fraction, self.total * (1 - fraction) / GB, (self.activations + self.graphs) / GB,
                (wanted - self.room) / GB,
            )  # fmt: skip
        return min(wanted, self.room)

    @property
    def reserved(self) -> str:
        """What is kept for steps, and what makes it smaller; empty if nothing is."""
        if not self.activations + self.graphs:
            return ""
        return (
            f" and {self.activations / GB:.2f} GB kept for the largest step (--chunked-prefill-size makes it smaller) "
            f"and {self.graphs / GB:.2f} GB for CUDA graphs (--cuda-graph-max-bs, --cuda-graph-max-bs-prefill)"
        )

    def describe(self, kv_cache: int) -> str:
        """Where the memory goes, with ``kv_cache`` bytes for keys, values and their index."""
        parts = {
            "weights and libraries": self.total - self.available,
            "KV cache": kv_cache,
            "the largest step": self.activations,
            "CUDA graphs": self.graphs,
            "free": self.room - kv_cache,
        }
        return ", ".join(f"{name} {size / GB:.2f} GB" for name, size in parts.items())


def measure_largest_steps(runner: ModelRunner, running: int) -> int:
    """Bytes that the largest steps take beside what was in use before; what they leave behind is not among them.

    Run are a prefill of as many tokens as one step may have, once of as many requests as possible and once of a single
    one at the end of the longest context there may be room for, and a decode step of ``running`` requests; all are
    sampled with every filter. Every token is the pools' padding, so they need no KV cache. All ranks must call this.

    Raises:
        StartupError: one doesn't fit into the memory.
    """
    args = runner.server_args
    context = min(
        runner.model_config.context_len,
        args.max_total_tokens or runner.model_config.context_len,
        max(runner.tp.minimum(available_memory(runner.device)) // runner.token_bytes, 1),
    )
    chunk = args.chunked_prefill_size
    tokens = chunk if chunk > 0 else max(MAX_PREFILL_TOKENS, context)
    requests = min(running, tokens)
    share = [min(tokens // requests + (i < tokens % requests), context) for i in range(requests)]
    last = min(tokens, context)
    prefill = ForwardMode.EXTEND
    steps = {
        f"a prefill of {sum(share)} tokens of {requests} requests": (prefill, share, share),
        f"a prefill of {last} tokens at the end of a context of {context}": (prefill, [context], [last]),
        f"a decode step of {running} requests": (ForwardMode.DECODE, [1] * running, [1] * running),
    }
    pools = padding_pools(runner)
    batch: ForwardBatch | None

    for what, (mode, lengths, new) in steps.items():
        try:
            batch = _padding_batch(runner, *pools, mode, lengths, new)
            runner.sample(runner.forward(batch), batch)
        except torch.OutOfMemoryError as error:
            raise StartupError(
                f"not enough memory for {what}, with the weights loaded: {error}\nReduce --chunked-prefill-size, "
                "--max-running-requests or --context-length"
            ) from error
    # torch's allocator keeps what it ever had: what is free now is the least that was, whoever took it.
    least = available_memory(runner.device)
    batch = None
    release_unused_memory(runner.device)
    return max(available_memory(runner.device) - least, 0)


def padding_pools(runner: ModelRunner) -> tuple[ReqToTokenPool, MHATokenToKVPool]:
    """Pools that hold nothing but the padding row and the padding page."""
    config, device = runner.model_config, runner.device
    kv_pool = MHATokenToKVPool(
        0,
        runner.page_size,
        runner.kv_cache_dtype,
        runner.num_kv_heads,
        config.head_dim,
        config.num_hidden_layers,
        device,
    )
    return ReqToTokenPool(0, config.context_len, device), kv_pool


def _padding_batch(
    runner: ModelRunner,
    req_to_token_pool: ReqToTokenPool,
    token_to_kv_pool: MHATokenToKVPool,
    mode: ForwardMode,
    lengths: Sequence[int],
    new: Sequence[int],
) -> ForwardBatch:
    """Requests of ``lengths`` tokens, the last ``new`` of which are computed, all of them in the padding page."""
    device = runner.device
    positions = torch.cat([torch.arange(end - n, end) for end, n in zip(lengths, new, strict=True)])
    filters = SamplingParams(temperature=1.0, top_p=0.9, min_p=0.01, sampling_seed=0)
    return ForwardBatch(
        forward_mode=mode,
        input_ids=torch.zeros(len(positions), dtype=torch.int64, device=device),
        positions=positions.to(device),
        req_pool_indices=torch.full((len(lengths),), req_to_token_pool.padding_row, device=device),
        seq_lens=torch.tensor(lengths, device=device),
        seq_lens_list=list(lengths),
        out_cache_loc=torch.zeros(len(positions), dtype=torch.int64, device=device),
        extend_seq_lens=list(new),
        sampling_info=SamplingBatchInfo.from_params(
            [filters] * len(lengths), runner.model_config.vocab_size, runner.device
        ),
        req_to_token_pool=req_to_token_pool,
        token_to_kv_pool=token_to_kv_pool,
        attn_backend=runner.attn_backend,
    )


def measure_graphs(device: torch.device, runners: Sequence[BaseCudaGraphRunner | None]) -> int:
    """Bytes that the graphs of ``runners`` will keep, estimated from the two largest of each, which are recorded: the
    largest brings the memory that all of them share. All ranks must call this.

    Raises:
        StartupError: one can't be recorded.
    """
    total = 0
    for graphs in filter(None, runners):
        kept = []
        for size in graphs.sizes[:-3:-1]:
            release_unused_memory(device)
            before = available_memory(device)
            graphs.record_all([size], show_progress=False)
            release_unused_memory(device)
            kept.append(max(before - available_memory(device), 0))
        total += kept[0] + sum(kept[1:]) * (len(graphs.sizes) - 1)
    return total
