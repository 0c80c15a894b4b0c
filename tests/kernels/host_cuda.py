"""Kernels that ``layers.launch`` launches, compiled for the CPU, so that they can be tested without a GPU."""

import ctypes
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

import torch

from sglang.kernels import layers

COMPILER = shutil.which("g++")
MMA = """asm("mma.sync.aligned.m16n8k16.row.col.f32.TYPE.TYPE.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));"""
# Each instruction of the device that the sources name.
INSTRUCTIONS = {
    'asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(v));': "r = host::from_half(v);",
    'asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r) : "f"(v));': "r = host::to_half(v);",
    'asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(v));': "r = host::to_bf16(v);",
    'asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));': "r = host::half_pair(low, high);",
    'asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));': "r = host::bf16_pair(low, high);",
    'asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(v));': "r = host::transpose(v);",
    MMA.replace("TYPE", "f16"): "host::multiply<host::from_half>(c, {a0, a1, a2, a3, b0, b1});",
    MMA.replace("TYPE", "bf16"): "host::multiply<host::from_bf16>(c, {a0, a1, a2, a3, b0, b1});",
    'asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(r) : "l"(counter), "r"(last) : "memory");': (
        "r = atomicInc(counter, last);"
    ),
}


class HostKernels:
    """Stands in for :func:`layers.launch` on tensors of the CPU; libraries are built in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._library = cache(self._build)
        self.launched: list[tuple[str, tuple[int, int], int]] = []  # name, grid, threads

    def launch(
        self,
        name: str,
        dtype: torch.dtype,
        index: int,
        grid: tuple[int, int],
        threads: int,
        params: bytes,
        options: tuple[str, ...] = (),
    ) -> None:
        assert index == -1 and threads % 32 == 0 and 0 < threads <= 1024
        library = self._library(*layers.program(name, dtype, (8, 0), options))
        assert len(params) == library[f"{name}_size"](), f"{name}: the parameters are not laid out as the compiler does"
        self.launched.append((name, grid, threads))
        library[f"{name}_run"](params, *grid, threads)

    def _build(self, source: str, arch: str, options: tuple[str, ...]) -> ctypes.CDLL:
        for instruction, replacement in INSTRUCTIONS.items():
            source = source.replace(instruction, replacement)
        expanded = re.sub(
            r"\nNORM\((\d), (\d+)\)", r"\nvoid rms_norm_\1(const __grid_constant__ NormParams p);\0", source
        )
        wrappers = [
            f'extern "C" int {name}_size() {{ return sizeof({params}); }}\n'
            f'extern "C" void {name}_run(const void *p, unsigned x, unsigned y, unsigned threads) '
            f"{{ host::launch({{x, y, 1}}, threads, [=] {{ {name}(*(const {params} *)p); }}); }}"
            for name, params in re.findall(
                r"void (?:__launch_bounds__\([\w, ]+\) )?(\w+)\(const __grid_constant__ (\w+) p\)", expanded
            )
        ]
        path = self._folder / f"host{len(list(self._folder.iterdir()))}.cpp"
        shim = (Path(__file__).parent / "host_cuda.h").read_text()
        path.write_text("\n".join([shim, source, *wrappers]))
        library = path.with_suffix(".so")
        assert COMPILER is not None
        command = [COMPILER, "-std=c++17", "-O1", "-w", "-fPIC", "-shared", "-ffp-contract=off", "-fno-strict-aliasing"]
        subprocess.run([*command, *options, str(path), "-o", str(library)], check=True)
        return ctypes.CDLL(str(library))
