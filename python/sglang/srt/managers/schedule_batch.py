"""Requests as the scheduler sees them, and the batches they run in.

``TokenizedGenerateReqInput`` becomes a :class:`Req`; requests in one step form a :class:`ScheduleBatch`, whose
``forward_batch`` is what the model runner gets. Tensors of a decoding batch are carried from step to step and only
rebuilt when a request joins or leaves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from sglang.srt.managers.io_struct import ReqOutput, TokenizedGenerateReqInput
from sglang.srt.managers.req_logprobs import ReqLogprobs
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
from sglang.srt.mem_cache.decode_inputs import decode_inputs
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.platforms import to_device
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

if TYPE_CHECKING:
    from sglang.srt.constrained.xgrammar_backend import XGrammarGrammar
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.mem_cache.chunk_cache import ChunkCache
    from sglang.srt.mem_cache.radix_cache import RadixCache, TreeNode
    from sglang.srt.model_executor.model_runner import ModelRunner


@dataclass(frozen=True)
class MemoryPools:
    """What batches allocate from and pass on to the model; one per scheduler."""

    req_to_token_pool: ReqToTokenPool
    token_to_kv_pool: MHATokenToKVPool
    allocator: TokenToKVPoolAllocator
    tree_cache: BasePrefixCache
    attn_backend: AttentionBackend
    vocab_size: int

    @classmethod
    def of(cls, runner: ModelRunner, cache: type[RadixCache] | type[ChunkCache], vocab_size: int) -> MemoryPools:
        """A runner's pools with all slots free, and an empty prefix cache of that class."""
        allocator = TokenToKVPoolAllocator(runner.max_total_num_tokens, runner.page_size, runner.device)
        return cls(
            req_to_token_pool=runner.req_to_token_pool,
            token_to_kv_pool=runner.token_to_kv_pool,
            allocator=allocator,
            tree_cache=cache(runner.req_to_token_pool, allocator),
            attn_backend=runner.attn_backend,
            vocab_size=vocab_size,
        )

    @property
    def device(self) -> torch.device:
        return self.allocator.device

    def release(self, req: Req) -> None:
        """Give the request's row and slots back; what the prefix cache can use stays in it."""
        assert req.req_pool_idx is not None
        self.tree_cache.cache_finished_req(req)
        self.req_to_token_pool.free(req.req_pool_idx)
        req.reset_kv()

    def num_active_reqs(self) -> int:
        """How many requests hold slots: each has a row."""
        return self.req_to_token_pool.size - self.req_to_token_pool.available_size()

    def check_integrity(self) -> None:
        """Without requests every KV slot is free or cached, none is in use, every row is free; else RuntimeError."""
        allocator, tree = self.allocator, self.tree_cache
        held = allocator.size - allocator.available_size() - tree.evictable_size()
        if held or tree.protected_size() or self.num_active_reqs():
            raise RuntimeError(
                f"KV cache leak: {held} slots held by nobody, {self.num_active_reqs()} of "
                f"{self.req_to_token_pool.size} rows taken, {self.usage()}"
            )

    def usage(self) -> str:
        """The KV slots in numbers, for messages."""
        allocator, tree = self.allocator, self.tree_cache
        return (
            f"{allocator.size} KV slots: {allocator.available_size()} free, {tree.evictable_size()} cached, "
            f"{tree.protected_size()} cached and in use"
        )


class Req:
    """One request from arrival to its last token.

    Attributes:
        max_new_tokens: as asked for, clipped to what the context and the KV cache can hold.
        req_pool_idx: its row of the ``ReqToTokenPool``; None while it waits.
        kv_len: tokens whose KV slots are in that row, and whose keys and values are computed or, on a device that the
            host doesn't wait for, will be before anything that is launched later.
        last_kv_len: ``kv_len`` in the step that samples its last possible token.
        fill_len: ``kv_len`` after the next extend step; less than all tokens where that step computes a chunk.
        cached_tokens: prompt tokens that the prefix cache saved when the request first ran.
        finished_reason: None while it lives, else the dictionary of :class:`ReqOutput`.
    """

    def __init__(
        self, recv: TokenizedGenerateReqInput, max_new_tokens: int, eos_token_ids: frozenset[int] = frozenset()
    ) -> None:
        params = recv.sampling_params
        self.rid = recv.rid
        self.origin_input_ids = recv.input_ids
        self.output_ids: list[int] = []
        self.sampling_params = params
        self.max_new_tokens = max_new_tokens
        self.last_kv_len = len(recv.input_ids) + max(max_new_tokens, 1) - 1
        self.stop_token_ids = frozenset(params.stop_token_ids) | eos_token_ids
        self._ending_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos_token_ids)
        self.token_counts: torch.Tensor | None = None
        self.chosen_ids: dict[str, tuple[torch.Tensor, ...]] = {}
        self.grammar: XGrammarGrammar | None = None  # its state is that behind output_ids, also after a retraction
        self.finished_reason: dict[str, Any] | None = None

        self.req_pool_idx: int | None = None
        self.prefix_indices: torch.Tensor | None = None
        self.last_node: TreeNode | None = None
        self.cache_protected_len = 0
        self.kv_len = 0
        self.fill_len = 0
        self.cached_tokens: int | None = None

        self.logprobs = ReqLogprobs(recv) if recv.return_logprob else None
        self._sent_len = 0

    def token_ids(self) -> list[int]:
        return self.origin_input_ids + self.output_ids

    def num_tokens(self) -> int:
        return len(self.origin_input_ids) + len(self.output_ids)

    def finished(self) -> bool:
        return self.finished_reason is not None

    @property
    def num_sampled(self) -> int:
        """Output tokens before the step that was prepared last: of those that a device computes, the newest may not be
        in ``output_ids`` yet. Of a prompt in pieces, where it means nothing, no less than 0."""
        return max(self.kv_len - len(self.origin_input_ids), 0)

    def max_prefix_len(self) -> int:
        """How much of the request may come from the prefix cache.

        The last token has to be computed for its logits; a wanted log-probability needs the hidden state before it.
        """
        limit = self.num_tokens() - 1
        if self.logprobs is not None and not self.logprobs.inputs_complete():
            limit = min(limit, self.logprobs.start)
        return limit

    def append_output(self, token_id: int) -> None:
        """Take one sampled token and see whether it was the last one (SGLang's order: length before stop tokens)."""
        grammar = self.grammar
        if self.max_new_tokens > 0:
            self.output_ids.append(token_id)
            if grammar is not None and not grammar.accept_token(token_id):
                self.abort(f"Internal error: token {token_id} was sampled, which the grammar does not allow.", 500)
                return
        if len(self.output_ids) >= self.max_new_tokens:
            self.finished_reason = {"type": "length", "length": self.max_new_tokens}
        elif token_id in self._ending_ids or (grammar is not None and grammar.is_terminated()):
            self.finished_reason = {"type": "stop", "matched": token_id}

    def abort(self, message: str, status_code: int) -> None:
        self.finished_reason = {"type": "abort", "message": message, "status_code": status_code}

    def reset_kv(self) -> None:
        """Forget row and slots, which were released. A retracted request keeps everything else."""
        self.req_pool_idx = self.last_node = self.token_counts = None
        self.cache_protected_len = self.kv_len = self.fill_len = 0

    def take_output(self) -> ReqOutput:
        """What is new since the last call."""
        sent, self._sent_len = self._sent_len, len(self.output_ids)
        output = ReqOutput(
            rid=self.rid,
            output_ids=self.output_ids[sent:],
            finish_reason=self.finished_reason,
            prompt_tokens=len(self.origin_input_ids),
            completion_tokens=len(self.output_ids),
            cached_tokens=self.cached_tokens or 0,
        )
        if self.logprobs is not None:
            self.logprobs.write(output, sent)
        return output


class ScheduleBatch:
    """Requests that run together.

    Attributes:
        chunked_req: the one of ``reqs`` whose prompt this extend step doesn't finish; its sampled token means nothing.
        req_pool_indices: int64 [B]. seq_lens: int64 [B], tokens in the KV cache; ``seq_lens_list`` the same in Python.
        input_ids: int64 [B], each request's newest token, that the next decode step computes; negative where there was
            none to choose: the step may be launched before that is known.
        forward_batch: the step that was prepared last.
    """

    forward_batch: ForwardBatch

    def __init__(self, pools: MemoryPools, reqs: list[Req], chunked_req: Req | None = None) -> None:
        self.reqs = reqs
        self.chunked_req = chunked_req
        self.pools = pools
        self.forward_mode = ForwardMode.EXTEND
        self.seq_lens_list: list[int] = []
        empty = torch.empty(0, dtype=torch.int64, device=pools.device)
        self.req_pool_indices = self.seq_lens = self.input_ids = empty
        self._composition_changed()

    def is_empty(self) -> bool:
        return not self.reqs

    def prepare_for_extend(self) -> None:
        """Take rows and slots for tokens ``kv_len .. fill_len - 1`` of every request and make ``forward_batch``.

        Raises:
            RuntimeError: not enough slots although admission counted them.
        """
        pools, reqs = self.pools, self.reqs
        row_table, row_list = pools.req_to_token_pool.req_to_token, []
        for req in reqs:
            if req.req_pool_idx is None:
                assert req.prefix_indices is not None
                req.req_pool_idx = pools.req_to_token_pool.alloc()
                row_table[req.req_pool_idx, : req.kv_len] = req.prefix_indices.to(torch.int32)
                req.prefix_indices = None
            row_list.append(req.req_pool_idx)
        begins, ends = [req.kv_len for req in reqs], [req.fill_len for req in reqs]
        extend_seq_lens = [end - begin for begin, end in zip(begins, ends, strict=True)]
        self.seq_lens_list = ends
        self.seq_lens = self._tensor(ends)
        self.req_pool_indices = self._tensor(row_list)

        needed = pools.allocator.extend_size(begins, ends)
        pools.tree_cache.ensure_available(needed)
        last_locs = None
        if pools.allocator.page_size > 1:
            last_locs = self._last_locs(self._tensor([max(begin - 1, 0) for begin in begins]))
        out_cache_loc = pools.allocator.alloc_extend(begins, ends, last_locs)
        if out_cache_loc is None:
            raise RuntimeError(f"a prefill was admitted that needs {needed} of {pools.usage()}")
        positions = self._tensor(torch.cat([torch.arange(b, e) for b, e in zip(begins, ends, strict=True)]))
        rows = self._tensor(torch.tensor(row_list).repeat_interleave(torch.tensor(extend_seq_lens)))
        pools.req_to_token_pool.write(rows, positions, out_cache_loc)
        input_ids = self._tensor(
            list(chain.from_iterable(_tokens_between(req, b, e) for req, b, e in zip(reqs, begins, ends, strict=True)))
        )
        starts, targets = [], []
        for req, begin, end in zip(reqs, begins, ends, strict=True):
            start, wanted = (0, []) if req.logprobs is None else req.logprobs.input_range(begin, end)
            req.token_counts = None  # what an unfinished prompt's step samples was counted, and means nothing
            starts.append(start)
            targets.append(wanted)
            req.kv_len = end
        self.forward_batch = self._make_forward_batch(input_ids, positions, out_cache_loc, extend_seq_lens)
        if self.return_logprob:
            self.forward_batch.input_logprob_starts = starts
            self.forward_batch.input_logprob_targets = targets

    def check_decode_mem(self, reqs: Sequence[Req] | None = None) -> bool:
        """Whether the next decode step of ``reqs`` (default: all) has slots, after evicting what may be evicted."""
        lens = self.seq_lens_list if reqs is None else [req.kv_len for req in reqs]
        return self.pools.tree_cache.ensure_available(self.pools.allocator.decode_size([n + 1 for n in lens]))

    def prepare_for_decode(self) -> None:
        """Take one slot per request for its newest token and make ``forward_batch``.

        Raises:
            RuntimeError: not enough slots although :meth:`check_decode_mem` counted them.
        """
        pools = self.pools
        self.forward_mode = ForwardMode.DECODE
        positions = self.seq_lens
        seq_lens_list = [n + 1 for n in self.seq_lens_list]
        pages = pools.allocator.alloc_decode(seq_lens_list)
        if pages is None:
            raise RuntimeError(f"no slots for a decode step of {len(self.reqs)} requests, {pools.usage()}")
        # New objects, not updates in place: the batch of the previous step may still be in use.
        table, page_size = pools.req_to_token_pool.req_to_token, pools.allocator.page_size
        input_ids, self.seq_lens, out_cache_loc = decode_inputs(
            self.input_ids, positions, self.req_pool_indices, table, pages, page_size
        )
        self.seq_lens_list = seq_lens_list
        for req in self.reqs:
            req.kv_len += 1
        lens = [1] * len(self.reqs)
        self.forward_batch = self._make_forward_batch(input_ids, positions, out_cache_loc, lens)

    def filter_batch(self) -> None:
        """Keep the requests that decode on: neither released (finished, aborted, retracted) nor still in chunks, nor
        with their last possible token sampled, which may not have been read."""
        kept = [
            i
            for i, req in enumerate(self.reqs)
            if req.req_pool_idx is not None and req.kv_len < req.last_kv_len and req is not self.chunked_req
        ]
        if len(kept) == len(self.reqs):
            return
        self.reqs = [self.reqs[i] for i in kept]
        self.seq_lens_list = [self.seq_lens_list[i] for i in kept]
        index = self._tensor(kept)
        self.req_pool_indices = self.req_pool_indices[index]
        self.seq_lens = self.seq_lens[index]
        self.input_ids = self.input_ids[index]
        self._composition_changed()

    def merge_batch(self, other: ScheduleBatch) -> None:
        """Append the requests of ``other``."""
        self.reqs = self.reqs + other.reqs
        self.seq_lens_list = self.seq_lens_list + other.seq_lens_list
        self.req_pool_indices = torch.cat([self.req_pool_indices, other.req_pool_indices])
        self.seq_lens = torch.cat([self.seq_lens, other.seq_lens])
        self.input_ids = torch.cat([self.input_ids, other.input_ids])
        self._composition_changed()

    def reqs_to_retract(self) -> list[Req]:
        """The fewest requests whose slots let the others decode: least generated first, then longest prompt.

        One request is always left; a request alone fits, as its ``max_new_tokens`` is clipped to the pool.
        """
        order = sorted(self.reqs, key=lambda req: (-len(req.output_ids), len(req.origin_input_ids)))
        retracted: list[Req] = []
        while len(order) > 1:
            retracted.append(order.pop())
            self.pools.release(retracted[-1])
            if self.check_decode_mem(order):
                break
        return retracted

    def _composition_changed(self) -> None:
        self._sampling_info: SamplingBatchInfo | None = None
        self.has_grammar = any(req.grammar is not None for req in self.reqs)
        logprobs = [req.logprobs for req in self.reqs]
        self.return_logprob = any(one is not None for one in logprobs)
        self._top_logprobs_nums = self._token_ids_logprobs = None
        if self.return_logprob:
            self._top_logprobs_nums = [0 if one is None else one.top_num for one in logprobs]
            self._token_ids_logprobs = [[] if one is None else one.token_ids for one in logprobs]

    def _make_forward_batch(
        self, input_ids: torch.Tensor, positions: torch.Tensor, out_cache_loc: torch.Tensor, extend_seq_lens: list[int]
    ) -> ForwardBatch:
        pools = self.pools
        if self._sampling_info is None:
            self._sampling_info = SamplingBatchInfo.from_reqs(self.reqs, pools.vocab_size, pools.device)
        return ForwardBatch(
            forward_mode=self.forward_mode,
            input_ids=input_ids,
            positions=positions,
            req_pool_indices=self.req_pool_indices,
            seq_lens=self.seq_lens,
            seq_lens_list=self.seq_lens_list,
            out_cache_loc=out_cache_loc,
            extend_seq_lens=extend_seq_lens,
            sampling_info=self._sampling_info,
            req_to_token_pool=pools.req_to_token_pool,
            token_to_kv_pool=pools.token_to_kv_pool,
            attn_backend=pools.attn_backend,
            return_logprob=self.return_logprob,
            top_logprobs_nums=self._top_logprobs_nums,
            token_ids_logprobs=self._token_ids_logprobs,
        )

    def _last_locs(self, positions: torch.Tensor) -> torch.Tensor:
        """Slots of each request's token at ``positions`` [B]."""
        return self.pools.req_to_token_pool.req_to_token[self.req_pool_indices, positions].long()

    def _tensor(self, values: Sequence[int] | torch.Tensor) -> torch.Tensor:
        return to_device(values, torch.int64, self.pools.device)


def _tokens_between(req: Req, begin: int, end: int) -> list[int]:
    prompt = len(req.origin_input_ids)
    if end <= prompt:
        return req.origin_input_ids[begin:end]
    return req.origin_input_ids[begin:] + req.output_ids[max(begin - prompt, 0) : end - prompt]
