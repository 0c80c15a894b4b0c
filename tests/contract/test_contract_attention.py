"""Attention backend ``flashinfer``: the real package's wrappers as it plans and calls them, on a CPU."""

import pytest
import torch
from stand_in_attention import AttentionKernels

from attention_steps import FP8, Shape, World, error
from sglang.srt.layers.attention.flashinfer_backend import FlashInferAttnBackend
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

# (cached, new) tokens of each request.
DECODE = [(0, 1), (1, 1), (15, 1), (16, 1), (17, 1), (63, 1), (200, 1)]
PROMPTS = [(0, 9), (0, 1), (0, 130)]
PREFIXES = [(130, 1), (70, 70), (64, 2), (0, 30), (16, 16), (17, 1)]
BF16, FP16 = torch.bfloat16, torch.float16
DTYPES = {"bf16": (BF16, BF16), "fp16": (FP16, FP16), "bf16-fp8": (BF16, FP8)}


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> AttentionKernels:
    monkeypatch.setattr("sglang.srt.layers.attention.flashinfer_backend.WORKSPACE_BYTES", 1 << 20)
    return AttentionKernels(monkeypatch)


def check(world: World, outputs: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    bound = 0.004 if world.shape.dtype == BF16 else 0.0005
    for ours, reference in zip(outputs, wanted, strict=True):
        assert error(ours, reference, world.shape.heads) < bound


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("lengths", [DECODE, PROMPTS, PREFIXES], ids=["decode", "prompts", "prefixes"])
@pytest.mark.parametrize("dtypes", DTYPES)
def test_steps(
    kernels: AttentionKernels, dtypes: str, lengths: list[tuple[int, int]], group: int, page_size: int
) -> None:
    """Layers with and without windows, of one token to one that is longer than every sequence, in the same step."""
    dtype, kv_dtype = DTYPES[dtypes]
    windows = (None, 1, 16, 50, 3000)
    shape = Shape(2 * group, 2, 64, dtype, kv_dtype, page_size, windows)
    world = World(shape, len(lengths), 256)
    backend = FlashInferAttnBackend(shape.target())
    for rotate in (True, False):
        step = world.step(lengths, rotate=rotate)
        outputs = step.run(backend)
        check(world, outputs, step.reference())
        caches = [world.buffers(layer)[0].view(torch.uint8).clone() for layer in world.layers]
        native = step.run(TorchNativeAttnBackend(shape.target()))
        assert all(map(torch.equal, caches, (world.buffers(layer)[0].view(torch.uint8) for layer in world.layers)))
        assert all(error(a, b, shape.heads) < 0.01 for a, b in zip(outputs, native, strict=True))


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("dtypes", DTYPES)
def test_captured_steps(kernels: AttentionKernels, dtypes: str, page_size: int) -> None:
    """Sizes in turn, with other lengths each time and rows of padding; a graph reads what it read when captured."""
    dtype, kv_dtype = DTYPES[dtypes]
    shape = Shape(4, 2, 64, dtype, kv_dtype, page_size, (None, 20), context=256)
    world = World(shape, 5, 256)
    backend = FlashInferAttnBackend(shape.target())
    backend.init_cuda_graph_state(8, 256)
    addresses: dict[int, set[int]] = {}
    for lengths, size in (
        ([(0, 1)], 8),
        ([(0, 1)], 2),
        (DECODE[2:7], 8),
        ([(254, 1), (3, 1)], 2),
        ([(255, 1), (200, 1), (255, 1), (0, 1), (255, 1)], 8),
        ([(9, 1)], 2),
    ):
        step = world.step(lengths, padding=size - len(lengths))
        backend.init_graph_metadata(step.batch)
        check(world, step.forward(backend), step.reference())
        captured = [backend._captured[window, size] for window in shape.windows]
        addresses.setdefault(size, set()).add(
            tuple(  # type: ignore[arg-type]
                buffer.data_ptr()
                for one in captured
                for buffer in (
                    one._paged_kv_indptr_buf,
                    one._paged_kv_indices_buf,
                    one._paged_kv_last_page_len_buf,
                    one._int_workspace_buffer,
                    one._pin_memory_int_workspace_buffer,
                )
            )
        )
    assert {size: len(seen) for size, seen in addresses.items()} == {8: 1, 2: 1}
    # Windows are planned at the same time, sizes never are.
    spaces = {one._int_workspace_buffer.data_ptr() for one in backend._captured.values()}
    assert len(spaces) == len(shape.windows)


def test_eager_steps_between_captured_ones(kernels: AttentionKernels) -> None:
    shape = Shape(page_size=4, windows=(None, 7))
    world = World(shape, 6, 256)
    backend = FlashInferAttnBackend(shape.target())
    backend.init_cuda_graph_state(4, 256)
    for turn in range(3):
        step = world.step(DECODE[3 : 5 + turn % 2], padding=2 - turn % 2)
        backend.init_graph_metadata(step.batch)
        check(world, step.forward(backend), step.reference())
        for lengths in (PREFIXES, DECODE[1:6]):
            step = world.step(lengths)
            check(world, step.run(backend), step.reference())


@pytest.mark.parametrize(
    ("group", "kv_dtype", "wanted"),
    [(1, BF16, "decode"), (3, BF16, "decode"), (4, BF16, "fa2"), (7, BF16, "fa2"), (1, FP8, "fa2")],
)
def test_which_kernels_run(kernels: AttentionKernels, group: int, kv_dtype: torch.dtype, wanted: str) -> None:
    shape = Shape(2 * group, 2, kv_dtype=kv_dtype, windows=(None, 30))
    world = World(shape, 7, 256)
    backend = FlashInferAttnBackend(shape.target())
    prompt = "fa3" if kv_dtype == BF16 else "fa2"
    # All of them are loaded before the first request, and no decode kernel masks a window.
    loaded = {kind for kind in kernels.modules if kind[0] == wanted}
    assert kernels.modules >= {(wanted, False), (prompt, False), (prompt, True)}
    assert wanted != "decode" or loaded == {("decode", False)}
    modules = set(kernels.modules)
    kernels.runs.clear()
    world.step(DECODE).run(backend)
    assert kernels.runs == [wanted] * 2
    kernels.runs.clear()
    world.step(PREFIXES).run(backend)
    assert kernels.runs == [prompt] * 2
    assert kernels.modules == modules


def test_a_window_that_comes_with_another_model(kernels: AttentionKernels) -> None:
    shape = Shape(windows=(None, 30))
    world = World(shape, 7, 256)
    backend = FlashInferAttnBackend(Shape(windows=(None,)).target())
    for lengths in (PREFIXES, PREFIXES, DECODE):
        step = world.step(lengths)
        check(world, step.run(backend), step.reference())
    kernels.plans.clear()
    backend.init_forward_metadata(step.batch)
    assert len(kernels.plans) == 2
