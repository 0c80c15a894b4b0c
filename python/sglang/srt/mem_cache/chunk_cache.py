"""The cache that keeps nothing (``--disable-radix-cache``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache, MatchResult

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.radix_cache import TreeNode


class ChunkCache(BasePrefixCache):
    """Every request owns all of its slots and frees them when it finishes."""

    def reset(self) -> None:
        return None

    def match_prefix(self, token_ids: list[int]) -> MatchResult:
        return MatchResult(torch.empty(0, dtype=torch.int64, device=self.allocator.device), None)

    def cache_finished_req(self, req: Req) -> None:
        self.allocator.free(self._kv_indices(req))

    def cache_unfinished_req(self, req: Req) -> None:
        return None

    def evict(self, num_tokens: int) -> int:
        return 0

    def inc_lock_ref(self, node: TreeNode | None) -> None:
        return None

    def dec_lock_ref(self, node: TreeNode | None) -> None:
        return None

    def evictable_size(self) -> int:
        return 0

    def protected_size(self) -> int:
        return 0
