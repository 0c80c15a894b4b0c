"""Prefix cache as a radix tree over token ids, in whole pages.

Every edge is a run of tokens with their KV slots. A node that running requests use is locked, with all nodes above
it; leaves that nobody has locked are evicted, least recently used first.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache, MatchResult

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

PageKey = tuple[int, ...]


class TreeNode:
    """The tokens between a parent and its children.

    Attributes:
        key: token ids, whole pages; empty for the root.
        value: int64 [len(key)], their KV slots.
        lock_ref: requests that use this node or one below it.
    """

    __slots__ = ("children", "key", "last_access", "lock_ref", "parent", "value")

    def __init__(self, parent: TreeNode | None, key: list[int], value: torch.Tensor, last_access: int) -> None:
        self.parent = parent
        self.children: dict[PageKey, TreeNode] = {}
        self.key = key
        self.value = value
        self.lock_ref = 0
        self.last_access = last_access

    def __lt__(self, other: TreeNode) -> bool:
        return self.last_access < other.last_access


class RadixCache(BasePrefixCache):
    """See :class:`BasePrefixCache`."""

    def __init__(self, req_to_token_pool: ReqToTokenPool, allocator: TokenToKVPoolAllocator) -> None:
        super().__init__(req_to_token_pool, allocator)
        self._clock = itertools.count()
        self._empty = torch.empty(0, dtype=torch.int64, device=allocator.device)
        self.reset()

    def reset(self) -> None:
        self.root_node = TreeNode(None, [], self._empty, next(self._clock))
        self._evictable_size = 0
        self._protected_size = 0
        self._evictable_leaves: set[TreeNode] = set()

    def match_prefix(self, token_ids: list[int]) -> MatchResult:
        node, values = self._descend(token_ids[: self._aligned(len(token_ids))])
        return MatchResult(torch.cat(values) if values else self._empty, node)

    def cache_finished_req(self, req: Req) -> None:
        kv_indices = self._kv_indices(req)
        token_ids = req.token_ids()
        # A request that got no token may have been given to one more step: what that computed is of nobody's token.
        aligned = self._aligned(min(req.kv_len, len(token_ids)))
        cached = self._insert(token_ids[:aligned], kv_indices[:aligned])
        # What was in the tree already, under other slots, and the page that is not full.
        self.allocator.free(kv_indices[req.cache_protected_len : cached])
        self.allocator.free(kv_indices[aligned:])
        self.dec_lock_ref(req.last_node)

    def cache_unfinished_req(self, req: Req) -> None:
        kv_indices = self._kv_indices(req)
        aligned = self._aligned(req.kv_len)
        key = req.token_ids()[:aligned]
        cached = self._insert(key, kv_indices[:aligned])
        self.allocator.free(kv_indices[req.cache_protected_len : cached])
        new_indices, new_last_node = self.match_prefix(key)
        kv_indices[req.cache_protected_len : cached] = new_indices[req.cache_protected_len : cached].to(torch.int32)
        req.cache_protected_len = aligned
        self.inc_lock_ref(new_last_node)
        self.dec_lock_ref(req.last_node)
        req.last_node = new_last_node

    def evict(self, num_tokens: int) -> int:
        heap = list(self._evictable_leaves)
        heapq.heapify(heap)
        evicted = 0
        while evicted < num_tokens and heap:
            node = heapq.heappop(heap)
            self.allocator.free(node.value)
            evicted += len(node.key)
            self._delete_leaf(node)
            if node.parent in self._evictable_leaves:
                heapq.heappush(heap, node.parent)
        return evicted

    def inc_lock_ref(self, node: TreeNode | None) -> None:
        for each in self._path(node):
            if each.lock_ref == 0:
                self._evictable_size -= len(each.key)
                self._protected_size += len(each.key)
                self._evictable_leaves.discard(each)
            each.lock_ref += 1

    def dec_lock_ref(self, node: TreeNode | None) -> None:
        for each in self._path(node):
            each.lock_ref -= 1
            if each.lock_ref == 0:
                self._evictable_size += len(each.key)
                self._protected_size -= len(each.key)
                self._update_leaf(each)

    def evictable_size(self) -> int:
        return self._evictable_size

    def protected_size(self) -> int:
        return self._protected_size

    def all_values_flatten(self) -> torch.Tensor:
        """The KV slots of the whole tree, int64, in no particular order."""
        stack, values = [self.root_node], [self._empty]
        while stack:
            node = stack.pop()
            values.append(node.value)
            stack.extend(node.children.values())
        return torch.cat(values)

    def _aligned(self, length: int) -> int:
        return length // self.page_size * self.page_size

    def _page_key(self, key: list[int], start: int) -> PageKey:
        return tuple(key[start : start + self.page_size])

    def _path(self, node: TreeNode | None) -> Iterator[TreeNode]:
        """``node`` and everything above it, without the root."""
        while node is not None and node is not self.root_node:
            yield node
            node = node.parent

    def _descend(self, key: list[int]) -> tuple[TreeNode, list[torch.Tensor]]:
        """Follow ``key`` as far as the tree goes, splitting the last node if it is left inside."""
        node, values, start = self.root_node, list[torch.Tensor](), 0
        now = next(self._clock)
        while start < len(key) and (child := node.children.get(self._page_key(key, start))) is not None:
            common = self._aligned(_common_length(child.key, key, start))
            node = child if common == len(child.key) else self._split(child, common)
            node.last_access = now
            values.append(node.value)
            start += common
            if node is not child:
                break
        return node, values

    def _insert(self, key: list[int], slots: torch.Tensor) -> int:
        """Add ``key`` with its slots, int32 [len(key)]; returns how many of its tokens were there before."""
        node, values = self._descend(key)
        cached = sum(len(value) for value in values)
        if cached < len(key):
            child = TreeNode(node, key[cached:], slots[cached:].to(torch.int64), next(self._clock))
            node.children[self._page_key(key, cached)] = child
            self._evictable_size += len(child.key)
            self._evictable_leaves.discard(node)
            self._update_leaf(child)
        return cached

    def _split(self, child: TreeNode, length: int) -> TreeNode:
        """Cut ``child`` behind its first ``length`` tokens; returns the new upper node."""
        assert child.parent is not None
        upper = TreeNode(child.parent, child.key[:length], child.value[:length].clone(), child.last_access)
        upper.lock_ref = child.lock_ref
        upper.children[self._page_key(child.key, length)] = child
        child.parent.children[self._page_key(child.key, 0)] = upper
        child.parent = upper
        child.key = child.key[length:]
        child.value = child.value[length:].clone()
        return upper

    def _delete_leaf(self, node: TreeNode) -> None:
        assert node.parent is not None
        del node.parent.children[self._page_key(node.key, 0)]
        self._evictable_leaves.discard(node)
        self._evictable_size -= len(node.key)
        self._update_leaf(node.parent)

    def _update_leaf(self, node: TreeNode) -> None:
        if node.lock_ref == 0 and not node.children and node is not self.root_node:
            self._evictable_leaves.add(node)


def _common_length(edge: list[int], key: list[int], start: int) -> int:
    """How many tokens of ``edge`` equal ``key[start:]``."""
    part = key[start : start + len(edge)]
    if part == edge:
        return len(edge)
    return next((i for i, (a, b) in enumerate(zip(edge, part, strict=False)) if a != b), len(part))
