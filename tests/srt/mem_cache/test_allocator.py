import random

import pytest
import torch

from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.decode_inputs import decode_inputs

CPU = torch.device("cpu")


@pytest.mark.parametrize(("size", "page", "usable"), [(10, 1, 10), (10, 4, 8), (16, 16, 16)])
def test_the_padding_page_and_the_rest_of_a_page_are_never_handed_out(size: int, page: int, usable: int) -> None:
    allocator = TokenToKVPoolAllocator(size, page, CPU)
    assert allocator.size == allocator.available_size() == usable
    slots = allocator.alloc_extend([0], [usable], torch.tensor([0]))
    assert slots is not None and sorted(slots.tolist()) == list(range(page, page + usable))
    assert allocator.available_size() == 0
    assert allocator.alloc_extend([0], [1], torch.tensor([0])) is None
    allocator.free(slots)
    assert allocator.available_size() == usable


def test_extend_continues_in_the_last_page() -> None:
    allocator = TokenToKVPoolAllocator(32, 4, CPU)
    first = allocator.alloc_extend([0, 0], [6, 4], torch.zeros(2, dtype=torch.int64))
    assert first is not None and allocator.available_size() == 32 - 8 - 4
    a, b = first[:6], first[6:]
    assert allocator.extend_size([6, 4], [13, 5]) == 8 + 4
    more = allocator.alloc_extend([6, 4], [13, 5], torch.stack([a[-1], b[-1]]))
    assert more is not None and allocator.available_size() == 8
    a = torch.cat([a, more[:7]])
    for start in range(0, 13, 4):
        page = a[start : start + 4]
        assert page[0] % 4 == 0 and torch.equal(page - page[0], torch.arange(len(page)))
    assert more[7] % 4 == 0
    # Not even a new page is needed here.
    assert allocator.extend_size([13], [15]) == 0
    tail = allocator.alloc_extend([13], [15], a[-1:])
    assert tail is not None and tail.tolist() == [a[-1] + 1, a[-1] + 2]


def test_nothing_is_taken_when_there_is_not_enough() -> None:
    allocator = TokenToKVPoolAllocator(8, 4, CPU)
    assert allocator.alloc_extend([0, 0], [5, 1], torch.zeros(2, dtype=torch.int64)) is None
    assert allocator.available_size() == 8
    assert allocator.alloc_decode([1, 1, 1]) is None
    assert allocator.available_size() == 8


def test_a_double_free_is_an_error() -> None:
    allocator = TokenToKVPoolAllocator(8, 4, CPU)
    slots = allocator.alloc_extend([0], [6], torch.tensor([0]))
    assert slots is not None
    allocator.free(slots)
    with pytest.raises(RuntimeError, match="freed twice"):
        allocator.free(slots)


@pytest.mark.parametrize("page", [1, 4])
def test_random_life_of_requests(page: int) -> None:
    rng = random.Random(page)
    allocator = TokenToKVPoolAllocator(160, page, CPU)
    held: list[torch.Tensor] = []
    for _ in range(300):
        action = rng.random()
        if action < 0.3:
            n = rng.randrange(1, 20)
            slots = allocator.alloc_extend([0], [n], torch.tensor([0]))
            if slots is not None:
                held.append(slots)
        elif action < 0.4 and held:
            allocator.free(held.pop(rng.randrange(len(held))))
        elif held:
            lens = [len(slots) + 1 for slots in held]
            size = allocator.decode_size(lens)
            before = allocator.available_size()
            pages = allocator.alloc_decode(lens)
            assert (pages is None) == (size > before)
            if pages is not None:
                assert allocator.available_size() == before - size
                table = torch.zeros(len(held), max(lens), dtype=torch.int32)
                for row, slots in zip(table, held, strict=True):
                    row[: len(slots)] = slots
                rows = torch.arange(len(held))
                _, _, new = decode_inputs(rows, torch.tensor(lens) - 1, rows, table, pages, page)
                held = [torch.cat([slots, new[i : i + 1]]) for i, slots in enumerate(held)]
        flat = torch.cat([*held, torch.empty(0, dtype=torch.int64)])
        assert len(flat.unique()) == len(flat) and (len(flat) == 0 or flat.min() >= page)
        for slots in held:
            starts = slots[::page]
            assert (starts % page == 0).all()
            assert torch.equal(slots, (starts[:, None] + torch.arange(page)).view(-1)[: len(slots)])
        pages = torch.cat([slots[::page] // page for slots in held] + [allocator.free_pages()])
        assert pages.sort().values.tolist() == list(range(1, 160 // page + 1))
