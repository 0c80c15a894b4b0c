from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.chunk_cache import ChunkCache
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixCache

CPU = torch.device("cpu")


class Setup:
    def __init__(self, page: int = 1, size: int = 64) -> None:
        self.rows = ReqToTokenPool(8, 64, CPU)
        self.allocator = TokenToKVPoolAllocator(size, page, CPU)
        self.cache = RadixCache(self.rows, self.allocator)

    def start(self, tokens: list[int]) -> Any:
        """A request that has computed all of ``tokens``."""
        indices, node = self.cache.match_prefix(tokens[:-1])
        self.cache.inc_lock_ref(node)
        prefix = len(indices)
        slots = self.allocator.alloc_extend([prefix], [len(tokens)], indices[-1:] if prefix else torch.tensor([0]))
        assert slots is not None
        row = self.rows.alloc()
        self.rows.req_to_token[row, : len(tokens)] = torch.cat([indices, slots]).int()
        return SimpleNamespace(
            req_pool_idx=row,
            kv_len=len(tokens),
            cache_protected_len=prefix,
            last_node=node,
            token_ids=lambda: tokens,
            prefix=prefix,
        )

    def finish(self, req: Any) -> None:
        self.cache.cache_finished_req(req)
        self.rows.free(req.req_pool_idx)

    def row(self, req: Any) -> list[int]:
        return self.rows.req_to_token[req.req_pool_idx, : req.kv_len].tolist()

    def check(self) -> None:
        cache, allocator = self.cache, self.allocator
        assert cache.protected_size() == 0
        assert cache.evictable_size() + allocator.available_size() == allocator.size
        assert len(cache.all_values_flatten()) == cache.evictable_size()


def test_a_finished_request_is_found_again_up_to_where_it_differs() -> None:
    s = Setup()
    first = s.start([1, 2, 3, 4, 5])
    slots = s.row(first)
    s.finish(first)
    s.check()
    assert s.cache.match_prefix([1, 2, 3, 4, 5]).device_indices.tolist() == slots
    assert s.cache.match_prefix([1, 2, 3, 9]).device_indices.tolist() == slots[:3]
    assert s.cache.match_prefix([1, 2, 3, 4, 5, 6]).device_indices.tolist() == slots
    assert len(s.cache.match_prefix([2]).device_indices) == 0
    assert len(s.cache.match_prefix([]).device_indices) == 0


@pytest.mark.parametrize("page", [1, 4])
def test_what_was_computed_behind_the_last_token_is_not_cached(page: int) -> None:
    s = Setup(page=page)
    req = s.start(list(range(9)))
    req.token_ids = lambda: list(range(8))
    s.finish(req)
    s.check()
    assert s.cache.evictable_size() == len(s.cache.match_prefix(list(range(9))).device_indices) == 8


def test_only_whole_pages_are_cached() -> None:
    s = Setup(page=4)
    first = s.start([1, 2, 3, 4, 5, 6, 7])
    slots = s.row(first)
    s.finish(first)
    s.check()
    assert s.cache.evictable_size() == 4
    assert s.cache.match_prefix([1, 2, 3, 4, 5, 6, 7, 8]).device_indices.tolist() == slots[:4]
    assert len(s.cache.match_prefix([1, 2, 3]).device_indices) == 0
    # Two pages that differ in their last token share nothing.
    assert len(s.cache.match_prefix([1, 2, 3, 9]).device_indices) == 0


def test_two_that_run_at_once_end_up_with_one_copy() -> None:
    for page in (1, 4):
        s = Setup(page=page)
        a, b = s.start(list(range(10))), s.start(list(range(10)))
        assert set(s.row(a)).isdisjoint(s.row(b))
        s.cache.cache_unfinished_req(a)
        s.cache.cache_unfinished_req(b)
        shared = 10 // page * page
        assert s.row(a)[:shared] == s.row(b)[:shared]
        assert s.cache.protected_size() == shared and s.cache.evictable_size() == 0
        s.finish(a)
        assert s.cache.protected_size() == shared
        s.finish(b)
        s.check()


def test_locked_nodes_are_not_evicted() -> None:
    s = Setup()
    s.finish(s.start([1, 2, 3, 4]))
    running = s.start([1, 2, 9])
    assert running.prefix == 2
    assert s.cache.evictable_size() == 2
    assert s.cache.evict(100) == 2
    assert s.cache.protected_size() == 2 and s.cache.evictable_size() == 0
    assert s.row(running)[:2] == s.cache.match_prefix([1, 2]).device_indices.tolist()
    s.finish(running)
    s.check()
    assert s.cache.evict(100) == 3
    assert s.allocator.available_size() == s.allocator.size


def test_the_least_recently_used_goes_first_and_leaves_before_parents() -> None:
    s = Setup()
    s.finish(s.start([1, 2, 3]))
    s.finish(s.start([1, 2, 4]))
    s.finish(s.start([7, 8]))
    s.cache.match_prefix([1, 2, 3])
    assert s.cache.evict(1) == 1
    assert len(s.cache.match_prefix([1, 2, 4]).device_indices) == 2
    assert s.cache.evict(1) == 2
    assert len(s.cache.match_prefix([7, 8]).device_indices) == 0
    assert len(s.cache.match_prefix([1, 2, 3]).device_indices) == 3
    assert s.cache.evict(2) == 3
    assert s.allocator.available_size() == s.allocator.size


def test_a_match_inside_an_edge_keeps_locks_right() -> None:
    s = Setup(page=2)
    running = s.start([1, 2, 3, 4, 5, 6])
    s.cache.cache_unfinished_req(running)
    assert len(s.cache.match_prefix([1, 2, 3, 9]).device_indices) == 2
    assert s.cache.protected_size() == 6 and s.cache.evict(100) == 0
    s.finish(running)
    s.check()
    assert s.cache.evictable_size() == 6


def test_ensure_available_evicts_only_what_is_missing() -> None:
    s = Setup(size=12)
    s.finish(s.start([1, 2, 3]))
    s.finish(s.start([4, 5, 6]))
    assert s.cache.ensure_available(6) and s.cache.evictable_size() == 6
    assert s.cache.ensure_available(7) and s.cache.evictable_size() == 3
    assert not s.cache.ensure_available(13)


def test_a_full_cache_is_not_searched_for_every_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    s = Setup(size=1000)
    for first in range(0, 1000, 2):
        s.finish(s.start([first, first + 1]))
    evictions: list[int] = []
    evict = type(s.cache).evict
    monkeypatch.setattr(type(s.cache), "evict", lambda self, n: evictions.append(n) or evict(self, n))
    for free in range(1, 21):
        assert s.cache.ensure_available(free)
    assert evictions == [10, 9], "1 % of what could be evicted at a time"


def test_reset_forgets_everything() -> None:
    s = Setup()
    s.finish(s.start([1, 2, 3]))
    s.cache.reset()
    s.allocator.clear()
    assert len(s.cache.match_prefix([1, 2, 3]).device_indices) == 0
    s.check()
    assert s.allocator.available_size() == s.allocator.size


@pytest.mark.parametrize("page", [1, 4])
def test_chunk_cache_frees_everything(page: int) -> None:
    rows, allocator = ReqToTokenPool(2, 32, CPU), TokenToKVPoolAllocator(32, page, CPU)
    cache = ChunkCache(rows, allocator)
    slots = allocator.alloc_extend([0], [10], torch.tensor([0]))
    assert slots is not None
    rows.req_to_token[0, :10] = slots.int()
    req: Any = SimpleNamespace(req_pool_idx=0, kv_len=10)
    cache.cache_unfinished_req(req)
    assert len(cache.match_prefix(list(range(10))).device_indices) == 0
    cache.cache_finished_req(req)
    assert allocator.available_size() == 32 and cache.evictable_size() == cache.protected_size() == 0
