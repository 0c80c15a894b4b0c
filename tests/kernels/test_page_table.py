"""``page_table.cu`` and its twin in torch against a loop in Python: on a GPU, and compiled for the CPU."""

import pytest
import torch

from sglang.srt.layers.attention import flashinfer_pages


@pytest.mark.parametrize("most_blocks", [1, 3, 65535])
@pytest.mark.parametrize("page_size", [1, 16])
def test_lists(device: str, page_size: int, most_blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer_pages, "MOST_BLOCKS", most_blocks)
    generator = torch.Generator().manual_seed(0)
    width = 9000
    table = torch.randint(1, 1 << 30, (7, width), generator=generator, dtype=torch.int32)
    rows, firsts, counts = [6, 0, 3, 3, 5], [0, 2, 0, 11, 1], [1, width // page_size - 2, 7, 0, 300]
    begin = torch.tensor([0, *counts]).cumsum(0)
    wanted = [
        table[row, page * page_size].item() // page_size
        for row, first, count in zip(rows, firsts, counts, strict=True)
        for page in range(first, first + count)
    ]
    arguments = [x.to(device) for x in (table, torch.tensor(rows), torch.tensor([*firsts, 0]), begin)]
    for fill, more in ((flashinfer_pages.launch, (max(counts),)), (flashinfer_pages.gather, ())):
        out = torch.full((len(wanted) + 3,), -1, dtype=torch.int32, device=device)
        fill(*arguments, out[: len(wanted)], page_size, *more)
        assert out.tolist() == [*wanted, -1, -1, -1]
