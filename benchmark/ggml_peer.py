"""llama.cpp's NVFP4 product, in the ggml libraries that ``pip install llama-cpp-python`` (0.3.36) builds.

Threads are torch's. Its weights are quantised by ggml from the values of ours, its activations to 8 bits on every call.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_NVFP4, _FLOAT32 = 40, 0  # of enum ggml_type


class _InitParams(ctypes.Structure):
    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


def _load() -> tuple[ctypes.CDLL, ctypes.CDLL]:
    spec = importlib.util.find_spec("llama_cpp")  # importing it would load much more
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("No module named 'llama_cpp'; pip install llama-cpp-python")
    folder = Path(spec.origin).parent / "lib"
    base = ctypes.CDLL(str(folder / "libggml-base.so"), ctypes.RTLD_GLOBAL)
    return base, ctypes.CDLL(str(folder / "libggml-cpu.so"), ctypes.RTLD_GLOBAL)


def make(values: torch.Tensor, global_scale: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """``x`` [M, K], any floating dtype, to ``x values^T * global_scale`` [M, N], float32.

    Args:
        values: float32 [N, K] on the CPU, K a multiple of 64.
    """
    base, cpu = _load()
    pointer, integer = ctypes.c_void_p, ctypes.c_int64

    def function(library: ctypes.CDLL, name: str, result: Any, *arguments: Any) -> Any:
        found = getattr(library, name)
        found.restype, found.argtypes = result, arguments
        return found

    init = function(base, "ggml_init", pointer, _InitParams)
    free = function(base, "ggml_free", None, pointer)
    matrix = function(base, "ggml_new_tensor_2d", pointer, pointer, ctypes.c_int, integer, integer)
    data = function(base, "ggml_get_data", pointer, pointer)
    multiply = function(base, "ggml_mul_mat", pointer, pointer, pointer, pointer)
    new_graph = function(base, "ggml_new_graph", pointer, pointer)
    expand = function(base, "ggml_build_forward_expand", None, pointer, pointer)
    quantize = function(
        base, "ggml_quantize_chunk", ctypes.c_size_t, ctypes.c_int, pointer, pointer, integer, integer, integer, pointer
    )
    function(cpu, "ggml_cpu_init", None)()
    compute = function(cpu, "ggml_graph_compute_with_ctx", ctypes.c_int, pointer, pointer, ctypes.c_int)

    n, k = values.shape
    weights = init(_InitParams(n * k + (1 << 20), None, False))
    weight = matrix(weights, _NVFP4, k, n)
    quantize(_NVFP4, values.contiguous().data_ptr(), data(weight), 0, n, k, None)

    def mapped(tensor: int, rows: int, columns: int) -> torch.Tensor:
        memory = (ctypes.c_float * (rows * columns)).from_address(data(tensor))
        return torch.frombuffer(memory, dtype=torch.float32).view(rows, columns)

    def call(x: torch.Tensor) -> torch.Tensor:
        m = x.shape[0]
        # Every computation takes its scratch out of the context: a new one, whose pages are not touched otherwise.
        context = init(_InitParams(8 * m * (n + k) + (16 << 20), None, False))
        source = matrix(context, _FLOAT32, k, m)
        product = multiply(context, weight, source)
        graph = new_graph(context)
        expand(graph, product)
        mapped(source, m, k).copy_(x)
        if compute(context, graph, torch.get_num_threads()):
            raise RuntimeError("ggml_graph_compute failed")
        y = mapped(product, m, n) * global_scale
        free(context)
        return y

    return call
