"""``decode_inputs.cu`` and its twin in torch against a loop in Python: on a GPU, and compiled for the CPU."""

import pytest
import torch

from sglang.srt.mem_cache import decode_inputs


@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
@pytest.mark.parametrize("requests", [1, 2, 33, 100])
def test_steps(device: str, requests: int, page_size: int) -> None:
    """Every request's slots lie in its pages, and nothing else changes."""
    generator = torch.Generator().manual_seed(requests)
    width, steps = 300, 2 * page_size + 3
    lengths = torch.randint(1, width - steps, (requests,), generator=generator)
    rows = torch.randperm(requests + 3, generator=generator)[:requests]
    for compute in (decode_inputs.decode_inputs, decode_inputs.launch):
        table = torch.randint(1 << 20, (requests + 3, width), generator=generator, dtype=torch.int32)
        wanted, table, positions = table.clone(), table.to(device), lengths.to(device)
        next_page = 7
        for step in range(steps):
            pages, slots = [], []
            for row, position in zip(rows.tolist(), (lengths + step).tolist(), strict=True):
                if position % page_size == 0:
                    pages.append(next_page)
                    wanted[row, position] = next_page * page_size
                    next_page += 3
                else:
                    wanted[row, position] = wanted[row, position - 1] + 1
                slots.append(int(wanted[row, position]))
            tokens = torch.randint(-2, 5, (requests,), generator=generator)
            given = [tokens.to(device), positions.clone(), rows.to(device)]
            kept = [x.clone() for x in given]
            taken = torch.tensor(pages, dtype=torch.int64, device=device)
            input_ids, seq_lens, found = compute(*given, table, taken, page_size)
            assert all(map(torch.equal, given, kept)) and torch.equal(table.cpu(), wanted)
            assert input_ids.tolist() == tokens.clamp(min=0).tolist() and found.tolist() == slots
            assert seq_lens.tolist() == (lengths + step + 1).tolist()
            assert all(x.dtype == torch.int64 and x.is_contiguous() for x in (input_ids, seq_lens, found))
            positions = seq_lens


def test_steps_that_are_enqueued_at_once(device: str) -> None:
    found = []
    for compute, place in ((decode_inputs.decode_inputs, "cpu"), (decode_inputs.launch, device)):
        rows, lengths, pages = (torch.tensor(x, device=place) for x in ([4, 0, 2], [1, 5, 8], [7, 8, 9]))
        ids, table = rows - 2, torch.ones(5, 200, dtype=torch.int32, device=place)
        for step in range(150):
            begun = sum((position + step) % 4 == 0 for position in (1, 5, 8))
            ids, lengths, slots = compute(ids, lengths, rows, table, pages[:begun], 4)
        found.append([x.tolist() for x in (ids, lengths, slots, table)])
    assert found[0] == found[1] and found[0][:2] == [[2, 0, 0], [151, 155, 158]]
