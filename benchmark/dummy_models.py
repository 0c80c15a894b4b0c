"""Models of well-known shapes without their files: configurations for ``--load-format dummy``, and random weights."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LLAMA3 = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}


def _sizes(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, head_dim: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }


SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {**LLAMA3, **_sizes(4096, 14336, 32, 32, 8, 128)},
    "qwen3-32b": {**QWEN3, **_sizes(5120, 25600, 64, 64, 8, 128)},
    "llama-3.3-70b": {**LLAMA3, **_sizes(8192, 28672, 80, 64, 8, 128)},
    # For trying a benchmark out.
    "tiny": {**LLAMA3, **_sizes(256, 512, 2, 8, 4, 64), "vocab_size": 1024, "bos_token_id": 0, "eos_token_id": 1},
}
QUANTS = ("w4a16_nvfp4", "bf16")
QUANTIZATION = {
    "producer": {"name": "modelopt", "version": "0.47.0"},
    "quantization": {"quant_algo": "W4A16_NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]},
}


@dataclass(frozen=True)
class Shape:
    """One of :data:`SHAPES`, maybe with fewer layers; written ``name`` or ``name:layers``."""

    name: str
    config: dict[str, Any]

    @classmethod
    def parse(cls, text: str) -> Shape:
        name, _, layers = text.partition(":")
        if name not in SHAPES:
            raise ValueError(f"{name!r} is none of {', '.join(SHAPES)}")
        return cls(text, {**SHAPES[name], **({"num_hidden_layers": int(layers)} if layers else {})})

    @property
    def layers(self) -> int:
        return int(self.config["num_hidden_layers"])

    def _get(self, *names: str) -> list[int]:
        return [int(self.config[name]) for name in names]

    @property
    def layer_parameters(self) -> int:
        """Of the products of one layer."""
        hidden, intermediate, dim = self._get("hidden_size", "intermediate_size", "head_dim")
        heads, kv_heads = self._get("num_attention_heads", "num_key_value_heads")
        return hidden * dim * (2 * heads + 2 * kv_heads) + 3 * hidden * intermediate

    @property
    def head_parameters(self) -> int:
        hidden, vocabulary = self._get("hidden_size", "vocab_size")
        return hidden * vocabulary

    def weight_bytes(self, quant: str) -> int:
        """All weights as they are stored: 4 bits and a scale byte for 16 of them, or 16 bits."""
        per_layer = self.layer_parameters * (9 / 16 if quant == "w4a16_nvfp4" else 2)
        return int(self.layers * per_layer) + 2 * 2 * self.head_parameters

    def attention_flops(self, keys: int) -> int:
        """Of all layers for one query over ``keys`` keys."""
        heads, dim = self._get("num_attention_heads", "head_dim")
        return 4 * heads * dim * keys * self.layers

    def kv_bytes(self, itemsize: int = 2) -> int:
        """Of one token in all layers."""
        kv_heads, dim = self._get("num_key_value_heads", "head_dim")
        return 2 * kv_heads * dim * itemsize * self.layers


def write_config(folder: Path, shape: Shape, quant: str = "bf16") -> None:
    """What ``--load-format dummy`` needs of a checkpoint: ``quant`` is one of :data:`QUANTS`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape.config))
    if quant == "w4a16_nvfp4":
        (folder / "hf_quant_config.json").write_text(json.dumps(QUANTIZATION))


def write_weights(folder: Path, shape: Shape, device: str) -> None:
    """A bf16 checkpoint with random weights, of which each is as large as its inputs are many; made on ``device``, a
    file a layer."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator(device).manual_seed(0)
    write_config(folder, shape)
    parts = _tensors(shape)
    for prefix in ("model.embed_tokens", "model.norm", "lm_head", *(f"model.layers.{i}" for i in range(shape.layers))):
        tensors = {}
        for name, size in parts.items():
            if not name.startswith(prefix + "."):
                continue
            if len(size) == 1:
                tensors[name] = torch.ones(size, dtype=torch.bfloat16)
            else:
                std = 1.0 if "embed" in name else size[1] ** -0.5
                values = torch.empty(size, dtype=torch.bfloat16, device=device).normal_(std=std, generator=generator)
                tensors[name] = values.cpu()
        save_file(tensors, folder / f"{prefix}.safetensors")
    if device != "cpu":
        torch.cuda.empty_cache()


def _tensors(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a checkpoint's tensors."""

    def named() -> Iterator[tuple[str, tuple[int, ...]]]:
        hidden, intermediate, dim, vocabulary = shape._get("hidden_size", "intermediate_size", "head_dim", "vocab_size")
        heads, kv_heads = shape._get("num_attention_heads", "num_key_value_heads")
        yield "model.embed_tokens.weight", (vocabulary, hidden)
        yield "model.norm.weight", (hidden,)
        yield "lm_head.weight", (vocabulary, hidden)
        for i in range(shape.layers):
            layer = f"model.layers.{i}."
            for name in ("input_layernorm", "post_attention_layernorm"):
                yield f"{layer}{name}.weight", (hidden,)
            for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
                yield f"{layer}self_attn.{name}_proj.weight", (count * dim, hidden)
            yield f"{layer}self_attn.o_proj.weight", (hidden, heads * dim)
            if shape.config["model_type"] == "qwen3":
                yield f"{layer}self_attn.q_norm.weight", (dim,)
                yield f"{layer}self_attn.k_norm.weight", (dim,)
            for name in ("gate", "up"):
                yield f"{layer}mlp.{name}_proj.weight", (intermediate, hidden)
            yield f"{layer}mlp.down_proj.weight", (hidden, intermediate)

    return dict(named())


def write_tokenizer(folder: Path, shape: Shape) -> None:
    """A byte-level tokenizer as large as the model's vocabulary: bytes, and for all other ids words of no text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    size = int(shape.config["vocab_size"])
    words = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words += [f"w{i}" for i in range(len(words), size)]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(folder)


def write_report(path: Path, report: dict[str, Any]) -> None:
    """A benchmark's result, one of its ``rows`` a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = ",\n  ".join(json.dumps(row) for row in report["rows"])
    head = json.dumps({**report, "rows": []}, indent=1)
    path.write_text(head.replace('"rows": []', f'"rows": [\n  {rows}\n ]') + "\n")


def environment() -> dict[str, str]:
    """The process's, with this checkout's package first."""
    package = str(Path(__file__).parents[1] / "python")
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))}
