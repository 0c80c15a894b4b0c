"""Which way a w4a16 call is cut, chosen by a model of its time fitted to measurements on an H200."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from sglang.kernels.w4a16_layout import COLUMNS, ROWS, UNIT

SCRATCH_BYTES = 64 << 20  # of a device: x in the order that wgmma takes, or dequantised weights
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
        stage_us, call_us: the model's time of a stage and of a call besides; tiles follow each other without a gap.
    """

    nb: int
    rb: int
    wn: int
    wk: int
    u: int
    stages: int
    blocks: int
    stage_us: float = 1.0
    call_us: float = 2.0

    @property
    def rows(self) -> int:
        return ROWS * self.rb * self.wn

    @property
    def stage_units(self) -> int:
        return self.u * self.wk

    @property
    def shared(self) -> int:
        """Bytes of shared memory of a block."""
        columns = 8 * self.nb
        weights = -(-self.rows // ROWS * self.stage_units * UNIT // 1024) * 1024
        reduction = self.wk * columns * (self.rows + 4)
        buffers = 2 if reduction <= 4096 else 1
        return CONTROL + self.stages * (weights + columns * 2 * COLUMNS * self.stage_units) + 4 * reduction * buffers

    def threads(self, capability: tuple[int, int]) -> int:
        return 32 * self.wn * self.wk + (32 if capability >= (9, 0) else 0)

    def options(self, dtype: torch.dtype) -> tuple[str, ...]:
        """Macros for the compiler."""
        return _macros(
            HALF=int(dtype == torch.float16), NB=self.nb, RB=self.rb, WN=self.wn, WK=self.wk, U=self.u,
            STAGES=self.stages, MINB=self.blocks,
        )  # fmt: skip

    def fits(self, capability: tuple[int, int]) -> bool:
        """Whether ``blocks`` of it can be on a multiprocessor at once."""
        return (self.shared + _RESERVED) * self.blocks <= shared_limit(capability) + _RESERVED

    def tiles(self, n: int) -> int:
        return -(-n // self.rows)

    def microseconds(self, m: int, n: int, k: int, processors: int) -> float:
        waves = -(-self.tiles(n) // (self.blocks * processors))
        stages = -(-k // (COLUMNS * self.stage_units))
        return (waves * stages * self.stage_us + self.call_us) * -(-m // (8 * self.nb))

    def __str__(self) -> str:
        return f"b{self.nb}r{self.rb}n{self.wn}k{self.wk}u{self.u}s{self.stages}p{self.blocks}"


@dataclass(frozen=True)
class WideTiling:
    """``w4a16_wgmma.cu``: blocks of ``columns`` rows of x and ``groups`` warpgroups with 64 ``mt`` weight rows each;
    ``split`` blocks share K. ``unit_us``, ``tile_us``: the model's time of 128 k and of what a tile costs besides."""

    columns: int
    groups: int
    mt: int
    unit_us: float = 1.0
    tile_us: float = 8.0
    split: int = 1

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
    def stage(self) -> int:
        """Bytes of a pipeline stage."""
        return self.columns * 2 * COLUMNS + -(-self.rows // ROWS * UNIT // 1024) * 1024

    @property
    def stages(self) -> int:
        return min(8, (shared_limit((9, 0)) - CONTROL) // self.stage)

    @property
    def shared(self) -> int:
        """Bytes of shared memory of a block."""
        return CONTROL + self.stages * self.stage

    def options(self, dtype: torch.dtype) -> tuple[str, ...]:
        """Macros for the compiler."""
        registers, copying = self.registers
        return _macros(
            HALF=int(dtype == torch.float16), COLS=self.columns, WG=self.groups, MT=self.mt, STAGES=self.stages,
            REGISTERS=registers, COPY_REGISTERS=copying,
        )  # fmt: skip

    def tiles(self, m: int, n: int) -> int:
        return -(-n // self.rows) * -(-m // self.columns)

    def pieces(self, m: int, n: int, k: int, processors: int) -> tuple[int, int]:
        """How many rows of x to take at a time, and how often all multiprocessors then take a tile: rows fit the
        scratch, and as few multiprocessors as may be are left without a tile."""
        most = max(1, SCRATCH_BYTES // (2 * k) // self.columns)
        best = (0, 0)
        for columns in range(1, min(most, -(-m // self.columns)) + 1):
            rows = columns * self.columns
            whole, rest = divmod(m, rows)
            waves = whole * -(-self.tiles(rows, n) // processors) + -(-self.tiles(rest, n) // processors)
            if not best[1] or waves <= best[1]:
                best = (rows, waves)
        return best

    def microseconds(self, m: int, n: int, k: int, processors: int) -> float:
        waves = 1 if self.split > 1 else self.pieces(m, n, k, processors)[1]
        return waves * (k / COLUMNS / self.split * self.unit_us + self.tile_us)

    def __str__(self) -> str:
        return f"c{self.columns}g{self.groups}m{self.mt}x{self.split}"


# Constants fitted to an H200 (benchmark/results/h200_w4a16.json); other GPUs order the choices much alike.
SMALL = (  # nb rb wn wk u stages blocks, microseconds
    SmallTiling(1, 2, 1, 8, 1, 3, 1, 0.724, 2.659),
    SmallTiling(1, 2, 1, 8, 1, 2, 2, 1.374, 1.008),
    SmallTiling(1, 2, 2, 8, 1, 3, 1, 1.290, 1.400),
    SmallTiling(1, 4, 2, 4, 1, 2, 2, 2.207, 3.774),
    SmallTiling(2, 2, 1, 8, 1, 3, 1, 0.817, 3.256),
    SmallTiling(2, 2, 2, 8, 1, 2, 1, 1.540, 1.423),
    SmallTiling(2, 4, 2, 2, 1, 3, 2, 0.824, 3.924),
    SmallTiling(4, 1, 2, 8, 1, 2, 1, 1.207, 2.615),
    SmallTiling(4, 1, 4, 4, 1, 3, 1, 1.039, 2.558),
    SmallTiling(4, 4, 4, 2, 1, 3, 1, 1.558, 5.591),
    SmallTiling(8, 2, 2, 2, 1, 3, 1, 0.848, 3.870),
    SmallTiling(8, 2, 4, 2, 1, 3, 1, 1.334, 4.502),
    SmallTiling(8, 2, 8, 1, 1, 3, 1, 1.273, 8.005),
    # For devices whose blocks have 99 KB of shared memory; not measured, so last.
    SmallTiling(1, 2, 2, 4, 1, 2, 1, 2.0, 4.0),
    SmallTiling(2, 2, 2, 2, 1, 2, 1, 2.0, 5.0),
    SmallTiling(4, 2, 2, 2, 1, 2, 1, 2.0, 5.0),
    SmallTiling(8, 2, 4, 1, 1, 2, 1, 2.0, 8.0),
)  # fmt: skip
WIDE = (  # columns groups mt, microseconds
    WideTiling(64, 2, 1, 0.449, 4.232),
    WideTiling(64, 3, 1, 0.624, 6.289),
    WideTiling(64, 2, 2, 0.764, 8.941),
    WideTiling(64, 4, 2, 1.573, 12.320),
    WideTiling(128, 2, 1, 0.651, 6.029),
    WideTiling(128, 3, 1, 0.878, 8.355),
    WideTiling(128, 2, 2, 1.143, 12.271),
)
# Dequantising, then cuBLAS: microseconds of a call, of a weight and of a multiplication.
SCRATCH_US = (5.0, 1.5e-6, 2.6e-9)
MAX_SMALL_M = 64  # above, a call of `SMALL` reads the weights more than once
MIN_WIDE_M = 33
MAX_SPLIT = 8
MAX_CLUSTERS = {1: 132, 2: 66, 3: 42, 4: 31, 5: 24, 6: 20, 7: 16, 8: 14}  # of blocks that fill a multiprocessor; H200


def small_tilings(m: int, capability: tuple[int, int]) -> tuple[SmallTiling, ...]:
    """Those for ``m`` rows that fit the device."""
    nb = next((nb for nb in (1, 2, 4, 8) if 8 * nb >= m), 8)
    return tuple(tiling for tiling in SMALL if tiling.nb == nb and tiling.fits(capability))


def wide_tilings(m: int, n: int, k: int, max_clusters: Mapping[int, int]) -> tuple[WideTiling, ...]:
    """Those for ``m`` rows, with every split whose blocks all run at once; empty pieces of K are not made."""
    result = []
    for tiling in WIDE:
        for split in range(1, min(MAX_SPLIT, -(-k // COLUMNS)) + 1):
            one_piece = m * 2 * k <= SCRATCH_BYTES
            if split == 1 or (one_piece and tiling.tiles(m, n) <= max_clusters.get(split, 0)):
                result.append(replace(tiling, split=split))
    return tuple(result)


Way = SmallTiling | WideTiling | None  # None: dequantise, then cuBLAS


def ranked(
    m: int, n: int, k: int, capability: tuple[int, int], processors: int, max_clusters: Mapping[int, int]
) -> tuple[Way, ...]:
    """The ways to multiply ``m`` rows of x by a weight [n, k], fastest first by the model; of each wide tiling the
    best split only."""
    options: Sequence[SmallTiling | WideTiling] = ()
    if m >= MIN_WIDE_M and capability == (9, 0):
        options = wide_tilings(m, n, k, max_clusters)
    elif m <= MAX_SMALL_M:
        options = small_tilings(m, capability)
    timed: list[tuple[float, Way]] = [(tiling.microseconds(m, n, k, processors), tiling) for tiling in options]
    if m > MAX_SMALL_M:
        call, per_weight, per_product = SCRATCH_US
        timed.append((call + n * k * (per_weight + m * per_product), None))
    best: dict[Way, Way] = {}
    for _, way in sorted(timed, key=lambda pair: pair[0]):
        best.setdefault(replace(way, split=1) if isinstance(way, WideTiling) else way, way)
    return tuple(best.values())


def choose(
    m: int, n: int, k: int, capability: tuple[int, int], processors: int, max_clusters: Mapping[int, int]
) -> Way:
    """The fastest of :func:`ranked`."""
    return ranked(m, n, k, capability, processors, max_clusters)[0]
