"""Generated NVFP4 checkpoints: a small Llama as ModelOpt or compressed-tensors writes it, and edits of it.

Every case starts from :func:`base` and changes one thing. Codes are random bytes, block scales random legal bytes,
global scales such that outputs have about the size of their inputs.
"""

from __future__ import annotations

import copy
import fnmatch
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

FIXTURES = Path(__file__).parents[1] / "fixtures"
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
LAYER = "model.layers.{}."
# amax / 2688 of what each layer's input looks like: layers clip a little, as calibrated ones do.
INPUT_AMAX = {"self_attn.q_proj": 4.0, "self_attn.o_proj": 2.0, "mlp.gate_proj": 4.5, "mlp.down_proj": 6.0}
# rms of e2m1 codes times block scales, for uniformly random codes and the scale bytes of ``random_scales``.
_PRODUCT_RMS = 40.0


@dataclass(frozen=True)
class Shape:
    hidden: int = 256
    intermediate: int = 512
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    vocab: int = 320
    layers: int = 2

    def linears(self) -> dict[str, tuple[int, int]]:
        """(N, K) of every linear layer but the head, by checkpoint name."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        one = {
            "self_attn.q_proj": (q, self.hidden),
            "self_attn.k_proj": (kv, self.hidden),
            "self_attn.v_proj": (kv, self.hidden),
            "self_attn.o_proj": (self.hidden, q),
            "mlp.gate_proj": (self.intermediate, self.hidden),
            "mlp.up_proj": (self.intermediate, self.hidden),
            "mlp.down_proj": (self.hidden, self.intermediate),
        }
        return {LAYER.format(i) + name: size for i in range(self.layers) for name, size in one.items()}


def random_codes(n: int, k: int, g: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 256, (n, k // 2), generator=g, dtype=torch.uint8)


def random_scales(n: int, k: int, g: torch.Generator) -> torch.Tensor:
    """E4M3 values 0.5 .. 32."""
    return torch.randint(0x30, 0x61, (n, k // 16), generator=g, dtype=torch.uint8).view(torch.float8_e4m3fn)


def distinct_scales(n: int, k: int) -> torch.Tensor:
    """Legal E4M3 bytes of which no two rows and no two columns are equal."""
    row, column = torch.meshgrid(torch.arange(n), torch.arange(k // 16), indexing="ij")
    byte = torch.where(column % 2 == 0, row % 49 + 3 * column, row // 49 + 5 * column + 7 * (row % 3))
    return (0x30 + byte % 49).to(torch.uint8).view(torch.float8_e4m3fn)


def bf16(n: int, k: int, g: torch.Generator) -> torch.Tensor:
    return torch.randn(n, k, generator=g).mul(k**-0.5).bfloat16()


@dataclass
class Checkpoint:
    """Files of a checkpoint in memory; tests edit the attributes and :meth:`write` them."""

    shape: Shape
    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    hf_quant_config: dict[str, Any] | None = None
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(99))

    @property
    def section(self) -> dict[str, Any]:
        """What ``hf_quant_config.json`` says."""
        assert self.hf_quant_config is not None
        section: dict[str, Any] = self.hf_quant_config["quantization"]
        return section

    def move_config(self, **section: Any) -> None:
        """Put ``section`` into ``config.json`` as its ``quantization_config`` and delete ``hf_quant_config.json``."""
        self.hf_quant_config = None
        self.config["quantization_config"] = section

    def names(self, pattern: str) -> list[str]:
        return [name for name in self.tensors if fnmatch.fnmatchcase(name, pattern)]

    def layers(self, pattern: str) -> list[str]:
        return [name for name in self.shape.linears() if fnmatch.fnmatchcase(name, pattern)]

    def drop(self, pattern: str) -> None:
        names = self.names(pattern)
        assert names, pattern
        for name in names:
            del self.tensors[name]

    def replace_layer(self, pattern: str, make: Callable[[int, int], dict[str, torch.Tensor]]) -> None:
        names = self.layers(pattern)
        assert names, pattern
        for name in names:
            for old in self.names(name + ".*"):
                if not old.endswith("bias"):
                    del self.tensors[old]
            self.tensors.update({f"{name}.{key}": value for key, value in make(*self.shape.linears()[name]).items()})

    def make_plain(self, pattern: str) -> None:
        """Store these layers as bf16."""
        self.replace_layer(pattern, lambda n, k: {"weight": bf16(n, k, self.generator)})

    def make_fp8(self, pattern: str) -> None:
        """Store these layers as FP8 with one scale per tensor, each its own."""

        def make(n: int, k: int) -> dict[str, torch.Tensor]:
            scale = torch.rand((), generator=self.generator) * 0.002 + 0.001
            weight = bf16(n, k, self.generator).float() / scale
            return {
                "weight": weight.clamp(-448, 448).to(torch.float8_e4m3fn),
                "weight_scale": scale,
                "input_scale": torch.tensor(0.01),
            }

        self.replace_layer(pattern, make)

    def scale_bytes(self, name: str) -> torch.Tensor:
        """A private copy of a layer's block scales as bytes, put into the checkpoint."""
        key = name + ".weight_scale"
        self.tensors[key] = self.tensors[key].view(torch.uint8).clone().view(torch.float8_e4m3fn)
        return self.tensors[key].view(torch.uint8)

    def write(self, folder: Path, tokenizer: bool = False) -> Path:
        """Write config, weights and (for a server) the fixtures' tokenizer; returns ``folder``."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        if self.hf_quant_config is not None:
            (folder / "hf_quant_config.json").write_text(json.dumps(self.hf_quant_config))
        save_file({name: value.contiguous() for name, value in self.tensors.items()}, folder / "model.safetensors")
        if tokenizer:
            for file in (FIXTURES / "tiny-llama-bf16").glob("*token*"):
                shutil.copy(file, folder)
        return folder


def nvfp4_layer(n: int, k: int, global_scale: float, input_scale: float, g: torch.Generator) -> dict[str, torch.Tensor]:
    return {
        "weight": random_codes(n, k, g),
        "weight_scale": random_scales(n, k, g),
        "weight_scale_2": torch.tensor(global_scale),
        "input_scale": torch.tensor(input_scale),
    }


def base(shape: Shape = Shape(), **config: Any) -> Checkpoint:
    """ModelOpt NVFP4 (W4A4), the head excluded and stored as bf16; ``config`` overrides entries of ``config.json``."""
    return copy_of(_base(shape), **config)


def copy_of(checkpoint: Checkpoint, **config: Any) -> Checkpoint:
    """A copy whose dictionaries may be changed (its tensors may not)."""
    return Checkpoint(
        checkpoint.shape,
        {**copy.deepcopy(checkpoint.config), **config},
        dict(checkpoint.tensors),
        copy.deepcopy(checkpoint.hf_quant_config),
    )


@cache
def _base(shape: Shape) -> Checkpoint:
    g = torch.Generator().manual_seed(20)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "num_hidden_layers": shape.layers,
        "vocab_size": shape.vocab,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 50000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    tensors = {
        "model.embed_tokens.weight": torch.randn(shape.vocab, shape.hidden, generator=g).bfloat16(),
        "model.norm.weight": (torch.rand(shape.hidden, generator=g) + 0.5).bfloat16(),
        "lm_head.weight": bf16(shape.vocab, shape.hidden, g),
    }
    for i in range(shape.layers):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{LAYER.format(i)}{norm}.weight"] = (torch.rand(shape.hidden, generator=g) + 0.5).bfloat16()
    for index, (name, (n, k)) in enumerate(shape.linears().items()):
        suffix = name.removeprefix(LAYER.format(index // 7))
        # The parts of a fused layer share their scales, as exporters write them.
        first = next((p for parts in FUSED.values() for p in parts[:1] if suffix.endswith(parts)), None)
        key = suffix if first is None else f"{suffix.rpartition('.')[0]}.{first}"
        global_scale = k**-0.5 / _PRODUCT_RMS * (1 + 0.1 * (index // 7) + 0.03 * len(key))
        layer = nvfp4_layer(n, k, global_scale, INPUT_AMAX[key] / 2688, g)
        tensors.update({f"{name}.{tensor}": value for tensor, value in layer.items()})
    quant = {
        "producer": {"name": "modelopt", "version": "0.47.0"},
        "quantization": {
            "quant_algo": "NVFP4",
            "kv_cache_quant_algo": None,
            "group_size": 16,
            "exclude_modules": ["lm_head"],
        },
    }
    return Checkpoint(shape, config, tensors, quant)


def quantize_head(checkpoint: Checkpoint) -> None:
    """Store ``lm_head`` as NVFP4."""
    shape, g = checkpoint.shape, checkpoint.generator
    del checkpoint.tensors["lm_head.weight"]
    layer = nvfp4_layer(shape.vocab, shape.hidden, shape.hidden**-0.5 / _PRODUCT_RMS, 4.0 / 2688, g)
    checkpoint.tensors.update({f"lm_head.{key}": value for key, value in layer.items()})


# ----------------------------------------------------------------------------------------------- compressed-tensors
_CT_NAMES: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "weight": ("weight_packed", lambda t: t),
    "weight_scale": ("weight_scale", lambda t: t),
    "weight_scale_2": ("weight_global_scale", lambda t: (1.0 / t).reshape(1)),
    "input_scale": ("input_global_scale", lambda t: (1.0 / t).reshape(1)),
}


def ct_layer(layer: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of :func:`nvfp4_layer` in the other dialect."""
    return {_CT_NAMES[key][0]: _CT_NAMES[key][1](tensor) for key, tensor in layer.items()}


def ct_scheme(**changes: Any) -> dict[str, Any]:
    """The scheme of weights or activations as compressed-tensors writes it."""
    scheme = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
    return {**scheme, "dynamic": False, "observer": "static_minmax", "scale_dtype": "torch.float8_e4m3fn", **changes}


def ct_twin(checkpoint: Checkpoint, weight_only: bool = False) -> Checkpoint:
    """The same weights as llm-compressor stores them."""
    twin = copy_of(checkpoint)
    twin.tensors = {}
    for name, tensor in checkpoint.tensors.items():
        layer, _, key = name.rpartition(".")
        if checkpoint.tensors[layer + ".weight"].dtype != torch.uint8:
            twin.tensors[name] = tensor
        elif not (weight_only and key == "input_scale"):
            twin.tensors.update({f"{layer}.{new}": value for new, value in ct_layer({key: tensor}).items()})
    group = {
        "format": "nvfp4-pack-quantized",
        "targets": ["Linear"],
        "weights": ct_scheme(),
        "input_activations": None if weight_only else ct_scheme(dynamic="local"),
        "output_activations": None,
    }
    twin.move_config(
        quant_method="compressed-tensors",
        format="nvfp4-pack-quantized",
        config_groups={"group_0": group},
        ignore=["lm_head"],
        kv_cache_scheme=None,
        quantization_status="compressed",
    )
    return twin
