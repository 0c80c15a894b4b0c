"""Embedding and output head, sharded over tensor-parallel ranks by rows of the vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from sglang.srt.distributed import SINGLE, TensorParallelGroup
from sglang.srt.errors import CheckpointError
from sglang.srt.layers.constant_linear import Bf16Linear, ConstantLinear, as_bf16
from sglang.srt.layers.fusion import Rows
from sglang.srt.layers.linear import LinearBase, Part, match_dtype
from sglang.srt.layers.operators import operators_for
from sglang.srt.layers.quantization.base_config import QuantizationConfig, register_weight
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

# Ranks hold a multiple of the first of these, all but the last; of a later one where the last would get nothing.
SHARD_ALIGNMENTS = (64, 32, 16, 8, 4, 2, 1)


@dataclass(frozen=True)
class VocabShard:
    """Rows ``start`` .. ``start + size`` of the vocabulary; the vocabulary is padded to ``padded_size`` per rank."""

    start: int
    size: int
    padded_size: int
    vocab_size: int

    @classmethod
    def of(cls, vocab_size: int, tp: TensorParallelGroup) -> VocabShard:
        """This rank's shard.

        Raises:
            CheckpointError: so many ranks that one would hold nothing.
        """
        if tp.size == 1:
            return cls(0, vocab_size, vocab_size, vocab_size)
        for alignment in SHARD_ALIGNMENTS:
            padded = -(-vocab_size // (tp.size * alignment)) * alignment
            if padded * (tp.size - 1) < vocab_size:
                break
        else:
            raise CheckpointError(f"a vocabulary of {vocab_size} can't be shared by --tp-size {tp.size} ranks")
        start = tp.rank * padded
        return cls(start, min(padded, vocab_size - start), padded, vocab_size)

    def gather_logits(self, logits: torch.Tensor, tp: TensorParallelGroup) -> torch.Tensor:
        """This rank's logits [rows, size] to those of the whole vocabulary [rows, vocab_size]."""
        if tp.size == 1:
            return logits
        logits = F.pad(logits, (0, self.padded_size - self.size))
        return tp.all_gather(logits)[:, : self.vocab_size]


# Logits of a bf16 model are computed in float32: near 20, neighbouring bf16 values are 0.125 apart, so that rounding
# alone would decide between the best tokens.
class TiedHeadMethod:
    """Prepares an embedding for its second use as the output head."""

    def process_weights_after_loading(self, layer: VocabParallelEmbedding) -> None:
        exact = as_bf16(layer.weight)
        if exact is None:
            layer.head = ConstantLinear(layer.weight, float32_output=True)
        else:  # one copy for both uses
            layer.weight.data = exact
            layer.head = Bf16Linear(layer.weight.data)


class VocabParallelEmbedding(nn.Module):
    """Token embedding, and the output head of a model that ties the two.

    Args:
        num_embeddings: size of the vocabulary.
        embedding_dim: hidden size.
        params_dtype: dtype of the weight (None: torch's default).
        prefix: the layer's name in the checkpoint.
        tp: the ranks that share the layer.
        is_head: :meth:`logits` will be used.
    """

    weight: torch.Tensor

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        params_dtype: torch.dtype | None = None,
        prefix: str = "",
        tp: TensorParallelGroup = SINGLE,
        is_head: bool = False,
    ) -> None:
        super().__init__()
        self.prefix = prefix
        self.tp = tp
        self.head: ConstantLinear | Bf16Linear | None = None
        if is_head:
            self.quant_method = TiedHeadMethod()
        self.shard = VocabShard.of(num_embeddings, tp)
        weight = torch.empty(self.shard.size, embedding_dim, dtype=params_dtype)
        self.params_dtype = weight.dtype
        register_weight(self, "weight", weight, output_dim=0, input_dim=1, weight_loader=self.weight_loader)

    def weight_loader(self, param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
        """Copy this rank's rows.

        Raises:
            CheckpointError: the tensor has another shape or dtype.
        """
        expected = [self.shard.vocab_size, param.shape[1]]
        if list(loaded_weight.shape) != expected:
            raise CheckpointError(f"expected shape {expected}, found {list(loaded_weight.shape)}")
        param.data.copy_(match_dtype(param, loaded_weight).narrow(0, self.shard.start, self.shard.size))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """``input_ids`` [T] to [T, embedding_dim]."""
        first = None if self.tp.size == 1 else self.shard.start
        operators = operators_for(input_ids.device.type)
        return self.tp.all_reduce(operators.embedding(input_ids, self.weight, self.params_dtype, first))

    def logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """``hidden_states`` [rows, embedding_dim] to float32 [rows, vocabulary]; after the weights were processed."""
        assert self.head is not None
        local = self.head(hidden_states)
        return self.shard.gather_logits(local, self.tp)


class ParallelLMHead(LinearBase):
    """Output head with a weight of its own, which may be quantised like any linear layer.

    Args:
        num_embeddings: size of the vocabulary.
        embedding_dim: hidden size.
        params_dtype, quant_config, prefix, tp: as for the linear layers.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        params_dtype: torch.dtype | None = None,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
        tp: TensorParallelGroup = SINGLE,
    ) -> None:
        shard = VocabShard.of(num_embeddings, tp)
        super().__init__(
            embedding_dim,
            [Part(None, num_embeddings, shard.size, shard.start, 0)],
            input_is_sharded=False,
            bias=False,
            params_dtype=params_dtype,
            quant_config=quant_config,
            prefix=prefix,
            tp=tp,
        )
        self.shard = shard
        if type(self.quant_method) is UnquantizedLinearMethod:
            self.quant_method = UnquantizedLinearMethod(float32_output=True)

    def forward(self, x: Rows) -> torch.Tensor:
        """``x`` [rows, embedding_dim] to logits of the whole vocabulary [rows, vocabulary]: float32, unless the head is
        quantised."""
        return self.shard.gather_logits(self._product(x, None), self.tp)
