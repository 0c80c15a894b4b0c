"""Kernels in cubins: loaded into torch's context and launched on its streams, through the driver's C interface."""

from __future__ import annotations

import ctypes
import struct
from functools import cache

_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_CLUSTER_DIMENSION = 4  # CU_LAUNCH_ATTRIBUTE_...
_PROGRAMMATIC_STREAM_SERIALIZATION = 6


class _AttributeValue(ctypes.Union):
    _fields_ = [("pad", ctypes.c_char * 64), ("flag", ctypes.c_int), ("sizes", ctypes.c_uint * 3)]


class _Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", _AttributeValue)]


class _LaunchConfig(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_uint),
    ]


_CONFIG = struct.Struct("@7IPPI0P")  # a _LaunchConfig, packed at a fifth of the cost
_ARGUMENTS = ctypes.c_char_p * 1


class TensorMap(ctypes.Structure):
    """CUtensorMap: what the copy engine must know of an array."""

    _fields_ = [("opaque", ctypes.c_uint64 * 16)]


@cache
def _driver() -> ctypes.CDLL:
    library = ctypes.CDLL("libcuda.so.1")
    library.cuLaunchKernelEx.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    return library


def _check(code: int, what: str) -> None:
    if code == 0:
        return
    text = ctypes.c_char_p()
    _driver().cuGetErrorString(code, ctypes.byref(text))
    raise RuntimeError(f"{what}: CUDA error {code} ({(text.value or b'unknown').decode()})")


def tensor_map(
    address: int, item: int, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...], swizzle: bool
) -> TensorMap:
    """An array of ``item``-byte numbers, dimensions fastest first, of which ``box`` is copied at a time.

    ``strides`` are those of all dimensions but the first, in bytes. ``swizzle``: 16-byte pieces of each 128 bytes land
    permuted by the row's number. What a box covers outside the array arrives as zeros.
    """
    rank = len(sizes)
    memory = ctypes.create_string_buffer(256)
    aligned = -(-ctypes.addressof(memory) // 64) * 64  # the driver asks for it
    code = _driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(aligned), {2: 1, 8: 4}[item], rank, ctypes.c_void_p(address),
        (ctypes.c_uint64 * rank)(*sizes), (ctypes.c_uint64 * (rank - 1))(*strides), (ctypes.c_uint32 * rank)(*box),
        (ctypes.c_uint32 * rank)(*[1] * rank), 0, 3 if swizzle else 0, 3, 0,
    )  # fmt: skip
    _check(code, f"describing an array of {sizes}, strides {strides}, box {box}")
    return TensorMap.from_buffer_copy(ctypes.string_at(aligned, ctypes.sizeof(TensorMap)))


class Kernel:
    """One function of a cubin, in the context that is current when it is made.

    Args:
        threads: per block.
        shared: bytes of dynamic shared memory the kernel may be launched with.
        overlap: launch before the previous kernel of the stream has ended; the kernel itself waits for it where it
            must (programmatic dependent launch, compute capability 9.0 up).
    """

    def __init__(self, cubin: bytes, name: str, threads: int, shared: int, overlap: bool) -> None:
        driver = _driver()
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        _check(driver.cuModuleLoadData(ctypes.byref(module), cubin), f"loading {name}")
        _check(driver.cuModuleGetFunction(ctypes.byref(function), module, name.encode()), f"finding {name}")
        _check(driver.cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED, shared), f"{shared} B shared for {name}")
        self._name, self._function = name, function
        self._threads, self._overlap = threads, overlap
        self._made: dict[int, tuple[ctypes.Array[_Attribute], int]] = {}  # launch attributes by cluster size
        attributes, count = self._attributes(1)
        self._plain = ctypes.addressof(attributes), count
        self._launch = driver.cuLaunchKernelEx

    def _attributes(self, cluster: int) -> tuple[ctypes.Array[_Attribute], int]:
        if cluster not in self._made:
            attributes, count = (_Attribute * 2)(), 0
            if self._overlap:
                attributes[count].id = _PROGRAMMATIC_STREAM_SERIALIZATION
                attributes[count].value.flag = 1
                count += 1
            if cluster > 1:
                attributes[count].id = _CLUSTER_DIMENSION
                attributes[count].value.sizes[:] = (cluster, 1, 1)
                count += 1
            self._made[cluster] = attributes, count
        return self._made[cluster]

    def max_clusters(self, cluster: int, shared: int) -> int:
        """How many clusters of ``cluster`` blocks run at once."""
        attributes, attribute_count = self._attributes(cluster)
        config = _LaunchConfig((cluster, 1, 1), (self._threads, 1, 1), shared, None, attributes, attribute_count)
        count = ctypes.c_int()
        code = _driver().cuOccupancyMaxActiveClusters(ctypes.byref(count), self._function, ctypes.byref(config))
        _check(code, f"asking for clusters of {cluster} blocks of {self._name}")
        return count.value

    def launch(
        self, grid: tuple[int, int], shared: int, stream: int, params: ctypes.Structure, cluster: int = 1
    ) -> Launch:
        """What enqueues the kernel on ``stream`` when called, as often as wanted.

        Args:
            params: the kernel's only argument.
            cluster: neighbouring blocks that run at the same time and see each other's shared memory.
        """
        attributes, count = self._attributes(cluster)
        config = _LaunchConfig((*grid, 1), (self._threads, 1, 1), shared, stream, attributes, count)
        return Launch(self._name, self._function, config, params)

    def enqueue(self, grid: tuple[int, int], threads: int, stream: int, params: bytes) -> None:
        """Launch once with ``threads`` per block and no dynamic shared memory: for arguments that change every time.

        Args:
            params: the kernel's only argument, a struct as the compiler lays it out.
        """
        attributes, count = self._plain
        config = _CONFIG.pack(*grid, 1, threads, 1, 1, 0, stream, attributes, count)
        code = self._launch(config, self._function, _ARGUMENTS(params), None)
        if code:
            _check(code, f"launching {self._name}")


class Launch:
    """A kernel with all that it is launched with. Making one costs much more than calling it."""

    def __init__(self, name: str, function: ctypes.c_void_p, config: _LaunchConfig, params: ctypes.Structure) -> None:
        self._name, self._function, self._params = name, function, params
        self._config, self._config_address = config, ctypes.c_void_p(ctypes.addressof(config))
        self._arguments = (ctypes.c_void_p * 1)(ctypes.addressof(params))
        self._enqueue = _driver().cuLaunchKernelEx

    def __call__(self) -> None:
        code = self._enqueue(self._config_address, self._function, self._arguments, None)
        if code:
            _check(code, f"launching {self._name}")
