"""Scales of an fp8 KV cache: parameters until the checkpoint is loaded, numbers afterwards."""

import pytest
import torch
from torch import nn

from sglang.srt.errors import CheckpointError
from sglang.srt.layers import radix_attention
from sglang.srt.layers.quantization.base_config import LinearMethodBase, QuantizationConfig
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_loader.loader import load_weights


class Fp8Cache(QuantizationConfig):
    @classmethod
    def get_name(cls) -> str:
        return "fp8-cache"

    def get_quant_method(self, layer: nn.Module, prefix: str) -> LinearMethodBase | None:
        return None

    @property
    def kv_cache_dtype(self) -> torch.dtype | None:
        return torch.float8_e4m3fn


class Attention(nn.Module):
    def __init__(self, config: QuantizationConfig | None) -> None:
        super().__init__()
        self.attn = RadixAttention(2, 8, 1.0, 1, layer_id=0, quant_config=config)


def tensors(k_scale: float) -> list[tuple[str, torch.Tensor]]:
    return [("self_attn.k_proj.k_scale", torch.tensor(k_scale)), ("self_attn.v_proj.v_scale", torch.tensor([0.5]))]


def test_scales_are_loaded_from_the_projections_names() -> None:
    model = nn.ModuleDict({"self_attn": Attention(Fp8Cache())})
    load_weights(model, tensors(0.25))
    layer = model["self_attn"].attn
    layer.quant_method.process_weights_after_loading(layer)
    assert (layer.k_scale, layer.v_scale) == (0.25, 0.5)
    assert list(layer.parameters()) == []


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_impossible_scale_is_refused(bad: float) -> None:
    model = nn.ModuleDict({"self_attn": Attention(Fp8Cache())})
    with pytest.raises(CheckpointError, match=r"self_attn\.k_proj\.k_scale: a KV cache scale must be positive"):
        load_weights(model, tensors(bad))


def test_one_scale_without_the_other_is_refused() -> None:
    model = nn.ModuleDict({"self_attn": Attention(Fp8Cache())})
    load_weights(model, tensors(1.0)[:1])
    with pytest.raises(CheckpointError, match="one KV cache scale but no v_scale"):
        layer = model["self_attn"].attn
        layer.quant_method.process_weights_after_loading(layer)


def test_no_scales_at_all_are_stated(caplog: pytest.LogCaptureFixture) -> None:
    radix_attention._warn_of_missing_scales.cache_clear()
    model = nn.ModuleDict({"self_attn": Attention(Fp8Cache())})
    load_weights(model, [])
    layer = model["self_attn"].attn
    layer.quant_method.process_weights_after_loading(layer)
    assert (layer.k_scale, layer.v_scale) == (1.0, 1.0)
    assert "stores no k_scale and v_scale; 1.0 is used" in caplog.text


def test_no_scales_without_an_fp8_checkpoint() -> None:
    layer = Attention(None).attn
    assert layer.k_scale is None and layer.v_scale is None
    assert list(layer.parameters()) == []
