"""Which KV slots are free.

One allocator for every page size: a slot is token ``slot % page_size`` of page ``slot // page_size``, and with
``page_size`` 1 a page is a slot. Page 0 is padding and is never handed out.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


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
        if pages is None or page == 1:
            return pages
        assert last_locs is not None
        parts = []
        taken = 0
        for i, (begin, end) in enumerate(zip(prefix_lens, seq_lens, strict=True)):
            tail_end = min(ceil_to_page(begin, page), end)
            if tail_end > begin:
                parts.append(last_locs[i] + 1 + self._in_page[: tail_end - begin])
            count = -(-(end - tail_end) // page)
            new = pages[taken : taken + count, None] * page + self._in_page
            parts.append(new.view(-1)[: end - tail_end])
            taken += count
        return torch.cat(parts)

    def decode_size(self, seq_lens: Sequence[int]) -> int:
        """Tokens, in whole pages, that :meth:`alloc_decode` takes for these lengths (after the step)."""
        page = self.page_size
        return sum((n - 1) % page == 0 for n in seq_lens) * page if page > 1 else len(seq_lens)

    def alloc_decode(self, seq_lens: Sequence[int], last_locs: torch.Tensor | None) -> torch.Tensor | None:
        """One slot for each request's token ``seq_lens[i] - 1``.

        Args:
            last_locs: int64 [B], the slot of the token before; not needed for ``page_size`` 1.

        Returns:
            int64 [B], or None (nothing taken) if there are not enough pages.
        """
        page = self.page_size
        if page == 1:
            return self._take(len(seq_lens))
        assert last_locs is not None
        starts = [i for i, n in enumerate(seq_lens) if (n - 1) % page == 0]
        pages = self._take(len(starts))
        if pages is None:
            return None
        slots = last_locs + 1
        if starts:
            slots[torch.tensor(starts, device=self.device)] = pages * page
        return slots

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
        if count > self._top:
            return None
        self._top -= count
        # A copy: a later free overwrites this part of the stack.
        return self._stack[self._top : self._top + count].clone()
