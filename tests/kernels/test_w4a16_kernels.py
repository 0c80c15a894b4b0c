"""The w4a16 kernels without a GPU: they compile for every device without spills, and a call's way fits the device."""

import ctypes
import re

import pytest
import torch

from sglang.kernels import nvrtc, w4a16
from sglang.kernels.w4a16_tilings import (
    CONTROL,
    MAX_SMALL_M,
    WIDE,
    SmallTiling,
    WideTiling,
    ranked,
    shared_limit,
)

# By their size, clusters of blocks that fill a multiprocessor; an H200's.
MAX_CLUSTERS = {1: 132, 2: 66, 3: 42, 4: 31, 5: 24, 6: 20, 7: 16, 8: 14}
CAPABILITIES = [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)]
ROWS = (*range(1, 140, 3), 16, 32, 33, 65, 128, 256, 1000, 8192)
SHAPES = [(16, 64), (576, 576), (4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336), (57344, 8192), (8192, 28672)]


@pytest.mark.skipif(not nvrtc.available(), reason="needs NVRTC: pip install nvidia-cuda-nvrtc")
@pytest.mark.parametrize(
    ("capability", "dtype"),
    [
        *((capability, dtype) for capability in CAPABILITIES[:4] for dtype in (torch.bfloat16, torch.float16)),
        *((capability, torch.bfloat16) for capability in CAPABILITIES[4:]),
    ],
    ids=str,
)
def test_every_kernel_compiles_without_spills(capability: tuple[int, int], dtype: torch.dtype) -> None:
    for tiling in w4a16.tilings(capability):
        log = nvrtc.compile_source(*w4a16.program(tiling, dtype, capability)).log
        spills = [int(size) for size in re.findall(r"(\d+) bytes spill", log)]
        registers = re.findall(r"Used (\d+) registers", log)
        print(nvrtc.architecture(capability), dtype, tiling or "dequantize", *registers, "registers")
        assert registers and spills
        assert not any(spills), (tiling, log)
        assert "serialized" not in log, "the assembler waits for each wgmma"


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_a_call_takes_a_prepared_kernel_that_fits(capability: tuple[int, int]) -> None:
    prepared = {w4a16.program(tiling, torch.bfloat16, capability) for tiling in w4a16.tilings(capability)}
    for n, k in SHAPES:
        ways = [(m, way) for m in ROWS for way in ranked(m, n, k, capability, 132, MAX_CLUSTERS)]
        for m, tiling in ways:
            assert w4a16.program(tiling, torch.bfloat16, capability) in prepared, (m, n, k)
            if isinstance(tiling, SmallTiling):
                assert m <= 8 * tiling.nb
                assert not tiling.one_row or m == 1
                taken, there_is = tiling.taken(k, capability) + 1024, shared_limit(capability) + 1024
                assert tiling.shared(k) + 1024 <= taken and tiling.blocks * taken <= there_is
                assert capability < (9, 0) or (tiling.blocks + 1) * taken > there_is, "blocks would gather"
            elif isinstance(tiling, WideTiling):
                assert capability == (9, 0)
                assert tiling.split == 1 or tiling.tiles(m, n) <= MAX_CLUSTERS[tiling.split]
                assert tiling.split <= -(-k // 128), "a block of a cluster would have nothing to add"


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_ways_are_ranked_by_the_models_time(capability: tuple[int, int]) -> None:
    for n, k in SHAPES:
        for m in ROWS:
            ways = ranked(m, n, k, capability, 132, MAX_CLUSTERS)
            assert len(set(ways)) == len(ways)
            assert (None in ways) == (m > MAX_SMALL_M)
            kernels = [way for way in ways if way is not None]
            times = [way.microseconds(m, n, k, 132) for way in kernels]
            assert times == sorted(times)
            wide = [(way.columns, way.groups, way.mt, way.share) for way in kernels if isinstance(way, WideTiling)]
            assert len(wide) == len(set(wide)), "of each tiling the best split only"
            if capability == (9, 0):
                assert len(ways) > 1


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_tilings_of_halves_have_as_many_rows_of_either(capability: tuple[int, int]) -> None:
    for n, k in SHAPES:
        for m in (1, 2, 8, 16, 33):
            ways = ranked(m, n, k, capability, 132, MAX_CLUSTERS, paired=True)
            assert all(way.rows // 16 % 2 == 0 for way in ways if isinstance(way, SmallTiling)) and ways


def test_one_row_has_tilings_of_its_own() -> None:
    for n, k in SHAPES:
        for m in (1, 2, 8, 16):
            small = [w for w in ranked(m, n, k, (9, 0), 132, MAX_CLUSTERS) if isinstance(w, SmallTiling)]
            assert small and all(way.one_row == (m == 1) for way in small)
    for k, has_room in ((1 << 16, True), (1 << 17, False)):  # for all of x in shared memory
        ways = ranked(1, 64, k, (9, 0), 132, MAX_CLUSTERS)
        assert ways and all(isinstance(way, SmallTiling) and way.one_row == has_room for way in ways)


def test_a_rank_that_is_not_there_is_the_first() -> None:
    device = w4a16.Device(0, (9, 0), 132, tuple(MAX_CLUSTERS.items()), torch.empty(0), torch.empty(0))
    for m in (8, 300):
        ways = ranked(m, 4096, 4096, (9, 0), 132, MAX_CLUSTERS)
        assert [device.choose(m, 4096, 4096, rank) for rank in range(len(ways) + 2)] == [*ways, ways[0], ways[0]]


@pytest.mark.parametrize("tiling", WIDE, ids=str)
def test_wide_blocks_ask_for_no_more_than_they_are_launched_with(tiling: WideTiling) -> None:
    launched = min(255, 65536 // tiling.threads // 8 * 8) * tiling.threads
    multiplying, copying = tiling.registers
    assert multiplying % 8 == copying % 8 == 0
    assert 128 * tiling.groups * multiplying + 128 * copying <= launched
    assert tiling.stages[0] >= 6 and tiling.stages[1] >= 3
    assert tiling.shared <= shared_limit((9, 0))
    assert 8 * 2 * sum(tiling.stages) <= CONTROL, "a barrier would lie in the pipeline"
    sums = 4 * tiling.rows * tiling.columns  # of a split, in the pipeline's memory
    assert sums <= tiling.shared - CONTROL - tiling.patches


def test_small_m_takes_one_reading_of_the_weights_and_large_m_without_wgmma_takes_cublas() -> None:
    assert isinstance(ranked(1, 4096, 4096, (9, 0), 132, MAX_CLUSTERS)[0], SmallTiling)
    assert isinstance(ranked(64, 4096, 4096, (8, 0), 108, {})[0], SmallTiling)
    assert isinstance(ranked(64, 4096, 4096, (9, 0), 132, MAX_CLUSTERS)[0], WideTiling)
    assert ranked(65, 4096, 4096, (8, 0), 108, {})[0] is None


@pytest.mark.parametrize("params", [w4a16._SmallParams, w4a16._WideParams])
def test_parameters_are_as_long_as_the_compiler_makes_them(params: type[ctypes.Structure]) -> None:
    assert ctypes.sizeof(params) % 64 == 0  # alignas(64) of the tensor maps
    last = params._fields_[-2][0]
    descriptor = getattr(params, last)
    assert ctypes.sizeof(params) - (descriptor.offset + descriptor.size) < 64
