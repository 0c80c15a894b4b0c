"""Which KV slots are free.

One allocator for every page size: a slot is token ``slot % page_size`` of page ``slot // page_size``, and with
``page_size`` 1 a page is a slot. Page 0 is padding and is never handed out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from sglang.srt.platforms import to_device


def ceil_to_page(tokens: int, page_size: int) -> int:
    return -(-tokens // page_size) * page_size


class TokenToKVPoolAllocator:
    """A stack of free pages on ``device``; neither :meth:`free` nor an allocation waits for the device.

    Args:
        size: tokens of the KV pool; what doesn't fill a page is left unused.
    """

    def __init__(self, size: int, page_size: int, device: torch.device) -> None:
        self.page_size = page_size
        self.device = device
        self.num_pages = size // page_size
        self.size = self.num_pages * page_size
        self._in_page = torch.arange(page_size, device=device)
        self.clear()

    def clear(self) -> None:
        """Everything is free again."""
        self._stack = torch.arange(1, self.num_pages + 1, device=self.device)
        self._top = self.num_pages

    def available_size(self) -> int:
        """Free tokens."""
        return self._top * self.page_size

    def free_pages(self) -> torch.Tensor:
        """Numbers of the free pages, int64, in no particular order."""
        return self._stack[: self._top].clone()

    def extend_size(self, prefix_lens: Sequence[int], seq_lens: Sequence[int]) -> int:
        """Tokens, in whole pages, that :meth:`alloc_extend` takes for these lengths."""
        page = self.page_size
        return sum(ceil_to_page(e, page) - ceil_to_page(b, page) for b, e in zip(prefix_lens, seq_lens, strict=True))

    def alloc_extend(
        self, prefix_lens: Sequence[int], seq_lens: Sequence[int], last_locs: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Slots for each request's tokens ``prefix_lens[i] .. seq_lens[i] - 1``, request after request.

        A prefix that ends inside a page continues in it.

        Args:
            last_locs: int64 [B], the slot of each request's last prefix token, read only where that page has room; not
                needed for ``page_size`` 1.

        Returns:
            int64 [sum of the new tokens], or None (nothing taken) if there are not enough pages.
        """
        page = self.page_size
        pages = self._take(self.extend_size(prefix_lens, seq_lens) // page)
        if pages is None:
            return None
        if page == 1:
            return pages.clone()
        assert last_locs is not None
        # Every token lies ``offset`` slots behind a base: the slot behind its request's prefix, or the first of a page.
        begins, ends = np.array(prefix_lens), np.array(seq_lens)
        lens, room = ends - begins, -begins % page
        counts = np.maximum(lens - room + page - 1, 0) // page
        columns = np.stack([lens.cumsum() - lens, room, np.arange(len(lens)), counts.cumsum() - counts + len(lens)])
        starts, room, own_base, first_pages = columns.repeat(lens, axis=1)
        offsets = np.arange(len(starts)) - starts
        behind = offsets - room
        bases = np.where(behind < 0, own_base, first_pages + behind // page)
        offsets = np.where(behind < 0, offsets, behind % page)
        first_slots = torch.cat([last_locs + 1, pages * page])
        return first_slots[self._index(bases)] + self._index(offsets)

    def _index(self, values: np.ndarray[Any, np.dtype[np.int64]]) -> torch.Tensor:
        return to_device(torch.from_numpy(values), torch.int64, self.device)

    def decode_size(self, seq_lens: Sequence[int]) -> int:
        """Tokens, in whole pages, that :meth:`alloc_decode` takes for these lengths (after the step)."""
        page = self.page_size
        return sum((n - 1) % page == 0 for n in seq_lens) * page if page > 1 else len(seq_lens)

    def alloc_decode(self, seq_lens: Sequence[int]) -> torch.Tensor | None:
        """A page for each request whose token ``seq_lens[i] - 1`` begins one.

        Returns:
            int64, their numbers, to be read before anything is freed; or None (nothing taken) if there are not enough.
        """
        return self._take(self.decode_size(seq_lens) // self.page_size)

    def free(self, slots: torch.Tensor) -> None:
        """Give back whole pages.

        Args:
            slots: [n], in the order of their positions; the first one is the first of its page. The last page may be
                filled partly, it is freed all the same.
        """
        pages = slots[:: self.page_size] // self.page_size if self.page_size > 1 else slots
        top = self._top + len(pages)
        if top > self.num_pages:
            raise RuntimeError(f"{top} of {self.num_pages} KV pages are free: some were freed twice")
        self._stack[self._top : top] = pages
        self._top = top

    def _take(self, count: int) -> torch.Tensor | None:
        """Pages that were the top of the stack, where a later free overwrites them."""
        if count > self._top:
            return None
        self._top -= count
        return self._stack[self._top : self._top + count]
