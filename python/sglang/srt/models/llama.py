"""Llama and the architectures that differ from it by switches: Mistral, Qwen2, Qwen3 (and SmolLM2, which is Llama)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn

from sglang.srt.distributed import SINGLE, TensorParallelGroup
from sglang.srt.errors import CheckpointError
from sglang.srt.layers.attention.base_attn_backend import Rotary
from sglang.srt.layers.fusion import Rows
from sglang.srt.layers.layernorm import RMSNorm, norm_heads
from sglang.srt.layers.linear import LinearBase, MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from sglang.srt.layers.logits_processor import compute_logits
from sglang.srt.layers.quantization.base_config import QuantizationConfig
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.rotary_embedding import get_rope
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, LogitsProcessorOutput


@dataclass(frozen=True)
class Switches:
    """How an architecture differs from Llama. A bias of None is what the config says (absent: no bias).

    Attributes:
        qkv_bias, o_bias: bias of the attention's projections; the config's ``attention_bias``.
        mlp_bias: bias of the MLP's projections; the config's ``mlp_bias``.
        qk_norm: queries and keys are normalised per head before the rotation.
        sliding_window: the config's ``sliding_window`` (and ``layer_types``) limits what a token sees.
    """

    qkv_bias: bool | None = None
    o_bias: bool | None = None
    mlp_bias: bool | None = None
    qk_norm: bool = False
    sliding_window: bool = False

    def window(self, config: PretrainedConfig, layer_id: int) -> int | None:
        """Tokens that a token of this layer sees, itself included; None for all."""
        layer_types = getattr(config, "layer_types", None)
        if not self.sliding_window or (layer_types and layer_types[layer_id] != "sliding_attention"):
            return None
        window: int | None = config.sliding_window
        return window


def _bias(switch: bool | None, config: PretrainedConfig, name: str) -> bool:
    return bool(getattr(config, name, False)) if switch is None else switch


# The norm behind a sum of the residual stream, and the layer that reads it; None: it is not a linear layer's alone.
Reader = tuple[RMSNorm, LinearBase | None]


class LlamaMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), added to the residual stream and normalised for whoever comes next."""

    def __init__(
        self,
        config: PretrainedConfig,
        switches: Switches,
        quant_config: QuantizationConfig | None,
        prefix: str,
        tp: TensorParallelGroup,
    ) -> None:
        super().__init__()
        if config.hidden_act != "silu":
            raise CheckpointError(f"config.json: hidden_act {config.hidden_act!r} is not supported, only 'silu'")
        hidden, intermediate = config.hidden_size, config.intermediate_size
        bias = _bias(switches.mlp_bias, config, "mlp_bias")
        self.gate_up_proj = MergedColumnParallelLinear(
            hidden, [intermediate] * 2, bias, quant_config=quant_config, prefix=f"{prefix}.gate_up_proj", tp=tp
        )
        self.down_proj = RowParallelLinear(
            intermediate, hidden, bias, quant_config=quant_config, prefix=f"{prefix}.down_proj", tp=tp
        )

    def forward(self, x: Rows, residual: torch.Tensor, then: Reader) -> tuple[Rows, torch.Tensor]:
        return self.down_proj.add_rms_norm(self.gate_up_proj.silu_and_mul(x), residual, *then)


class LlamaAttention(nn.Module):
    """Grouped-query attention with rotary positions, added to the residual stream and normalised."""

    def __init__(
        self,
        config: PretrainedConfig,
        switches: Switches,
        layer_id: int,
        quant_config: QuantizationConfig | None,
        prefix: str,
        tp: TensorParallelGroup,
        kv_cache_dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        heads = config.num_attention_heads
        self.head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // heads
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size,
            self.head_dim,
            heads,
            config.num_key_value_heads,
            _bias(switches.qkv_bias, config, "attention_bias"),
            quant_config=quant_config,
            prefix=f"{prefix}.qkv_proj",
            tp=tp,
        )
        self.o_proj = RowParallelLinear(
            heads * self.head_dim,
            config.hidden_size,
            _bias(switches.o_bias, config, "attention_bias"),
            quant_config=quant_config,
            prefix=f"{prefix}.o_proj",
            tp=tp,
        )
        self.num_heads, self.num_kv_heads = self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if switches.qk_norm:
            self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.attn = RadixAttention(
            self.num_heads,
            self.head_dim,
            self.head_dim**-0.5,
            self.num_kv_heads,
            layer_id,
            sliding_window=switches.window(config, layer_id),
            kv_cache_dtype=kv_cache_dtype,
            prefix=f"{prefix}.attn",
        )

    def forward(
        self, x: Rows, residual: torch.Tensor, rotary: Rotary, forward_batch: ForwardBatch, then: Reader
    ) -> tuple[Rows, torch.Tensor]:
        heads = self.qkv_proj(x).unflatten(-1, (-1, self.head_dim))
        q, k, v = heads.split_with_sizes((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = norm_heads(q, k, self.q_norm, self.k_norm)
        return self.o_proj.add_rms_norm(self.attn(q, k, v, forward_batch, rotary), residual, *then)


class LlamaDecoderLayer(nn.Module):
    """Attention and MLP, each behind a norm and added to the residual stream."""

    def __init__(
        self,
        config: PretrainedConfig,
        switches: Switches,
        layer_id: int,
        quant_config: QuantizationConfig | None,
        prefix: str,
        tp: TensorParallelGroup,
        kv_cache_dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.self_attn = LlamaAttention(
            config, switches, layer_id, quant_config, f"{prefix}.self_attn", tp, kv_cache_dtype
        )
        self.mlp = LlamaMLP(config, switches, quant_config, f"{prefix}.mlp", tp)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        x: Rows,
        residual: torch.Tensor,
        rotary: Rotary,
        forward_batch: ForwardBatch,
        then: Reader,
    ) -> tuple[Rows, torch.Tensor]:
        """From the residual stream and its norm ``x`` to the stream behind this layer and what ``then`` makes of it."""
        between: Reader = (self.post_attention_layernorm, self.mlp.gate_up_proj)
        x, residual = self.self_attn(x, residual, rotary, forward_batch, between)
        x, residual = self.mlp(x, residual, then)
        return x, residual


class LlamaModel(nn.Module):
    """Embedding, layers and final norm."""

    def __init__(
        self,
        config: PretrainedConfig,
        switches: Switches,
        quant_config: QuantizationConfig | None,
        prefix: str,
        tp: TensorParallelGroup,
        kv_cache_dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size,
            config.hidden_size,
            prefix=f"{prefix}.embed_tokens",
            tp=tp,
            is_head=config.tie_word_embeddings,
        )
        layers = [
            LlamaDecoderLayer(
                config, switches, layer_id, quant_config, f"{prefix}.layers.{layer_id}", tp, kv_cache_dtype
            )
            for layer_id in range(config.num_hidden_layers)
        ]
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        # In a plain list, they are not modules of the model once more.
        self._readers: list[Reader] = [(layer.input_layernorm, layer.self_attn.qkv_proj) for layer in layers]
        self._readers.append((self.norm, None))
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.rotary_emb = get_rope(config, head_dim)

    def forward(self, forward_batch: ForwardBatch) -> torch.Tensor:
        """Hidden states [T, hidden_size] of the batch's new tokens."""
        residual: torch.Tensor = self.embed_tokens(forward_batch.input_ids)
        rotary = self.rotary_emb(forward_batch.positions, residual.dtype)
        x: Rows = self._readers[0][0](residual)
        for layer, then in zip(self.layers, self._readers[1:], strict=True):
            x, residual = layer(x, residual, rotary, forward_batch, then)
        assert isinstance(x, torch.Tensor)  # the last norm has no linear layer as its only reader
        return x


class LlamaForCausalLM(nn.Module):
    """The whole model, under the checkpoint's names.

    Args:
        config: the model's transformers config.
        quant_config: decides how each linear layer is stored; None means unquantised.
        tp: the ranks that share the model.
        kv_cache_dtype: what keys and values are stored in, whatever the checkpoint asks for; None for what it asks for.

    Parameters are created on torch's default device in torch's default dtype.

    Raises:
        CheckpointError: the config asks for what these architectures don't have.
    """

    switches: ClassVar[Switches] = Switches()
    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }

    def __init__(
        self,
        config: PretrainedConfig,
        quant_config: QuantizationConfig | None = None,
        tp: TensorParallelGroup = SINGLE,
        kv_cache_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        if kv_cache_dtype is None and quant_config is not None:
            kv_cache_dtype = quant_config.kv_cache_dtype
        self.model = LlamaModel(config, self.switches, quant_config, "model", tp, kv_cache_dtype)
        self.lm_head: ParallelLMHead | None = None
        # A tied checkpoint may hold a head of its own nevertheless; the embedding is what its config asks for.
        self.unused_checkpoint_tensors: tuple[str, ...] = ("lm_head.*",)
        if not config.tie_word_embeddings:
            self.lm_head = ParallelLMHead(
                config.vocab_size, config.hidden_size, quant_config=quant_config, prefix="lm_head", tp=tp
            )
            self.unused_checkpoint_tensors = ()

    def forward(self, forward_batch: ForwardBatch) -> LogitsProcessorOutput:
        return self.compute_logits(self.model(forward_batch), forward_batch)

    def compute_logits(self, hidden_states: torch.Tensor, forward_batch: ForwardBatch) -> LogitsProcessorOutput:
        """From what ``model`` returned, [T, hidden_size]."""
        head = self.model.embed_tokens.logits if self.lm_head is None else self.lm_head
        return compute_logits(hidden_states, head, forward_batch)


class MistralForCausalLM(LlamaForCausalLM):
    switches = Switches(qkv_bias=False, o_bias=False, mlp_bias=False, sliding_window=True)


class Qwen2ForCausalLM(LlamaForCausalLM):
    switches = Switches(qkv_bias=True, o_bias=False, mlp_bias=False, sliding_window=True)


class Qwen3ForCausalLM(LlamaForCausalLM):
    switches = Switches(mlp_bias=False, qk_norm=True, sliding_window=True)
