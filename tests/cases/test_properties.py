"""Properties: any fused layer against the oracle, shards against the whole, and every defect of a file is named."""

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import Checkpoint, base, copy_of, ct_layer, nvfp4_layer
from harness import assert_refused, load_linear
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle import TOLERANCE, Oracle, relative_error

from sglang.srt.distributed import TensorParallelGroup
from sglang.srt.layers.quantization.base_config import QuantizationConfig
from sglang.srt.layers.quantization.compressed_tensors import CompressedTensorsConfig
from sglang.srt.layers.quantization.modelopt_quant import ModelOptFp4Config

Written = Callable[..., Path]
# The function-scoped fixtures only patch functions: nothing of one example is left for the next.
PROPERTY = settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
RATIOS = st.floats(1e-3, 1e3)


@dataclass(frozen=True)
class Layer:
    """A fused layer: rows of its parts, their global and input scales as multiples of a usual one."""

    sizes: tuple[int, ...]
    blocks: int
    ratios: tuple[float, ...]
    input_ratios: tuple[float, ...]
    activation: str
    dialect: str
    bias: bool
    seed: int

    @property
    def k(self) -> int:
        return 16 * self.blocks

    @property
    def names(self) -> dict[str, int]:
        return {f"part{index}_proj": size for index, size in enumerate(self.sizes)}

    def tensors(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        g = torch.Generator().manual_seed(self.seed)
        result = {}
        for name, ratio, input_ratio in zip(self.names, self.ratios, self.input_ratios, strict=False):
            n = self.names[name]
            layer = nvfp4_layer(n, self.k, self.k**-0.5 / 40 * ratio, 4.0 / 2688 * input_ratio, g)
            if self.activation != "static":
                del layer["input_scale"]
            if self.dialect == "ct":
                layer = ct_layer(layer)
            if self.bias:
                layer["bias"] = torch.randn(n, generator=g).to(dtype)
            result.update({f"model.{name}.{key}": value for key, value in layer.items()})
        return result

    def config(self) -> QuantizationConfig:
        weight_only, dynamic = self.activation == "none", self.activation == "dynamic"
        if self.dialect == "modelopt":
            return ModelOptFp4Config("W4A16_NVFP4" if weight_only else "NVFP4", dynamic_activations=dynamic)
        scheme = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
        inputs = None if weight_only else {**scheme, "dynamic": True if dynamic else "local"}
        group = {"targets": ["Linear"], "weights": scheme, "input_activations": inputs}
        return CompressedTensorsConfig.from_config({"config_groups": {"group_0": group}})


@st.composite
def layers(draw: st.DrawFn, most_parts: int = 3, multiple: int = 1, blocks: int = 1) -> Layer:
    sizes = draw(st.lists(st.integers(1, 70), min_size=1, max_size=most_parts))
    three = st.tuples(RATIOS, RATIOS, RATIOS)
    return Layer(
        sizes=tuple(size * multiple for size in sizes),
        blocks=draw(st.integers(1, 13)) * blocks,
        ratios=draw(three),
        input_ratios=draw(st.sampled_from([(1.0, 1.0, 1.0), (0.3, 1.0, 0.6)])),
        activation=draw(st.sampled_from(["static", "none", "dynamic"])),
        dialect=draw(st.sampled_from(["modelopt", "ct"])),
        bias=draw(st.booleans()),
        seed=draw(st.integers(0, 100)),
    )


def check(layer: Layer, dtype: torch.dtype, rows: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        linear = load_linear(Path(folder), layer.tensors(dtype), layer.names, layer.k, dtype, layer.config())
        oracle = Oracle(Path(folder) / "model.safetensors", lambda name: layer.activation)
    x = torch.randn(rows, layer.k, generator=torch.Generator().manual_seed(layer.seed)).to(dtype)
    y = linear(x)
    assert y.shape == (rows, sum(layer.sizes)) and y.dtype == dtype
    if rows:
        compare(y, oracle, layer, x)


def compare(y: torch.Tensor, oracle: Oracle, layer: Layer, x: torch.Tensor) -> None:
    expected = oracle.outputs([f"model.{name}" for name in layer.names], x)
    for part, whole in zip(y.split(list(layer.sizes), dim=-1), expected, strict=True):
        # All rows together: with one column, single products may cancel.
        assert relative_error(part.reshape(1, -1), whole.reshape(1, -1)) < 2 * TOLERANCE[y.dtype]


@PROPERTY
@given(layers(), st.sampled_from([torch.float32, torch.bfloat16]), st.integers(0, 9))
def test_any_fused_layer(layer: Layer, dtype: torch.dtype, rows: int) -> None:
    check(layer, dtype, rows)


@pytest.mark.parametrize("backend", ["cudnn", "cutlass", "cutedsl", "trtllm"])
@PROPERTY
@given(layer=layers().filter(lambda layer: layer.activation != "none"), rows=st.integers(0, 9))
def test_any_fused_layer_on_emulated_kernels(
    backend: str, blackwell: Callable[[str], Any], layer: Layer, rows: int
) -> None:
    blackwell(backend)
    check(layer, torch.bfloat16, rows)


class Alone(TensorParallelGroup):
    """A rank whose partial sums the test adds up."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x


@PROPERTY
@given(st.data(), st.sampled_from([2, 3, 4]))
def test_row_shards_are_rows_of_the_whole(data: st.DataObject, ranks: int) -> None:
    layer = data.draw(layers(multiple=ranks))
    x = torch.randn(3, layer.k, generator=torch.Generator().manual_seed(layer.seed))
    shards = []
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(ranks):
            linear = load_linear(
                Path(folder), layer.tensors(x.dtype), layer.names, layer.k, x.dtype, layer.config(), Alone(rank, ranks)
            )
            shards.append(linear(x).split([size // ranks for size in layer.sizes], dim=-1))
        oracle = Oracle(Path(folder) / "model.safetensors", lambda name: layer.activation)
    y = torch.cat([torch.cat(parts, dim=-1) for parts in zip(*shards, strict=True)], dim=-1)
    compare(y, oracle, layer, x)


@PROPERTY
@given(st.data(), st.sampled_from([2, 3, 4]))
def test_column_shards_add_up_to_the_whole(data: st.DataObject, ranks: int) -> None:
    layer = data.draw(layers(most_parts=1, blocks=ranks).filter(lambda layer: layer.activation != "dynamic"))
    x = torch.randn(3, layer.k, generator=torch.Generator().manual_seed(layer.seed))
    y = torch.zeros(3, layer.sizes[0])
    with tempfile.TemporaryDirectory() as folder:
        for rank, piece in enumerate(x.chunk(ranks, dim=-1)):
            linear = load_linear(
                Path(folder),
                layer.tensors(x.dtype),
                layer.names,
                layer.k,
                x.dtype,
                layer.config(),
                Alone(rank, ranks),
                row_parallel=True,
            )
            y += linear(piece)
        oracle = Oracle(Path(folder) / "model.safetensors", lambda name: layer.activation)
    compare(y, oracle, layer, x)


# -------------------------------------------------------------------------------------------- every tensor of a file
def broken(checkpoint: Checkpoint, name: str) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """Each kind of defect of one tensor, and the file with it."""
    tensor = checkpoint.tensors[name]
    rest = {key: value for key, value in checkpoint.tensors.items() if key != name}
    yield "absent", rest
    yield "renamed", {**rest, name + "_": tensor}
    yield "one more dimension", {**rest, name: torch.stack((tensor, tensor))}
    yield "another dtype", {**rest, name: tensor.to(torch.float32).to(torch.int32)}
    if tensor.dim() == 2:
        yield "a row fewer", {**rest, name: tensor[1:].clone()}
        yield "a column fewer", {**rest, name: tensor[:, 1:].clone()}


NAMES = [name for name in base().tensors if "layers.1" not in name]


@pytest.mark.parametrize("name", NAMES, ids=lambda name: name.removeprefix("model.layers.0."))
def test_every_defect_of_every_tensor_is_named(name: str, written: Written) -> None:
    checkpoint = base()
    for _, tensors in broken(checkpoint, name):
        changed = copy_of(checkpoint)
        changed.tensors = tensors
        assert_refused(written(changed), name)
