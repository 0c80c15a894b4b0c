"""Which waiting requests join the next prefill batch: first come, first served, while memory is expected to last."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from enum import Enum, auto

from sglang.srt.managers.schedule_batch import MemoryPools, Req
from sglang.srt.mem_cache.allocator import ceil_to_page

# The estimate of what a request will generate stops here, lest one that may generate very much blocks the queue.
CLIP_MAX_NEW_TOKENS = 4096
# Prompt tokens of one prefill batch where prefill is not chunked; a longer prompt then runs alone.
MAX_PREFILL_TOKENS = 16384

INIT_NEW_TOKEN_RATIO = 0.7
MIN_NEW_TOKEN_RATIO = 0.14 * INIT_NEW_TOKEN_RATIO
NEW_TOKEN_RATIO_DECAY = (INIT_NEW_TOKEN_RATIO - MIN_NEW_TOKEN_RATIO) / 600  # per decode step
# Tokens each request should be able to generate before memory runs out again, for the estimate after a retraction.
RETRACT_DECODE_STEPS = 20


def ratio_after_retraction(reqs: Sequence[Req]) -> float:
    """The new token ratio that fits those that were not retracted."""
    generated = sum(len(req.output_ids) for req in reqs)
    possible = sum(req.max_new_tokens for req in reqs) + 1
    return min((generated + RETRACT_DECODE_STEPS * len(reqs)) / possible, 1.0)


class AddReqResult(Enum):
    """CONTINUE: admitted, try the next one. NO_TOKEN: memory (slots or rows) is short. OTHER: this batch is full."""

    CONTINUE = auto()
    NO_TOKEN = auto()
    OTHER = auto()


class PrefillAdder:
    """Collects the requests of one prefill batch.

    Three budgets, in tokens: those computed in this step (``rem_chunk_tokens``), free and evictable slots, and of
    those what is left when every running request is expected to generate ``new_token_ratio`` of what it may. The last
    one is an estimate; if it was too hopeful, requests are retracted.

    Attributes:
        can_run_list: the requests admitted, their ``fill_len`` set, their prefix locked.
        chunked_req: the one of them whose prompt does not fit into this step.
    """

    def __init__(
        self, pools: MemoryPools, running_reqs: Iterable[Req], new_token_ratio: float, chunked_prefill_size: int | None
    ) -> None:
        self._pools = pools
        self._page_size = pools.allocator.page_size
        self._chunking = chunked_prefill_size is not None
        self._rem_chunk_tokens = MAX_PREFILL_TOKENS if chunked_prefill_size is None else chunked_prefill_size
        remaining = [self._new_tokens(req) for req in running_reqs]
        self._alone = not remaining
        self._reserved_tokens = sum(remaining) * new_token_ratio
        self.can_run_list: list[Req] = []
        self.chunked_req: Req | None = None
        self.log_hit_tokens = 0
        self.log_input_tokens = 0

    def add_chunked_req(self, req: Req) -> None:
        """Admit the next chunk of a request. Its slots were counted when it was admitted, and no decode step comes
        between two chunks."""
        self._add(req, req.num_tokens() - req.kv_len)

    def add_waiting_reqs(self, waiting_queue: deque[Req], free_rows: int) -> AddReqResult:
        """Take as many of the queue's first requests as fit, also into ``free_rows`` rows; says why not more, CONTINUE
        where none is left."""
        free_rows += len(self.can_run_list)  # a request in pieces has its row
        result = AddReqResult.CONTINUE
        while waiting_queue and result is AddReqResult.CONTINUE:
            if self.is_full():
                return AddReqResult.OTHER
            if len(self.can_run_list) >= free_rows:
                return AddReqResult.NO_TOKEN
            result = self.add_one_req(waiting_queue[0])
            if result is AddReqResult.CONTINUE:
                waiting_queue.popleft()
        return result

    def add_one_req(self, req: Req) -> AddReqResult:
        """Admit a waiting request, or leave it as it was."""
        tree_cache, page = self._pools.tree_cache, self._page_size
        token_ids = req.token_ids()
        prefix_indices, last_node = tree_cache.match_prefix(token_ids[: req.max_prefix_len()])
        extend_len = len(token_ids) - len(prefix_indices)
        # Locked before the budget is read: these slots are no longer evictable.
        tree_cache.inc_lock_ref(last_node)
        # One request alone always fits, whatever it may generate.
        needed = ceil_to_page(extend_len, page) + (0 if self._alone else self._new_tokens(req))
        free = self._pools.allocator.available_size() + tree_cache.evictable_size() - self._reserved_tokens
        if needed > free:
            result = AddReqResult.NO_TOKEN
        elif self._chunking:
            result = AddReqResult.CONTINUE if self._rem_chunk_tokens >= page else AddReqResult.OTHER
        else:
            fits = extend_len <= self._rem_chunk_tokens or not self.can_run_list
            result = AddReqResult.CONTINUE if fits else AddReqResult.OTHER
        if result is not AddReqResult.CONTINUE:
            tree_cache.dec_lock_ref(last_node)
            return result
        req.prefix_indices = prefix_indices
        req.last_node = last_node
        req.kv_len = req.cache_protected_len = len(prefix_indices)
        if req.cached_tokens is None:
            req.cached_tokens = req.kv_len
        self.log_hit_tokens += req.kv_len
        self._add(req, extend_len)
        return result

    def is_full(self) -> bool:
        """Whether nothing more can be computed in this step."""
        return self.chunked_req is not None or self._rem_chunk_tokens <= 0

    def _add(self, req: Req, extend_len: int) -> None:
        step_len = extend_len
        if self._chunking and extend_len > self._rem_chunk_tokens:
            step_len = self._rem_chunk_tokens // self._page_size * self._page_size
            self.chunked_req = req
        paged = ceil_to_page(step_len, self._page_size)
        self._rem_chunk_tokens -= paged
        self._reserved_tokens += paged + (0 if self.chunked_req is req else self._new_tokens(req))
        self._alone = False
        req.fill_len = req.kv_len + step_len
        self.can_run_list.append(req)
        self.log_input_tokens += step_len

    def _new_tokens(self, req: Req) -> int:
        """What the request may still generate, as far as it is taken seriously."""
        return min(req.max_new_tokens - len(req.output_ids), CLIP_MAX_NEW_TOKENS)
