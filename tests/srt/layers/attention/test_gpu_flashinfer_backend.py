"""Attention backend ``flashinfer`` on a GPU against the formula in float32. FlashInfer compiles at the first run.

``own_pairs`` is ``own_decode_pairs``: up to how many pairs of a request and a KV head, of which there are two, a decode
step is our kernel's.
"""

from dataclasses import replace

import pytest
import torch

from attention_steps import FP8, Shape, Step, World, error
from sglang.srt.layers.attention.flashinfer_backend import FlashInferAttnBackend

BF16, FP16 = torch.bfloat16, torch.float16
ANY = Shape(heads=8, kv_heads=2, dim=128, device="cuda")
REASON = FlashInferAttnBackend.unsupported_reason(ANY.target()) if torch.cuda.is_available() else "needs a CUDA GPU"
pytestmark = [pytest.mark.cuda, pytest.mark.skipif(REASON is not None, reason=str(REASON))]

# dtype, cache, size of a head, bound of an output's relative error: half a unit in the last place of the weights and of
# the output, once more where a scale is applied to the output.
KINDS = {
    "bf16-128": (BF16, BF16, 128, 0.005),
    "fp16-64": (FP16, FP16, 64, 0.001),
    "fp8-128": (BF16, FP8, 128, 0.007),
}
LONGEST = 1500
WINDOWS = (None, 100)
# (cached, new) tokens of each request.
STEPS = {
    "decode-1": [(1234, 1)],
    "decode-3": [(0, 1), (99, 1), (1499, 1)],
    "decode-32": [(37 * number % LONGEST, 1) for number in range(32)],
    "prompts": [(0, 1), (0, 65), (0, 700)],
    "chunks": [(512, 512), (700, 1), (64, 300), (0, 30), (1, 99)],
}


@pytest.fixture
def own_pairs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FlashInferAttnBackend, "own_decode_pairs", request.param)


def build(kind: str, group: int, page_size: int) -> tuple[World, FlashInferAttnBackend]:
    dtype, kv_dtype, dim, _ = KINDS[kind]
    shape = Shape(2 * group, 2, dim, dtype, kv_dtype, page_size, WINDOWS, device="cuda")
    return World(shape, 32, LONGEST), FlashInferAttnBackend(shape.target())


def check(kind: str, world: World, outputs: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    for ours, reference, window in zip(outputs, wanted, WINDOWS, strict=True):
        assert error(ours, reference, world.shape.heads) < KINDS[kind][3], f"window {window}"


@pytest.mark.usefixtures("own_pairs")
@pytest.mark.parametrize("own_pairs", [0, 8], indirect=True)
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_steps(kind: str, group: int, page_size: int) -> None:
    world, backend = build(kind, group, page_size)
    for lengths in STEPS.values():
        for rotate in (True, False):
            step = world.step(lengths, rotate=rotate)
            outputs = step.run(backend)
            check(kind, world, outputs, step.reference())


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_cache_gets(kind: str) -> None:
    """Keys are rotated once, values are not; nothing else in the cache changes."""
    world, backend = build(kind, 4, 16)
    step = world.step(STEPS["chunks"])
    layer, shape = world.layers[0], world.shape
    before = [buffer.view(torch.uint8).clone() for buffer in world.buffers(layer)]
    step.run(backend)
    k, v = step.qkv[0].split_with_sizes((shape.heads, shape.kv_heads, shape.kv_heads), dim=1)[1:]
    assert step.rotary is not None
    k = torch.addcmul(k * step.rotary[0], k.roll(shape.dim // 2, dims=-1), step.rotary[1])
    where = step.batch.out_cache_loc
    for x, buffer, old, scale in zip((k, v), world.buffers(layer), before, (layer.k_scale, layer.v_scale), strict=True):
        stored = buffer.view(torch.uint8)[where].view(buffer.dtype).float() * (scale or 1.0)
        # The rotation may round differently, by one unit in the last place.
        torch.testing.assert_close(stored, x.float(), rtol=0.07 if shape.kv_dtype == FP8 else 0.01, atol=2e-2)
        old[where] = buffer.view(torch.uint8)[where]
        assert torch.equal(buffer.view(torch.uint8), old)


class CapturedStep:
    """A decode step of ``size`` requests in a graph, with the addresses of one step; others are copied into them."""

    def __init__(self, world: World, backend: FlashInferAttnBackend, size: int) -> None:
        self.world, self.backend, self.size = world, backend, size
        self.step = world.step([(0, 1)], padding=size - 1)
        backend.init_graph_metadata(self.step.batch)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.step.forward(backend)
        torch.cuda.current_stream().wait_stream(stream)
        backend.init_graph_metadata(self.step.batch)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.outputs = self.step.forward(backend)

    def load(self, step: Step) -> None:
        """Copy ``step`` into the graph's tensors and plan for it."""
        mine, other = self.step, step
        assert mine.rotary is not None and other.rotary is not None
        names = ("req_pool_indices", "seq_lens", "out_cache_loc")
        static = {name: getattr(mine.batch, name) for name in names}
        for name in names:
            static[name].copy_(getattr(other.batch, name))
        for target, source in zip((*mine.qkv, *mine.rotary), (*other.qkv, *other.rotary), strict=True):
            target.copy_(source)
        self.backend.init_graph_metadata(replace(other.batch, **static))

    def replay(self, step: Step) -> list[torch.Tensor]:
        self.load(step)
        self.graph.replay()
        return self.outputs


@pytest.mark.usefixtures("own_pairs")
@pytest.mark.parametrize("own_pairs", [0, 8], indirect=True)
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("kind", KINDS)
def test_graphs(kind: str, page_size: int, group: int) -> None:
    """Two sizes that share their buffers, with padding, from lengths of 1 to the longest, and eager steps between."""
    world, backend = build(kind, group, page_size)
    backend.init_cuda_graph_state(8, world.shape.context)
    captured = {size: CapturedStep(world, backend, size) for size in (8, 3)}
    for lengths, size in (
        ([(1499, 1), (3, 1)], 3),
        ([(1499 - 200 * number, 1) for number in range(7)], 8),
        ([(0, 1)], 8),
        ([(700, 1), (0, 1), (1400, 1)], 3),
        ([(5 * number, 1) for number in range(8)], 8),
    ):
        step = world.step(lengths, padding=size - len(lengths))
        check(kind, world, captured[size].replay(step), step.reference())
        step = world.step(STEPS["chunks"])
        check(kind, world, step.run(backend), step.reference())


@pytest.mark.usefixtures("own_pairs")
@pytest.mark.parametrize("own_pairs", [0, 16], indirect=True)
@pytest.mark.parametrize("group", [1, 4])
def test_steps_follow_each_other_without_waiting(group: int) -> None:
    """The host plans step after step while the GPU is still at earlier ones, as an overlapping scheduler does."""
    kind = "bf16-128"
    world, backend = build(kind, group, 1)
    backend.init_cuda_graph_state(8, world.shape.context)
    captured = CapturedStep(world, backend, 8)
    steps = [
        world.step([(11 * turn + 170 * number, 1) for number in range(8 - turn % 3)], padding=turn % 3)
        for turn in range(12)
    ]
    # Both times a step sees the same cache: what it reads was written by the steps before it.
    wanted = []
    for step in steps:
        captured.load(step)
        captured.graph.replay()
        wanted.append([output.clone() for output in captured.outputs])
        torch.cuda.synchronize()
    outputs = []
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(200_000_000)
        for step in steps:
            captured.load(step)
            torch.cuda._sleep(2_000_000)
            captured.graph.replay()
            outputs.append([output.clone() for output in captured.outputs])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for step, ours, reference in zip(steps, outputs, wanted, strict=True):
        for layer in range(len(WINDOWS)):
            real = slice(0, step.real)
            assert torch.equal(ours[layer][real], reference[layer][real])


def test_eager_steps_wait_for_nothing() -> None:
    world, backend = build("bf16-128", 4, 16)
    steps = [world.step(lengths) for lengths in (STEPS["chunks"], STEPS["decode-3"])]
    for step in steps:
        step.run(backend)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(50_000_000)
        outputs = [step.run(backend) for step in steps]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    check("bf16-128", world, outputs[1], steps[1].reference())
