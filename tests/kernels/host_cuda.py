"""Kernels of ours, compiled for the CPU, so that they can be tested without a GPU: those that ``layers.launch``
launches, and ``w4a16_small.cu`` as it is below compute capability 9.0."""

import ctypes
import re
import shutil
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from sglang.kernels import layers

COMPILER = shutil.which("g++")
# Where a test of a kernel runs.
NEEDS_A_GPU = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
ON_GPU = pytest.param("cuda", marks=NEEDS_A_GPU)
NEEDS_COMPILER = pytest.mark.skipif(COMPILER is None, reason="needs g++")
ON_HOST = pytest.param("cpu", marks=NEEDS_COMPILER)
MMA = """asm("mma.sync.aligned.m16n8k16.row.col.f32.TYPE.TYPE.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));"""
PREVIOUS = ctypes.CFUNCTYPE(None, ctypes.c_bool)
WAIT = """#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif"""
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
    # w4a16_small.cu and w4a16_common.cuh
    WAIT: "host::wait_for_previous();",
    "extern __shared__ __align__(1024) char smem[];": "char *const smem = host::shared;",
    'asm("mul.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));': "d = host::half_products(a, b);",
    'asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(0x80008000u));': (
        "d = host::bf16_products(a, b);"
    ),
    r'asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %1;\nmov.b32 %0, {l, l};\n}" : "=r"(d) : "r"(v));': (
        "d = (v & 0xFFFF) * 0x10001;"
    ),
    r'asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %1;\nmov.b32 %0, {h, h};\n}" : "=r"(d) : "r"(v));': (
        "d = (v >> 16) * 0x10001;"
    ),
    """asm("mma.sync.aligned.m16n8k16.row.col.f32." TYPES ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));""": (
        "host::multiply<TYPE ? host::from_half : host::from_bf16>(*(float (*)[4])c, {a[0], a[1], a[2], a[3], b0, b1});"
    ),
    """asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");""": (
        "memset(host::shared + to, 0, 16), memcpy(host::shared + to, from, bytes);"
    ),
    'asm volatile("cp.async.commit_group;" ::: "memory");': "",
    'asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");': "",
    'asm volatile("cp.async.wait_all;" ::: "memory");': "",
    'asm volatile("prefetch.global.L2 [%0];" ::"l"(from));': "",
    'asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory");': "__syncthreads();",
    'asm volatile("st.release.gpu.s32 [%0], %1;" ::"l"(ready), "r"(1) : "memory");': "*ready = 1;",
    'do asm volatile("ld.acquire.gpu.s32 %0, [%1];" : "=r"(v) : "l"(ready) : "memory");': "do v = *ready;",
}


class HostKernels:
    """Stands in for :func:`layers.launch` on tensors of the CPU; libraries are built in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._library = cache(self._build)
        self.launched: list[tuple[str, tuple[int, int], int]] = []  # name, grid, threads
        # Called with False as a block begins, and with True when all its threads wait for the previous kernel: what
        # that one writes can be missing until then.
        self.previous: Callable[[bool], None] | None = None

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
        assert index == -1
        self.run(name, layers.program(name, dtype, (8, 0), options), grid, threads, params)

    def run(self, name: str, program: layers.Program, grid: tuple[int, int], threads: int, params: bytes) -> None:
        assert threads % 32 == 0 and 0 < threads <= 1024
        library = self._library(*program)
        assert len(params) == library[f"{name}_size"](), f"{name}: the parameters are not laid out as the compiler does"
        self.launched.append((name, grid, threads))
        previous = PREVIOUS(self.previous) if self.previous else PREVIOUS()
        ctypes.c_void_p.in_dll(library, "host_previous").value = ctypes.cast(previous, ctypes.c_void_p).value
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
