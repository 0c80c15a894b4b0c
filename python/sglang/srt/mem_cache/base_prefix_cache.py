"""What the scheduler asks of a prefix cache."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
    from sglang.srt.mem_cache.radix_cache import TreeNode


class MatchResult(NamedTuple):
    """A cached prefix: its KV slots, int64 [n] with n a multiple of the page size, and the node that ends it."""

    device_indices: torch.Tensor
    last_node: TreeNode | None


class BasePrefixCache(ABC):
    """Owns the KV slots that no request holds any more but a later one may reuse.

    A request holds its slots from ``req.cache_protected_len`` on; those before belong to the cache, which keeps them
    while ``req.last_node`` is locked.
    """

    def __init__(self, req_to_token_pool: ReqToTokenPool, allocator: TokenToKVPoolAllocator) -> None:
        self.req_to_token_pool = req_to_token_pool
        self.allocator = allocator
        self.page_size = allocator.page_size

    @abstractmethod
    def reset(self) -> None:
        """Forget everything. The slots are not freed: the caller clears the allocator, too."""

    @abstractmethod
    def match_prefix(self, token_ids: list[int]) -> MatchResult:
        """The longest cached prefix of ``token_ids``, in whole pages. Lock its node before anything is evicted."""

    @abstractmethod
    def cache_finished_req(self, req: Req) -> None:
        """Take over or free the slots of the request's first ``kv_len`` tokens and unlock its node."""

    @abstractmethod
    def cache_unfinished_req(self, req: Req) -> None:
        """Make the request's first ``kv_len`` tokens reusable by others while it runs."""

    @abstractmethod
    def evict(self, num_tokens: int) -> int:
        """Free at least ``num_tokens`` slots, least recently used first, as far as they are not locked.

        Returns:
            tokens freed.
        """

    @abstractmethod
    def inc_lock_ref(self, node: TreeNode | None) -> None:
        """Keep ``node`` and what is above it."""

    @abstractmethod
    def dec_lock_ref(self, node: TreeNode | None) -> None:
        """Undo one :meth:`inc_lock_ref`."""

    @abstractmethod
    def evictable_size(self) -> int:
        """Tokens held that nobody has locked."""

    @abstractmethod
    def protected_size(self) -> int:
        """Tokens held that somebody has locked."""

    def ensure_available(self, num_tokens: int) -> bool:
        """Evict until ``num_tokens`` slots are free; False if that is not possible (something may be evicted).

        What is evicted at a time is 1 % of what could be, or more: to look for the oldest takes as long as there are
        leaves, and a full cache would do so at every step.
        """
        missing = num_tokens - self.allocator.available_size()
        if missing > 0:
            self.evict(max(missing, self.evictable_size() // 100))
        return self.allocator.available_size() >= num_tokens

    def _kv_indices(self, req: Req) -> torch.Tensor:
        return self.req_to_token_pool.req_to_token[req.req_pool_idx, : req.kv_len]
