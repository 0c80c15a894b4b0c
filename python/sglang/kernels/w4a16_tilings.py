"""Which way a w4a16 call is cut, chosen by a model of its time fitted to measurements on an H200."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from sglang.kernels.w4a16_layout import COLUMNS, ROWS, UNIT

SCRATCH_BYTES = 64 << 20  # of a device: dequantised weights, or sums of blocks that share a tile
CONTROL = 1024  # bytes of shared memory for barriers
_RESERVED = 1024  # bytes that the system takes of each block's
_SHARED_KB = {(8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227, (11, 0): 227}  # a block's, else 99
_REGISTERS = 65536  # of a multiprocessor


def shared_limit(capability: tuple[int, int]) -> int:
    """Bytes of shared memory that one block may take."""
    return _SHARED_KB.get(capability, 99) * 1024


def _macros(**values: int) -> tuple[str, ...]:
    return tuple(f"-D{key}={value}" for key, value in values.items())


@dataclass(frozen=True)
class SmallTiling:
    """``w4a16_small.cu``: rows of x in blocks of 8 ``nb``.

    Attributes:
        rb: blocks of 16 weight rows per warp.
        wn, wk: warps of a block along N and along K.
        u: units of 128 k that a warp takes in a stage.
        stages: depth of the pipeline.
        blocks: per multiprocessor.
        cut: blocks get equal shares of all stages, also where that divides a tile, rather than whole tiles.
        one_row: of x, which a block keeps whole.
        stage_us, call_us: the model's time of a stage and of a call besides; tiles follow each other without a gap.
    """

    nb: int
    rb: int
    wn: int
    wk: int
    u: int
    stages: int
    blocks: int
    stage_us: float = field(compare=False, default=1.0)
    call_us: float = field(compare=False, default=2.0)
    cut: bool = False
    one_row: bool = False

    @property
    def rows(self) -> int:
        return ROWS * self.rb * self.wn

    @property
    def stage_units(self) -> int:
        return self.u * self.wk

    def shared(self, k: int) -> int:
        """Bytes of shared memory of a block."""
        weights = -(-self.rows // ROWS * self.stage_units * UNIT // 1024) * 1024
        reduction = self.wk * (1 if self.one_row else 8 * self.nb) * (self.rows + 4)
        buffers = 2 if reduction <= 4096 else 1
        whole_x = -(-k // COLUMNS * 2 * COLUMNS // 1024) * 1024 if self.one_row else 0
        x = 0 if self.one_row else 8 * self.nb * 2 * COLUMNS * self.stage_units
        return CONTROL + whole_x + self.stages * (weights + x) + 4 * reduction * buffers

    def taken(self, k: int, capability: tuple[int, int]) -> int:
        """Bytes that a block takes: where kernels begin while others end, too many for a second block beside a lone
        one, or they would gather on the multiprocessors that the kernel before has left first."""
        alone = shared_limit(capability) // 2 + _RESERVED if self.blocks == 1 and capability >= (9, 0) else 0
        return max(self.shared(k), alone)

    def threads(self, capability: tuple[int, int]) -> int:
        return 32 * self.wn * self.wk + (32 if capability >= (9, 0) else 0)

    def options(self, dtype: torch.dtype) -> tuple[str, ...]:
        """Macros for the compiler."""
        return _macros(
            TYPE=int(dtype == torch.float16), NB=self.nb, RB=self.rb, WN=self.wn, WK=self.wk, U=self.u,
            STAGES=self.stages, MINB=self.blocks, CUT=int(self.cut), ONE_ROW=int(self.one_row),
        )  # fmt: skip

    def fits(self, capability: tuple[int, int], k: int = 0) -> bool:
        """Whether ``blocks`` of it can be on a multiprocessor at once."""
        return (self.shared(k) + _RESERVED) * self.blocks <= shared_limit(capability) + _RESERVED

    def tiles(self, n: int) -> int:
        return -(-n // self.rows)

    def microseconds(self, m: int, n: int, k: int, processors: int) -> float:
        stages, blocks = -(-k // (COLUMNS * self.stage_units)), self.blocks * processors
        longest = -(-self.tiles(n) * stages // blocks) if self.cut else -(-self.tiles(n) // blocks) * stages
        return (longest * self.stage_us + self.call_us) * -(-m // (8 * self.nb))

    def __str__(self) -> str:
        return (
            f"b{self.nb}r{self.rb}n{self.wn}k{self.wk}u{self.u}s{self.stages}p{self.blocks}"
            + "c" * self.cut
            + "x" * self.one_row
        )


@dataclass(frozen=True)
class WideTiling:
    """``w4a16_wgmma.cu``: blocks of ``columns`` rows of x and ``groups`` warpgroups with 64 ``mt`` weight rows each.

    Attributes:
        unit_us, tile_us, call_us: the model's time of 128 k, and of what a tile and a call cost besides.
        merge_us: of adding what blocks of a cluster have, where that is not in the others.
        split: blocks of a cluster that share K.
        share: blocks of a cluster that share rows of x, 1 or 2; one of the two is 1.
    """

    columns: int
    groups: int
    mt: int
    unit_us: float = field(compare=False, default=1.0)
    tile_us: float = field(compare=False, default=5.0)
    call_us: float = field(compare=False, default=2.0)
    merge_us: float = field(compare=False, default=0.0)
    split: int = 1
    share: int = 1

    @property
    def rows(self) -> int:
        return 64 * self.groups * self.mt

    @property
    def threads(self) -> int:
        return 128 * self.groups + 128

    @property
    def registers(self) -> tuple[int, int]:
        """Of a multiplying and of a copying thread. A block only has what it was launched with: asking for more would
        wait for ever."""
        launched = _REGISTERS // self.threads // 8 * 8 * self.threads
        copying = 40 if self.groups < 4 else 32
        return min(240, (launched - 128 * copying) // (128 * self.groups) // 8 * 8), copying

    @property
    def stages(self) -> tuple[int, int]:
        """Depth of the pipelines of x, in stages of 64 k, and of the weights, in units."""
        x, w = self.columns * COLUMNS, self.rows // ROWS * UNIT
        fits = [n for n in range(2, 17) if CONTROL + n * x + -(-n // 2) * w + self.patches <= shared_limit((9, 0))]
        return fits[-1], -(-fits[-1] // 2)

    @property
    def patches(self) -> int:
        """Bytes of shared memory through which results pass."""
        return 512 * 4 * self.groups

    @property
    def shared(self) -> int:
        """Bytes of shared memory of a block."""
        x, w = self.stages
        return CONTROL + x * self.columns * COLUMNS + w * (self.rows // ROWS) * UNIT + self.patches

    def options(self, dtype: torch.dtype) -> tuple[str, ...]:
        """Macros for the compiler."""
        registers, copying = self.registers
        return _macros(
            TYPE=int(dtype == torch.float16), COLS=self.columns, WG=self.groups, MT=self.mt, X_STAGES=self.stages[0],
            W_STAGES=self.stages[1], REGISTERS=registers, COPY_REGISTERS=copying,
        )  # fmt: skip

    def tiles(self, m: int, n: int) -> int:
        """Of a cluster that shares x, or of a block."""
        return -(-n // (self.share * self.rows)) * -(-m // self.columns)

    def microseconds(self, m: int, n: int, k: int, processors: int) -> float:
        waves = 1 if self.split > 1 else -(-self.tiles(m, n) // (processors // self.share))
        merge = self.merge_us if self.split > 1 else 0.0
        return self.call_us + merge + waves * (k / COLUMNS / self.split * self.unit_us + self.tile_us)

    def __str__(self) -> str:
        return f"c{self.columns}g{self.groups}m{self.mt}x{self.split}s{self.share}"


# Constants fitted to an H200 (benchmark/results/h200_w4a16_tilings.json), some moved a little where whole steps chose
# another tiling or bandwidth bends the line; other GPUs order the choices much alike. Its 132 multiprocessors are why
# tiles of 48, 80 and 224 rows are here: 6144, 10240 and 28672 are 128 times that.
SMALL = (  # nb rb wn wk u stages blocks, microseconds
    SmallTiling(1, 2, 1, 8, 1, 3, 1, 0.714, 2.314, one_row=True),
    SmallTiling(1, 2, 1, 16, 1, 3, 1, 1.184, 2.900, one_row=True),
    SmallTiling(1, 2, 2, 8, 1, 3, 1, 1.185, 1.760, one_row=True),
    SmallTiling(1, 3, 1, 8, 1, 3, 1, 1.001, 1.840, one_row=True),
    SmallTiling(1, 3, 1, 16, 1, 2, 1, 1.705, 2.600, one_row=True),
    SmallTiling(1, 4, 1, 8, 1, 2, 1, 1.249, 1.242, one_row=True),
    SmallTiling(1, 5, 1, 8, 1, 2, 1, 1.449, 1.506, one_row=True),
    SmallTiling(1, 7, 2, 4, 1, 2, 1, 1.640, 1.795, one_row=True),
    SmallTiling(1, 4, 2, 4, 1, 3, 1, 1.150, 6.824, cut=True, one_row=True),
    SmallTiling(1, 2, 1, 8, 1, 3, 1, 0.725, 2.474),
    SmallTiling(1, 2, 1, 8, 1, 2, 2, 1.282, 1.300),
    SmallTiling(1, 2, 2, 8, 1, 3, 1, 1.247, 1.810),
    SmallTiling(1, 2, 7, 2, 1, 3, 1, 0.998, 2.897),
    SmallTiling(1, 3, 1, 8, 1, 2, 1, 1.048, 2.071),
    SmallTiling(1, 3, 1, 8, 1, 3, 1, 0.957, 2.536),
    SmallTiling(1, 5, 1, 8, 1, 2, 1, 1.524, 1.877),
    SmallTiling(1, 7, 2, 4, 1, 2, 1, 1.950, 3.800),
    SmallTiling(1, 4, 2, 8, 1, 2, 1, 2.506, 8.000, cut=True),
    SmallTiling(2, 2, 1, 8, 1, 3, 1, 0.824, 3.042),
    SmallTiling(2, 2, 2, 8, 1, 2, 1, 1.475, 1.784),
    SmallTiling(2, 2, 7, 2, 1, 3, 1, 1.170, 3.709),
    SmallTiling(2, 3, 1, 8, 1, 2, 1, 1.194, 2.225),
    SmallTiling(2, 3, 1, 8, 1, 3, 1, 1.116, 2.936),
    SmallTiling(2, 5, 1, 8, 1, 2, 1, 1.714, 2.390),
    SmallTiling(4, 1, 3, 4, 1, 4, 1, 0.824, 3.027),
    SmallTiling(4, 2, 1, 8, 1, 2, 1, 1.130, 2.918),
    SmallTiling(4, 2, 2, 4, 1, 3, 1, 1.000, 2.510),
    SmallTiling(4, 5, 1, 4, 1, 3, 1, 1.274, 4.350),
)  # fmt: skip
# For other devices, whose blocks may have no more than 99 KB of shared memory and which have no wgmma; not measured.
SMALL_ELSEWHERE = (
    SmallTiling(8, 2, 2, 2, 1, 3, 1, 0.848, 3.870),
    SmallTiling(1, 2, 2, 4, 1, 2, 1, 2.0, 4.0, one_row=True),
    SmallTiling(1, 2, 2, 4, 1, 2, 1, 2.0, 4.0),
    SmallTiling(2, 2, 2, 2, 1, 2, 1, 2.0, 5.0),
    SmallTiling(4, 2, 2, 2, 1, 2, 1, 2.0, 5.0),
    SmallTiling(8, 2, 4, 1, 1, 2, 1, 2.0, 8.0),
)  # fmt: skip
# Of benchmark/results/h200_w4a16.json; those of 32 columns of h200_w4a16_tilings.json.
WIDE = (  # columns groups mt, microseconds
    WideTiling(32, 4, 1, 0.820, 1.500, 2.5, 3.5),
    WideTiling(32, 7, 1, 1.420, 1.500, 2.5, 4.5),
    WideTiling(32, 3, 2, 1.200, 1.500, 2.0, 3.5),
    WideTiling(64, 2, 1, 0.568, 2.763),
    WideTiling(64, 3, 1, 0.786, 4.089),
    WideTiling(64, 4, 1, 0.959, 5.012),
    WideTiling(128, 2, 1, 0.761, 3.698),
    WideTiling(128, 3, 1, 1.005, 5.937),
    WideTiling(128, 2, 2, 1.332, 6.843),
    WideTiling(256, 2, 1, 1.280, 4.700),
    WideTiling(256, 2, 1, 1.261, 4.700, 3.5, share=2),
)
# Dequantising, then cuBLAS: microseconds of a call, of a weight and of a multiplication.
SCRATCH_US = (5.0, 1.5e-6, 2.6e-9)
MAX_SMALL_M = 64  # above, a call of `SMALL` reads the weights more than once
MIN_WIDE_M = 17
MAX_SPLIT = 8


def small_tilings(capability: tuple[int, int]) -> tuple[SmallTiling, ...]:
    """Those of the device."""
    known = SMALL if capability == (9, 0) else SMALL + SMALL_ELSEWHERE
    return tuple(tiling for tiling in known if tiling.fits(capability))


def wide_tilings(m: int, n: int, k: int, max_clusters: Mapping[int, int]) -> tuple[WideTiling, ...]:
    """Those for ``m`` rows, with every split whose blocks all run at once; empty pieces of K are not made."""
    result = []
    for tiling in WIDE:
        result.append(tiling)
        for split in range(2, min(MAX_SPLIT, -(-k // COLUMNS)) + 1) if tiling.share == 1 else ():
            if tiling.tiles(m, n) <= max_clusters.get(split, 0):
                result.append(replace(tiling, split=split))
    return tuple(result)


Way = SmallTiling | WideTiling | None  # None: dequantise, then cuBLAS


def ranked(
    m: int,
    n: int,
    k: int,
    capability: tuple[int, int],
    processors: int,
    max_clusters: Mapping[int, int],
    paired: bool = False,
) -> tuple[Way, ...]:
    """The ways to multiply ``m`` rows of x by a weight [n, k], fastest first by the model; of each wide tiling the
    best split only. ``paired``: of the small tilings those with as many rows of either half of the weight."""
    options: list[SmallTiling | WideTiling] = []
    if m <= MAX_SMALL_M:
        nb = next(nb for nb in (1, 2, 4, 8) if 8 * nb >= m)
        fitting = [tiling for tiling in small_tilings(capability) if tiling.nb == nb and tiling.fits(capability, k)]
        fitting = [tiling for tiling in fitting if not paired or tiling.rows // ROWS % 2 == 0]
        # One row of a large K may have no room.
        options += [one for one in fitting if one.one_row == (m == 1)] or [one for one in fitting if not one.one_row]
    if m >= MIN_WIDE_M and capability == (9, 0):
        options += wide_tilings(m, n, k, max_clusters)
    timed: list[tuple[float, Way]] = [(tiling.microseconds(m, n, k, processors), tiling) for tiling in options]
    if m > MAX_SMALL_M:
        call, per_weight, per_product = SCRATCH_US
        timed.append((call + n * k * (per_weight + m * per_product), None))
    best: dict[Way, Way] = {}
    for _, way in sorted(timed, key=lambda pair: pair[0]):
        best.setdefault(replace(way, split=1) if isinstance(way, WideTiling) else way, way)
    return tuple(best.values())
