"""Which pages of the KV cache a step reads, in FlashInfer's form: compressed rows of page numbers."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from sglang.kernels import layers
from sglang.srt.platforms import to_device

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

# Of the kernel: threads of a block, pages of a thread, unless that takes more blocks than a grid may have.
THREADS, PAGES_OF_THREAD, MOST_BLOCKS = 256, 8, 65535


@dataclass(frozen=True)
class Pages:
    """The visible pages of B requests, request after request.

    Attributes:
        indptr: int32 [B + 1] on the host: request i has the indices from ``indptr[i]`` to ``indptr[i + 1]``.
        indices: int32 [indptr[B]] on the device: numbers of pages.
        last_page_len: int32 [B] on the host: slots of a request's last page that hold a token.
        page_size: slots of a page.
    """

    indptr: torch.Tensor
    indices: torch.Tensor
    last_page_len: torch.Tensor
    page_size: int

    @classmethod
    def of(cls, indptr: list[int], last_page_len: list[int], indices: torch.Tensor, page_size: int) -> Pages:
        host = (
            torch.tensor(values, dtype=torch.int32, pin_memory=indices.device.type == "cuda")
            for values in (indptr, last_page_len)
        )
        return cls(next(host), indices, next(host), page_size)


def list_pages(batch: ForwardBatch, window: int | None, page_size: int, out: torch.Tensor | None = None) -> Pages:
    """The pages with a token that one of the batch's new tokens sees in layers with this ``window``.

    Lengths come from the host's lists and slots from the device's table, so nothing waits for the device.

    Args:
        out: int32, where the indices are put, from the first element on.
    """
    counts, firsts, last_page_len = [], [], []
    for length, new in zip(batch.seq_lens_list, batch.extend_seq_lens, strict=True):
        # The first new token sees window - 1 tokens before it.
        first = 0 if window is None else max(0, length - new - window + 1) // page_size
        firsts.append(first)
        counts.append(-(-length // page_size) - first)
        last_page_len.append((length - 1) % page_size + 1)
    indptr = [0, *accumulate(counts)]
    table = batch.req_to_token_pool.req_to_token
    if out is None:
        out = torch.empty(indptr[-1], dtype=torch.int32, device=table.device)
    indices = out[: indptr[-1]]
    first, begin = to_device(torch.tensor([[*firsts, 0], indptr]), torch.int64, table.device)
    if table.device.type == "cuda" and layers.unavailable(table.get_device()) is None:
        launch(table, batch.req_pool_indices, first, begin, indices, page_size, max(counts))
    else:
        gather(table, batch.req_pool_indices, first, begin, indices, page_size)
    return Pages.of(indptr, last_page_len, indices, page_size)


def gather(
    table: torch.Tensor,
    rows: torch.Tensor,
    first: torch.Tensor,
    begin: torch.Tensor,
    indices: torch.Tensor,
    page_size: int,
) -> None:
    """``indices[begin[i] + j] = table[rows[i], (first[i] + j) * page_size] // page_size`` up to ``begin[i + 1]``, for
    requests i of B, with torch.

    Args:
        table: int32 [any, most tokens].
        rows: int64 [B].
        first, begin: int64 [B + 1]; the last of ``first`` means nothing.
        indices: int32 [begin[B]].
    """
    places = torch.add((first - begin)[:-1] * page_size, rows, alpha=table.stride(0))
    places = places.repeat_interleave(begin.diff(), output_size=len(indices))
    places += torch.arange(0, len(indices) * page_size, page_size, device=table.device)
    torch.div(table.view(-1).index_select(0, places), page_size, rounding_mode="floor", out=indices)


def launch(
    table: torch.Tensor,
    rows: torch.Tensor,
    first: torch.Tensor,
    begin: torch.Tensor,
    indices: torch.Tensor,
    page_size: int,
    longest: int,
) -> None:
    """As :func:`gather`, in one kernel without temporary memory. ``longest``: most pages of one request."""
    params = layers.PAGES.pack(
        table.data_ptr(),
        rows.contiguous().data_ptr(),
        first.data_ptr(),
        begin.data_ptr(),
        indices.data_ptr(),
        table.stride(0),
        page_size,
    )
    blocks = min(-(-longest // (THREADS * PAGES_OF_THREAD)), MOST_BLOCKS)
    layers.launch("list_pages", torch.int32, table.get_device(), (len(rows), blocks), THREADS, params)
