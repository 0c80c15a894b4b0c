"""FlashInfer's NVFP4 products as opaque operators of torch: one node in a compiled graph, no sync under graph capture.

Registering them imports no FlashInfer; the first product does. Everything they decide follows from shapes and strings.
They are registered with ``Library``, which costs a call a third of what ``custom_op`` does.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType

import torch

from sglang.srt.errors import Fp4GemmError, StartupError
from sglang.srt.layers.quantization.nvfp4_utils import BLOCK_SIZE

# What a failure of one backend most often means; its exception doesn't say so.
_HINTS = {
    "trtllm": "Its kernels are downloaded at first use, unless flashinfer-cubin of FlashInfer's version is installed."
}


@contextmanager
def fp4_errors(
    backend: str, rows: int | None, out_features: int, in_features: int, dtype: torch.dtype
) -> Iterator[None]:
    """Make one :class:`Fp4GemmError` of whatever a kernel library raises.

    Running out of memory keeps its type, for those who can free some; so does what is already explained.
    """
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, StartupError, Fp4GemmError):
        raise
    except Exception as error:
        hint = _HINTS.get(backend, "")
        raise Fp4GemmError(backend, rows, out_features, in_features, dtype, error, hint) from error


def padded_scale_shape(rows: int, columns: int) -> tuple[int, int]:
    """Shape of the block scales of a [rows, columns] matrix in the 128x4 layout."""
    return -(-rows // 128) * 128, -(-columns // (4 * BLOCK_SIZE)) * 4


def _flashinfer() -> ModuleType:
    from sglang.srt.layers.quantization.fp4_backends import flashinfer  # which imports this module

    return flashinfer._flashinfer()


def _compact(x: torch.Tensor) -> torch.Tensor:
    """``x`` row-major and aligned as the kernels ask for. A single row may have any strides and still count as
    contiguous; FlashInfer would take one with a row stride of 1 for column-major."""
    fits = x.stride() == (x.shape[1], 1) and x.data_ptr() % 32 == 0
    return x if fits else x.clone(memory_format=torch.contiguous_format)


def _check(name: str, tensor: torch.Tensor, shape: tuple[int, int]) -> None:
    """No kernel looks at the sizes of its buffers: a short one is read out of bounds."""
    if tuple(tensor.shape) != shape or tensor.element_size() != 1 or not tensor.is_contiguous():
        found = f"{tensor.dtype} {list(tensor.shape)} with strides {list(tensor.stride())}"
        raise ValueError(f"{name}: expected contiguous bytes {list(shape)}, found {found}")


_LIBRARY = torch.library.Library("sglang", "FRAGMENT")
_LIBRARY.define(
    "flashinfer_mm_fp4(Tensor x, Tensor packed, Tensor scale, Tensor input_scale_inv, Tensor alpha, "
    "str backend, str kernel) -> Tensor"
)
_LIBRARY.define(
    "flashinfer_mm_bf16_fp4(Tensor x, Tensor packed, Tensor scale, Tensor alpha, str backend, str kernel) -> Tensor"
)


@torch.library.impl(_LIBRARY, "flashinfer_mm_fp4", "CompositeExplicitAutograd")
def _mm_fp4(
    x: torch.Tensor,
    packed: torch.Tensor,
    scale: torch.Tensor,
    input_scale_inv: torch.Tensor,
    alpha: torch.Tensor,
    backend: str,
    kernel: str,
) -> torch.Tensor:
    """Quantise ``x`` and multiply: ``round(alpha * (codes and block scales of x) (those of the weight)^T)``.

    Args:
        x: [M, K], bfloat16 or float16; M may be 0.
        packed: uint8 [N, K / 2], rows in the order of ``kernel``.
        scale: uint8 [round_up(N, 128), round_up(K / 16, 4)], in the 128x4 layout.
        input_scale_inv: float32, one element; what the quantiser multiplies by.
        alpha: float32 [1], input scale times global scale.
        backend, kernel: our name for errors, ``mm_fp4``'s own.

    Returns:
        [M, N] in the dtype of ``x``.

    Raises:
        Fp4GemmError: FlashInfer failed, or a buffer has the wrong size.
    """
    (rows, columns), out_features = x.shape, packed.shape[0]
    if rows == 0:  # no kernel takes it
        return x.new_empty(0, out_features)
    with fp4_errors(backend, rows, out_features, columns, x.dtype):
        _check("packed weight", packed, (out_features, columns // 2))
        _check("block scales of the weight", scale, padded_scale_shape(out_features, columns))
        flashinfer = _flashinfer()
        x_packed, x_scale = flashinfer.fp4_quantize(_compact(x), input_scale_inv.reshape(1))
        _check("quantised input", x_packed, (rows, columns // 2))
        _check("block scales of the input", x_scale, padded_scale_shape(rows, columns))
        y: torch.Tensor = flashinfer.mm_fp4(
            x_packed, packed.T, x_scale, scale.T, alpha, out_dtype=x.dtype, backend=kernel
        )
        return y


@torch.library.impl(_LIBRARY, "flashinfer_mm_bf16_fp4", "CompositeExplicitAutograd")
def _mm_bf16_fp4(
    x: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor, alpha: torch.Tensor, backend: str, kernel: str
) -> torch.Tensor:
    """``round(alpha * (x W^T))`` for a weight that ``prepare_bf16_fp4_weights`` prepared for ``kernel``.

    Args:
        x: bfloat16 [M, K]; M may be 0.
        packed: uint8 [N, K / 2].
        scale: whatever that function returned: one byte per block, in the layout of ``kernel``.
        alpha: float32 [1], the global scale.
        backend, kernel: our name for errors, ``mm_bf16_fp4``'s own.

    Returns:
        bfloat16 [M, N].

    Raises:
        Fp4GemmError: FlashInfer failed, or a buffer has the wrong size.
    """
    (rows, columns), out_features = x.shape, packed.shape[0]
    if rows == 0:
        return x.new_empty(0, out_features)
    with fp4_errors(backend, rows, out_features, columns, x.dtype):
        _check("packed weight", packed, (out_features, columns // 2))
        if scale.numel() < out_features * columns // BLOCK_SIZE:
            raise ValueError(f"block scales of the weight: {list(scale.shape)} is too small for K={columns}")
        y: torch.Tensor = _flashinfer().mm_bf16_fp4(_compact(x), packed, scale, alpha, backend=kernel)
        return y


def _output(x: torch.Tensor, packed: torch.Tensor, *_: object) -> torch.Tensor:
    """What a compiler has to know of both: shape and dtype, for any M."""
    return x.new_empty(x.shape[0], packed.shape[0])


torch.library.register_fake("sglang::flashinfer_mm_fp4", _output, lib=_LIBRARY)
torch.library.register_fake("sglang::flashinfer_mm_bf16_fp4", _output, lib=_LIBRARY)
mm_fp4: Callable[..., torch.Tensor] = torch.ops.sglang.flashinfer_mm_fp4.default
mm_bf16_fp4: Callable[..., torch.Tensor] = torch.ops.sglang.flashinfer_mm_bf16_fp4.default
