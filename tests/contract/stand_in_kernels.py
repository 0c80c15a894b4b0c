"""What stands for FlashInfer's compiled kernels: they read raw memory at documented offsets and multiply in float64.

A kernel gets what the compiled one gets, and checks only what that checks; a read past the end of a buffer, which on
a device would be another tensor's bytes, raises :class:`OutOfBoundsError`.
"""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import flashinfer
import numpy as np
import torch
from exact_fp4 import Array, codes, dequantize, product, quantize, round_up, shuffled_row, swizzled_offsets
from flashinfer.autotuner import TunableRunner
from flashinfer.tllm_enums import DtypeTrtllmGen
from packaging.version import Version

V07 = Version(flashinfer.__version__) >= Version("0.7")


class OutOfBoundsError(Exception):
    """A kernel would have read memory that is not the tensor's."""


def memory(tensor: torch.Tensor, size: int) -> Array:
    """``size`` bytes from the address of ``tensor``, whatever its shape and strides say."""
    storage = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    start = tensor.storage_offset() * tensor.element_size()
    if start + size > storage.numel():
        raise OutOfBoundsError(f"{size} bytes of a buffer of {storage.numel() - start}")
    return storage[start : start + size].numpy()


def scale_bytes(rows: int, k: int, rows_per_tile: int) -> int:
    return round_up(rows, rows_per_tile) * round_up(k // 16, 4)


@dataclass(frozen=True)
class Product:
    """One call of a kernel."""

    kernel: str
    m: int
    n: int
    k: int
    dtype: torch.dtype


def check(condition: bool, message: str) -> None:
    if not condition:
        raise RuntimeError(f"Check failed: {message}")


def check_input(*tensors: torch.Tensor) -> None:
    for tensor in tensors:
        check(tensor.is_contiguous(), f"tensor of shape {list(tensor.shape)} must be contiguous")


class Kernels:
    """Every compiled FlashInfer module in one.

    ``products`` and ``quantized`` record the calls; ``weight_bytes`` are the codes [N, K / 2] and the flat scales that
    the last product read. ``error`` is raised by the next product.
    """

    def __init__(self) -> None:
        self.products: list[Product] = []
        self.quantized: list[tuple[int, int]] = []
        self.weight_bytes: tuple[Array, Array] = (np.empty(0), np.empty(0))
        self.error: BaseException | None = None

    # What flashinfer.jit's specifications offer.
    def build_and_load(self) -> "Kernels":
        return self

    def get_library_path(self) -> str:
        return ""

    def get_library_paths(self) -> list[str]:
        return []

    # ------------------------------------------------------------------------------------------------ quantiser
    def fp4_quantize(
        self,
        x: torch.Tensor,
        global_scale: torch.Tensor,
        packed: torch.Tensor,
        scales: torch.Tensor,
        block_size: int,
        ue8m0: bool,
        swizzled: bool,
        is_8x4: bool,
        inverted: bool,
        pdl: bool,
        four_over_six: int = -1,
    ) -> None:
        check_input(x, packed, scales)
        check(x.data_ptr() % 16 == 0, "misaligned address: the kernel loads 16 bytes at a time")
        assert x.dtype in (torch.bfloat16, torch.float16) and global_scale.dtype == torch.float32
        assert block_size == 16 and not ue8m0
        m, k = x.shape
        self.quantized.append((m, k))
        factor = global_scale.reshape(-1)[0].numpy()
        code, scale = quantize(x, np.float32(1) / factor if inverted else factor)
        packed.copy_(torch.from_numpy(code[:, 0::2] | code[:, 1::2] << 4))
        if not swizzled:
            scales[: scale.size].copy_(torch.from_numpy(scale.flatten()))
            return
        tile = 8 if is_8x4 else 128
        # The buffer is uninitialised, and not every version of the kernel writes the padding: let it be NaN.
        buffer = memory(scales, scale_bytes(m, k, tile))
        buffer[:] = 0x7F
        buffer[swizzled_offsets(m, k // 16, tile)] = scale

    def block_scale_interleave_sm100(self, scale: torch.Tensor, out: torch.Tensor) -> None:
        check_input(scale, out)
        buffer = memory(out, out.numel())
        buffer[:] = 0
        buffer[swizzled_offsets(*scale.shape)] = scale.numpy()

    # ---------------------------------------------------------------------------------------------------- GEMMs
    def multiply(
        self,
        kernel: str,
        a: torch.Tensor,
        b: torch.Tensor,
        a_scale: torch.Tensor,
        b_scale: torch.Tensor,
        alpha: torch.Tensor,
        out: torch.Tensor,
        k: int,
        shuffled: bool = False,
        a_tile: int = 128,
    ) -> None:
        """``out`` = alpha * a b^T from the bytes at the six addresses; ``out`` [M, N] is row-major."""
        m, n = out.shape
        if self.error is not None:
            raise self.error
        assert m > 0, "FlashInfer's kernels have no case for M = 0"
        self.products.append(Product(kernel, m, n, k, out.dtype))
        self.weight_bytes = memory(b, n * k // 2).reshape(n, -1), memory(b_scale, scale_bytes(n, k, 128))
        weight = self._operand(b, b_scale, n, k, 128)
        if shuffled:
            weight = weight[shuffled_row(np.arange(n))]
        out.copy_(product(self._operand(a, a_scale, m, k, a_tile), weight) * float(alpha.reshape(-1)[0]))

    @staticmethod
    def _operand(packed: torch.Tensor, scale: torch.Tensor, rows: int, k: int, tile: int) -> Array:
        # Tiles of K are whole: codes past K are zero, the scales of those are what the buffer holds (0 * NaN is NaN).
        columns = round_up(k // 16, 4)
        code = np.zeros((rows, columns * 16), np.uint8)
        code[:, :k] = codes(memory(packed, rows * k // 2).reshape(rows, k // 2))
        buffer = memory(scale, scale_bytes(rows, k, tile))
        return dequantize(code, buffer[swizzled_offsets(rows, columns, tile)])

    def fp4_gemm(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        a_scale: torch.Tensor,
        b_scale: torch.Tensor,
        alpha: torch.Tensor,
        out: torch.Tensor,
        workspace: torch.Tensor,
        tactic: int,
    ) -> None:
        """CUTLASS: the checks of csrc/fp4_gemm_cutlass.cu."""
        if alpha is None:
            raise TypeError("Mismatched type on argument #4: expected Tensor, got None")
        check_input(a, b, a_scale, b_scale, alpha)
        check(alpha.dtype == torch.float32, "globalScale must be float32")
        n, k = b.shape[0], b.shape[1] * 2
        check(a.shape[1] == b.shape[1], "mat1 and mat2 shapes cannot be multiplied")
        check(k % 32 == 0, f"Expected k to be divisible by 32, k: {k}")
        check(n % 32 == 0, f"Expected n to be divisible by 32, n: {n}")
        self.multiply("cutlass", a, b, a_scale, b_scale, alpha, out, k)

    def fp4_gemm_tactic_num(self) -> int:
        return 1

    def trtllm_gemm(
        self,
        input_dtype: int,
        output_dtype: int,
        workspace: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        a_scale: torch.Tensor,
        b_scale: torch.Tensor,
        alpha: torch.Tensor,
        out: torch.Tensor,
        use_8x4: bool,
        tactic: int,
    ) -> None:
        """trtllm-gen: the checks of csrc/trtllm_gemm_runner.cu; its kernels have tiles of 128 weight rows."""
        check_input(a, b, out, a_scale, b_scale, alpha)
        check(input_dtype == DtypeTrtllmGen.E2m1 and output_dtype == DtypeTrtllmGen.Bfloat16, "Unsupported dtype")
        check(out.dtype == torch.bfloat16, "out must be bfloat16")
        n, k = b.shape[0], b.shape[1] * 2
        check(a.shape[1] == b.shape[1], "Matrix dimensions don't match for multiplication")
        check(n % 128 == 0 and k % 64 == 0, f"No valid tactic found for n={n}, k={k}")
        self.multiply("trtllm", a, b, a_scale, b_scale, alpha, out, k, shuffled=True, a_tile=8 if use_8x4 else 128)

    def dsl_runner(self, kernel: str, n_multiple: int, k_multiple: int) -> TunableRunner:
        """The runner of a CuTe-DSL backend, whose real one compiles at its first call."""
        kernels = self

        class Runner(TunableRunner):  # type: ignore[misc]
            def get_valid_tactics(self, inputs: list[Any], profile: Any) -> list[int]:
                return [-1]

            def forward(
                self, inputs: list[Any], tactic: int = -1, do_preparation: bool = False, **kwargs: Any
            ) -> torch.Tensor:
                a, b, a_scale, b_scale, alpha, _, out, block_size, use_nvfp4, _ = inputs
                n, k = b.shape[1], a.shape[1] * 2
                check_input(a, b.T, out)
                check(block_size == 16 and use_nvfp4, "NVFP4 only")
                check(n % n_multiple == 0 and k % k_multiple == 0, f"can't implement n={n}, k={k}")
                kernels.multiply(kernel, a, b.T, a_scale, b_scale, alpha, out, k)
                return out  # type: ignore[no-any-return]

        return Runner()


class CudnnGraph:
    """A built cuDNN graph: it knows sizes from its arguments and reads the addresses of its variant pack."""

    def __init__(self, kernels: Kernels, uids: Any, dims: dict[str, Any] | None) -> None:
        self.kernels, self.uids, self.dims = kernels, uids, dims

    def get_execution_plan_count(self) -> int:
        return 1

    def get_workspace_size(self, *args: Any) -> int:
        return 0

    get_workspace_size_plan_at_index = get_workspace_size

    def execute(self, pack: dict[int, torch.Tensor], workspace: torch.Tensor, **overrides: Any) -> None:
        uids = self.uids
        names = {uids.A_UID.value: "a", uids.B_UID.value: "b", uids.O_UID.value: "out"}
        names |= {uids.BLOCK_DESCALE_A_UID.value: "a_scale", uids.BLOCK_DESCALE_B_UID.value: "b_scale"}
        dims = self.dims
        if "override_uids" in overrides:
            shapes = zip(overrides["override_shapes"], overrides["override_strides"], strict=True)
            dims = {names[uid]: dim for uid, dim in zip(overrides["override_uids"], shapes, strict=True)}
        assert dims is not None
        (_, m, k), (_, _, n) = dims["a"][0], dims["b"][0]
        # The matrices are dense; of b and its scales the transposes are.
        expected = {
            "a": ((1, m, k), (m * k, k, 1)),
            "b": ((1, k, n), (k * n, 1, k)),
            "a_scale": ((1, round_up(m, 128), round_up(k // 16, 4)), None),
            "b_scale": ((1, round_up(k // 16, 4), round_up(n, 128)), None),
        }
        for name, (shape, strides) in expected.items():
            check(tuple(dims[name][0]) == shape, f"cuDNN graph: {name} has dimensions {dims[name][0]}, not {shape}")
            check(strides is None or tuple(dims[name][1]) == strides, f"cuDNN graph: strides of {name}")
        check(k % 32 == 0 and n % 8 == 0, f"cuDNN: no engine for n={n}, k={k}")
        by_name = SimpleNamespace(**{name: pack[uid] for uid, name in names.items()})
        alpha = pack[uids.ALPHA_UID.value]
        self.kernels.multiply("cudnn", by_name.a, by_name.b, by_name.a_scale, by_name.b_scale, alpha, by_name.out, k)

    def execute_plan_at_index(
        self, pack: dict[int, torch.Tensor], workspace: torch.Tensor, index: int, **overrides: Any
    ) -> None:
        self.execute(pack, workspace, **overrides)
