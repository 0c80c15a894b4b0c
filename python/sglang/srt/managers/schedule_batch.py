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

from sglang.srt.managers.io_struct import ReqOutput, TokenizedGenerateReqInput, TokenLogprob, TopLogprobs
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode, LogitsProcessorOutput
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

if TYPE_CHECKING:
    from sglang.srt.constrained.xgrammar_backend import XGrammarGrammar
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.mem_cache.radix_cache import TreeNode

# Tokens each request should be able to generate before memory runs out again, for the estimate after a retraction.
RETRACT_DECODE_STEPS = 20


@dataclass(frozen=True)
class MemoryPools:
    """What batches allocate from and pass on to the model; one per scheduler."""

    req_to_token_pool: ReqToTokenPool
    token_to_kv_pool: MHATokenToKVPool
    allocator: TokenToKVPoolAllocator
    tree_cache: BasePrefixCache
    attn_backend: AttentionBackend
    vocab_size: int

    @property
    def device(self) -> torch.device:
        return self.allocator.device

    def release(self, req: Req) -> None:
        """Give the request's row and slots back; what the prefix cache can use stays in it."""
        assert req.req_pool_idx is not None
        self.tree_cache.cache_finished_req(req)
        self.req_to_token_pool.free(req.req_pool_idx)
        req.reset_kv()

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
        kv_len: tokens whose KV slots are in that row.
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

        self.return_logprob = recv.return_logprob
        self.top_logprobs_num = recv.top_logprobs_num if recv.return_logprob else 0
        self.token_ids_logprob = recv.token_ids_logprob if recv.return_logprob else []
        self.logprob_start_len = recv.logprob_start_len
        self.input_token_logprobs: list[float] = []
        self.input_top_logprobs: list[list[tuple[float, int]]] = []
        self.input_token_ids_logprobs: list[list[tuple[float, int]]] = []
        self.output_token_logprobs: list[TokenLogprob] = []
        self.output_top_logprobs: list[TopLogprobs] = []
        self.output_token_ids_logprobs: list[TopLogprobs] = []
        self._sent_len = 0
        self._sent_input_logprobs = False

    def token_ids(self) -> list[int]:
        return self.origin_input_ids + self.output_ids

    def num_tokens(self) -> int:
        return len(self.origin_input_ids) + len(self.output_ids)

    def finished(self) -> bool:
        return self.finished_reason is not None

    def max_prefix_len(self) -> int:
        """How much of the request may come from the prefix cache.

        The last token has to be computed for its logits; a wanted log-probability needs the hidden state before it.
        """
        limit = self.num_tokens() - 1
        if self.return_logprob and not self._input_logprobs_complete():
            limit = min(limit, self.logprob_start_len)
        return limit

    def input_logprob_range(self, begin: int, end: int) -> tuple[int, list[int]]:
        """Which log-probabilities the step over tokens ``begin .. end - 1`` has to give.

        Returns:
            number of the first hidden state in the step, and the target token of it and of each one behind it.
        """
        if not self.return_logprob or self._input_logprobs_complete():
            return 0, []
        first = max(begin, self.logprob_start_len)
        targets = self.origin_input_ids[first + 1 : end + 1] if first < end else []
        return first - begin if targets else 0, targets

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

    def add_input_logprobs(self, output: LogitsProcessorOutput, i: int) -> None:
        """Take the prompt's log-probabilities of row ``i`` of an extend step."""
        if output.input_token_logprobs is not None:
            self.input_token_logprobs += output.input_token_logprobs[i]
        if self.top_logprobs_num and output.input_top_logprobs is not None:
            self.input_top_logprobs += output.input_top_logprobs[i]
        if self.token_ids_logprob and output.input_token_ids_logprobs is not None:
            self.input_token_ids_logprobs += output.input_token_ids_logprobs[i]

    def add_output_logprobs(self, output: LogitsProcessorOutput, i: int) -> None:
        """Take the log-probability of the newest output token, row ``i`` of a step."""
        if len(self.output_token_logprobs) == len(self.output_ids):  # max_new_tokens is 0
            return
        assert output.next_token_logprobs is not None
        self.output_token_logprobs.append((output.next_token_logprobs[i], self.output_ids[-1]))
        if self.top_logprobs_num:
            assert output.next_top_logprobs is not None
            self.output_top_logprobs.append(list(output.next_top_logprobs[i]))
        if self.token_ids_logprob:
            assert output.next_token_ids_logprobs is not None
            self.output_token_ids_logprobs.append(list(output.next_token_ids_logprobs[i]))

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
        if self.return_logprob:
            output.output_token_logprobs = self.output_token_logprobs[sent:]
            output.output_top_logprobs = self.output_top_logprobs[sent:] if self.top_logprobs_num else None
            output.output_token_ids_logprobs = self.output_token_ids_logprobs[sent:] if self.token_ids_logprob else None
            if not self._sent_input_logprobs and self._input_logprobs_complete():
                self._sent_input_logprobs = True
                output.input_token_logprobs = self._input_logprob_pairs()
                first: list[TopLogprobs] = [None] * (len(output.input_token_logprobs) > 0)
                if self.top_logprobs_num:
                    output.input_top_logprobs = first + [list(top) for top in self.input_top_logprobs]
                if self.token_ids_logprob:
                    output.input_token_ids_logprobs = first + [list(ids) for ids in self.input_token_ids_logprobs]
        return output

    def _input_logprob_pairs(self) -> list[TokenLogprob]:
        """One pair for each prompt token from ``logprob_start_len`` on; the first one's value is None."""
        targets = self.origin_input_ids[self.logprob_start_len :]
        return list(zip([None, *self.input_token_logprobs], targets, strict=False))

    def _input_logprobs_complete(self) -> bool:
        return len(self.input_token_logprobs) >= len(self.origin_input_ids) - self.logprob_start_len - 1


class ScheduleBatch:
    """Requests that run together.

    Attributes:
        chunked_req: the one of ``reqs`` whose prompt this extend step doesn't finish; its sampled token means nothing.
        req_pool_indices: int64 [B]. seq_lens: int64 [B], tokens in the KV cache; ``seq_lens_list`` the same in Python.
        input_ids: int64 [B], each request's newest token, that the next decode step computes.
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
        row_table = pools.req_to_token_pool.req_to_token
        for req in reqs:
            if req.req_pool_idx is None:
                assert req.prefix_indices is not None
                req.req_pool_idx = pools.req_to_token_pool.alloc()
                row_table[req.req_pool_idx, : req.kv_len] = req.prefix_indices.to(torch.int32)
                req.prefix_indices = None
        begins, ends = [req.kv_len for req in reqs], [req.fill_len for req in reqs]
        extend_seq_lens = [end - begin for begin, end in zip(begins, ends, strict=True)]
        self.seq_lens_list = ends
        self.seq_lens = self._tensor(ends)
        self.req_pool_indices = self._tensor([req.req_pool_idx for req in reqs])

        needed = pools.allocator.extend_size(begins, ends)
        pools.tree_cache.ensure_available(needed)
        last_locs = self._last_locs((self._tensor(begins) - 1).clamp_(min=0))
        out_cache_loc = pools.allocator.alloc_extend(begins, ends, last_locs)
        if out_cache_loc is None:
            raise RuntimeError(f"a prefill was admitted that needs {needed} of {pools.usage()}")
        positions = torch.cat([torch.arange(b, e, device=pools.device) for b, e in zip(begins, ends, strict=True)])
        rows = self.req_pool_indices.repeat_interleave(self._tensor(extend_seq_lens), output_size=len(positions))
        pools.req_to_token_pool.write(rows, positions, out_cache_loc)
        input_ids = self._tensor(
            list(chain.from_iterable(_tokens_between(req, b, e) for req, b, e in zip(reqs, begins, ends, strict=True)))
        )
        starts, targets = [], []
        for req, begin, end in zip(reqs, begins, ends, strict=True):
            start, wanted = req.input_logprob_range(begin, end)
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
        out_cache_loc = pools.allocator.alloc_decode(seq_lens_list, self._last_locs(positions - 1))
        if out_cache_loc is None:
            raise RuntimeError(f"no slots for a decode step of {len(self.reqs)} requests, {pools.usage()}")
        pools.req_to_token_pool.write(self.req_pool_indices, positions, out_cache_loc)
        # New objects, not updates in place: the batch of the previous step may still be in use.
        self.seq_lens = positions + 1
        self.seq_lens_list = seq_lens_list
        for req in self.reqs:
            req.kv_len += 1
        lens = [1] * len(self.reqs)
        self.forward_batch = self._make_forward_batch(self.input_ids, positions, out_cache_loc, lens)

    def filter_batch(self) -> None:
        """Keep the requests that decode on: neither released (finished, aborted, retracted) nor still in chunks."""
        kept = [i for i, req in enumerate(self.reqs) if req.req_pool_idx is not None and req is not self.chunked_req]
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
        self.return_logprob = any(req.return_logprob for req in self.reqs)
        self._top_logprobs_nums = [req.top_logprobs_num for req in self.reqs] if self.return_logprob else None
        self._token_ids_logprobs = [req.token_ids_logprob for req in self.reqs] if self.return_logprob else None

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

    def _last_locs(self, positions: torch.Tensor) -> torch.Tensor | None:
        """Slots of each request's token at ``positions`` [B], where the allocator needs them."""
        if self.pools.allocator.page_size == 1:
            return None
        return self.pools.req_to_token_pool.req_to_token[self.req_pool_indices, positions].long()

    def _tensor(self, values: Sequence[int | None]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.pools.device)


def _tokens_between(req: Req, begin: int, end: int) -> list[int]:
    prompt = len(req.origin_input_ids)
    if end <= prompt:
        return req.origin_input_ids[begin:end]
    return req.origin_input_ids[begin:] + req.output_ids[max(begin - prompt, 0) : end - prompt]
