"""What a decode step reads of each request, and the new tokens' slots: on a GPU in one kernel."""

from __future__ import annotations

import torch

from sglang.kernels import layers

DecodeInputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def decode_inputs(
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    rows: torch.Tensor,
    table: torch.Tensor,
    pages: torch.Tensor,
    page_size: int,
) -> DecodeInputs:
    """Put the slot of each request's new token into the table: the one behind its last token's, or the first of a page.

    Args:
        token_ids: int64 [B], negative where there was none to choose: such a request goes on with token 0 until its end
            is known.
        positions: int64 [B], of these tokens, positive.
        rows: int64 [B], of the table, each once.
        table: int32 [any, longest request], contiguous.
        pages: int64, contiguous: one for each request whose token begins a page, in the order of the batch.

    Returns:
        int64 [B] each: the ids that the step computes, the requests' lengths with them, and their slots.
    """
    if table.device.type == "cuda" and layers.unavailable(table.get_device()) is None:
        return launch(token_ids, positions, rows, table, pages, page_size)
    slots_of_all = table.view(-1)
    places = torch.add(positions, rows, alpha=table.stride(0))
    if page_size == 1:
        slots = pages.clone()
    else:
        slots = slots_of_all.index_select(0, places - 1).long().add_(1)
        if len(pages):
            slots.masked_scatter_(positions % page_size == 0, pages * page_size)
    slots_of_all.index_copy_(0, places, slots.to(torch.int32))
    return token_ids.clamp(min=0), positions + 1, slots


def launch(
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    rows: torch.Tensor,
    table: torch.Tensor,
    pages: torch.Tensor,
    page_size: int,
) -> DecodeInputs:
    """As :func:`decode_inputs`, in one kernel."""
    assert all(x.is_contiguous() for x in (token_ids, positions, rows, pages))
    out = torch.empty((3, len(rows)), dtype=torch.int64, device=table.device)
    params = layers.DECODE_INPUTS.pack(
        token_ids.data_ptr(), positions.data_ptr(), rows.data_ptr(), pages.data_ptr(), table.data_ptr(), out.data_ptr(),
        table.stride(0), page_size,
    )  # fmt: skip
    layers.launch("decode_inputs", torch.int64, table.get_device(), (len(rows), 1), 32, params)
    input_ids, seq_lens, slots = out.unbind()
    return input_ids, seq_lens, slots
