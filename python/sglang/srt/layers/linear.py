"""Linear layers, sharded over tensor-parallel ranks, whose storage and product a quantisation method decides.

A fused layer (q/k/v, gate/up) consists of *parts*: consecutive output rows that the checkpoint stores as tensors of
their own. Everything that knows about parts and ranks is in :class:`LinearBase`; a method sees only local sizes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import nn

from sglang.srt.distributed import SINGLE, TensorParallelGroup
from sglang.srt.errors import CheckpointError
from sglang.srt.layers.fusion import AddRMSNorm, Rows, SiluAndMul, Step, UnscaledRows, count_of
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.operators import operators_for
from sglang.srt.layers.quantization.base_config import LinearMethodBase, QuantizationConfig, register_weight
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

ShardId = str | int | None


@dataclass(frozen=True)
class Part:
    """Output rows that come from one checkpoint tensor.

    ``size`` of ``total_size`` rows are held here, from row ``start`` of the checkpoint's tensor, and stand at row
    ``offset`` of the local weight.
    """

    shard_id: ShardId
    total_size: int
    size: int
    start: int
    offset: int


def split_evenly(size: int, ranks: int, what: str) -> int:
    """``size / ranks``; raises CheckpointError if ranks would get unequal pieces."""
    if size % ranks:
        raise CheckpointError(f"{what} ({size}) can't be divided by --tp-size {ranks}; use a divisor of {size}")
    return size // ranks


class LinearBase(nn.Module):
    """y = x W^T (+ bias) for this rank's rows and columns of W.

    Args:
        input_size: K of the whole layer.
        parts: the fused parts, in the order of their rows.
        input_is_sharded: this rank holds K / tp.size consecutive columns.
        bias: whether the checkpoint has a bias.
        params_dtype: dtype of activations, bias and outputs (None: torch's default).
        quant_config: decides the method; None means unquantised.
        prefix: the layer's name in the checkpoint, a fused layer by its fused name.
        tp: the ranks that share the layer.

    Raises:
        CheckpointError: K can't be divided among the ranks, or the method refuses the layer.
    """

    def __init__(
        self,
        input_size: int,
        parts: list[Part],
        *,
        input_is_sharded: bool,
        bias: bool,
        params_dtype: torch.dtype | None,
        quant_config: QuantizationConfig | None,
        prefix: str,
        tp: TensorParallelGroup,
    ) -> None:
        super().__init__()
        self.prefix = prefix
        self.tp = tp
        self.parts = parts
        self.input_is_sharded = input_is_sharded
        self.quant_config = quant_config
        self.params_dtype = params_dtype or torch.get_default_dtype()
        self.input_size = input_size
        self.input_size_per_partition = (
            split_evenly(input_size, tp.size, f"{prefix}: input size") if input_is_sharded else input_size
        )
        self.output_partition_sizes = [part.size for part in parts]
        method = quant_config.get_quant_method(self, prefix) if quant_config else None
        self.quant_method: LinearMethodBase = method or UnquantizedLinearMethod()
        self.quant_method.create_weights(
            self,
            input_size_per_partition=self.input_size_per_partition,
            output_partition_sizes=self.output_partition_sizes,
            input_size=input_size,
            output_size=sum(part.total_size for part in parts),
            params_dtype=self.params_dtype,
            weight_loader=self.weight_loader,
        )
        self.bias: torch.Tensor | None
        if bias:
            data = torch.empty(sum(self.output_partition_sizes), dtype=self.params_dtype)
            register_weight(self, "bias", data, output_dim=0, weight_loader=self.weight_loader)
        else:
            self.register_parameter("bias", None)

    def split(self, names: list[str]) -> list[LinearBase]:
        """One sub-layer per part, with the part's checkpoint name; for a method that can't take the parts together."""
        layers = []
        for part, name in zip(self.parts, names, strict=True):
            layer = LinearBase(
                self.input_size,
                [replace(part, shard_id=None, offset=0)],
                input_is_sharded=self.input_is_sharded,
                bias=False,
                params_dtype=self.params_dtype,
                quant_config=self.quant_config,
                prefix=name,
                tp=self.tp,
            )
            self.add_module(name.rpartition(".")[2], layer)
            layers.append(layer)
        return layers

    @property
    def shard_ids(self) -> tuple[ShardId, ...]:
        """One per checkpoint tensor that fills a parameter of this layer."""
        return tuple(part.shard_id for part in self.parts)

    def weight_loader(self, param: torch.Tensor, loaded_weight: torch.Tensor, shard_id: ShardId = None) -> None:
        """Copy this rank's piece of a checkpoint tensor into ``param``.

        ``shard_id`` names the part; None means that the tensor holds all parts (an unfused layer, or a file that
        stores the fused layer).

        Raises:
            CheckpointError: shape or dtype are not what the layer needs.
        """
        index = 0 if shard_id is None else self.shard_ids.index(shard_id)
        parts = self.parts if shard_id is None else [self.parts[index]]
        output_dim: int | None = getattr(param, "output_dim", None)
        input_dim: int | None = getattr(param, "input_dim", None)
        loaded_weight = match_dtype(param, loaded_weight)

        if output_dim is None and input_dim is None:  # one value per part
            if loaded_weight.numel() not in (1, len(parts)):
                raise CheckpointError(f"expected one value, found shape {list(loaded_weight.shape)}")
            param.data[index : index + len(parts)] = loaded_weight.reshape(-1)
            return
        if output_dim is None:  # one value per part and column
            if loaded_weight.numel() != self.input_size:
                raise CheckpointError(f"expected shape [{self.input_size}], found {list(loaded_weight.shape)}")
            first = self.tp.rank * param.shape[1] if self.input_is_sharded else 0
            param.data[index : index + len(parts)] = loaded_weight.flatten()[first : first + param.shape[1]]
            return

        expected = list(param.shape)
        expected[output_dim] = sum(part.total_size for part in parts)
        if input_dim is not None and self.input_is_sharded:
            expected[input_dim] *= self.tp.size
        if list(loaded_weight.shape) != expected:
            raise CheckpointError(f"expected shape {expected}, found {list(loaded_weight.shape)}")
        if input_dim is not None and self.input_is_sharded:
            width = param.shape[input_dim]
            loaded_weight = loaded_weight.narrow(input_dim, self.tp.rank * width, width)
        row = 0
        for part in parts:
            source = loaded_weight.narrow(output_dim, row + part.start, part.size)
            param.data.narrow(output_dim, part.offset, part.size).copy_(source)
            row += part.total_size

    def forward(self, x: Rows) -> torch.Tensor:
        """``x`` [..., K of this rank] to [..., N of this rank]; unscaled rows where :meth:`fuses` says so."""
        return self._product(x, self.bias)

    def _product(self, x: Rows, bias: torch.Tensor | None) -> torch.Tensor:
        if isinstance(x, torch.Tensor):
            return self.quant_method.apply(self, x, bias)
        y = self.quant_method.apply_fused(self, x, bias)
        assert isinstance(y, torch.Tensor)
        return y

    def fuses(self, step: Step, rows: int) -> bool:
        """Whether ``step`` can be had together with a product of ``rows`` rows."""
        return self.quant_method.fuses(self, step, rows)

    def extra_repr(self) -> str:
        return f"in={self.input_size_per_partition}, out={self.output_partition_sizes}, method={self.quant_method}"


def match_dtype(param: torch.Tensor, loaded: torch.Tensor) -> torch.Tensor:
    """``loaded`` in ``param``'s dtype: bytes are reinterpreted, never converted; floating point is converted.

    Raises:
        CheckpointError: the stored dtype can't be what this parameter holds.
    """
    if loaded.dtype == param.dtype:
        return loaded
    if param.dtype == torch.float8_e4m3fn and loaded.dtype == torch.uint8:
        return loaded.view(torch.float8_e4m3fn)
    both_floating = loaded.is_floating_point() and param.is_floating_point()
    if both_floating and min(loaded.itemsize, param.itemsize) > 1:  # eight bits and fewer come with scales
        return loaded
    hint = (
        "; the checkpoint's quantisation config says this layer is not quantised like that"
        if min(loaded.itemsize, param.itemsize) == 1
        else ""
    )
    raise CheckpointError(f"expected dtype {param.dtype}, found {loaded.dtype}{hint}")


class ReplicatedLinear(LinearBase):
    """Every rank holds the whole weight."""

    shards_input: ClassVar[bool] = False

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = False,
        params_dtype: torch.dtype | None = None,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
        tp: TensorParallelGroup = SINGLE,
    ) -> None:
        super().__init__(
            input_size,
            [Part(None, output_size, output_size, 0, 0)],
            input_is_sharded=self.shards_input,
            bias=bias,
            params_dtype=params_dtype,
            quant_config=quant_config,
            prefix=prefix,
            tp=tp,
        )


class MergedColumnParallelLinear(LinearBase):
    """Several matrices of equal K behind each other, each sharded by rows (gate and up). Shard ids are 0, 1, ..."""

    def __init__(
        self,
        input_size: int,
        output_sizes: list[int],
        bias: bool = False,
        params_dtype: torch.dtype | None = None,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
        tp: TensorParallelGroup = SINGLE,
    ) -> None:
        parts: list[Part] = []
        offset = 0
        for index, total in enumerate(output_sizes):
            size = split_evenly(total, tp.size, f"{prefix}: output size")
            shard_id = index if len(output_sizes) > 1 else None
            parts.append(Part(shard_id, total, size, tp.rank * size, offset))
            offset += size
        super().__init__(
            input_size,
            parts,
            input_is_sharded=False,
            bias=bias,
            params_dtype=params_dtype,
            quant_config=quant_config,
            prefix=prefix,
            tp=tp,
        )

    def silu_and_mul(self, x: Rows) -> torch.Tensor:
        """``silu(gate) * up`` [..., N / 2] of this layer's two outputs."""
        if (isinstance(x, UnscaledRows) or x.dim() == 2) and self.fuses(SiluAndMul, count_of(x)):
            y = self.quant_method.apply_fused(self, x, self.bias, SiluAndMul())
            assert isinstance(y, torch.Tensor)
            return y
        y = self(x)
        return operators_for(y.device.type).silu_and_mul(y)


class ColumnParallelLinear(MergedColumnParallelLinear):
    """One matrix, sharded by rows."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = False,
        params_dtype: torch.dtype | None = None,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
        tp: TensorParallelGroup = SINGLE,
    ) -> None:
        super().__init__(input_size, [output_size], bias, params_dtype, quant_config, prefix, tp)


class QKVParallelLinear(LinearBase):
    """q, k and v behind each other, sharded by heads. Shard ids are "q", "k", "v".

    With fewer KV heads than ranks, each KV head is held by ``tp.size / total_num_kv_heads`` neighbouring ranks.
    ``num_heads`` and ``num_kv_heads`` are this rank's.
    """

    def __init__(
        self,
        hidden_size: int,
        head_size: int,
        total_num_heads: int,
        total_num_kv_heads: int,
        bias: bool = False,
        params_dtype: torch.dtype | None = None,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
        tp: TensorParallelGroup = SINGLE,
    ) -> None:
        self_heads = split_evenly(total_num_heads, tp.size, f"{prefix}: number of attention heads")
        if tp.size <= total_num_kv_heads:
            kv_heads = split_evenly(total_num_kv_heads, tp.size, f"{prefix}: number of KV heads")
            kv_rank = tp.rank
        else:
            replicas = split_evenly(tp.size, total_num_kv_heads, f"{prefix}: --tp-size over KV heads, whose product")
            kv_heads, kv_rank = 1, tp.rank // replicas
        q_size, kv_size = self_heads * head_size, kv_heads * head_size
        total_kv = total_num_kv_heads * head_size
        super().__init__(
            hidden_size,
            [
                Part("q", total_num_heads * head_size, q_size, tp.rank * q_size, 0),
                Part("k", total_kv, kv_size, kv_rank * kv_size, q_size),
                Part("v", total_kv, kv_size, kv_rank * kv_size, q_size + kv_size),
            ],
            input_is_sharded=False,
            bias=bias,
            params_dtype=params_dtype,
            quant_config=quant_config,
            prefix=prefix,
            tp=tp,
        )
        self.num_heads = self_heads
        self.num_kv_heads = kv_heads


class RowParallelLinear(ReplicatedLinear):
    """One matrix, sharded by columns; the ranks' partial results are summed, the bias is added once."""

    shards_input = True

    def forward(self, x: Rows) -> torch.Tensor:
        return self.tp.all_reduce(self._product(x, self.bias if self.tp.rank == 0 else None))

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, norm: RMSNorm, reader: LinearBase | None
    ) -> tuple[Rows, torch.Tensor]:
        """(norm(self(x) + residual), self(x) + residual), either maybe in the memory of ``residual``.

        Args:
            residual: [T, N].
            reader: the only layer that reads the first result, which is unscaled if both can do that.
        """
        rows = x.shape[0]
        fuses = reader is not None and self.tp.size == 1 and reader.fuses(UnscaledRows, rows)
        if fuses and self.fuses(AddRMSNorm, rows) and residual.is_contiguous():
            then = AddRMSNorm(residual, norm.weight, norm.variance_epsilon)
            return self.quant_method.apply_fused(self, x, self.bias, then), residual
        x, residual = norm(self(x), residual)
        return x, residual
