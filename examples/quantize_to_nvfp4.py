"""Quantise a checkpoint to NVFP4 from Python, and look at what was written.

Runs in seconds without a GPU or network: the model is a small random Llama made on the spot. For a real one, give
its folder or hub id to ``quantize_checkpoint`` (or run ``python -m sglang.quantize --model-path M --output DIR``) and
serve the result with ``python -m sglang.launch_server --model-path DIR``.
"""

import json
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from sglang.quantize import quantize_checkpoint
from sglang.srt.layers.quantization.nvfp4_utils import dequantize_nvfp4


def make_checkpoint(folder: Path) -> None:
    """A two-layer bf16 Llama with a tokenizer that has one token for each byte."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=256,
        max_position_embeddings=512,
    )
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def main() -> None:
    with tempfile.TemporaryDirectory() as work:
        source, output = Path(work) / "bf16", Path(work) / "nvfp4"
        make_checkpoint(source)

        # Weights and activations in 4 bits; layer 1's down projection stays bf16.
        summary = quantize_checkpoint(
            str(source), str(output), "nvfp4", exclude=["model.layers.1.mlp.down_proj"], show_progress=False
        )
        print(summary)
        print(json.loads((output / "hf_quant_config.json").read_text())["quantization"])

        before, after = load_file(source / "model.safetensors"), load_file(output / "model.safetensors")
        layer = "model.layers.0.mlp.up_proj"
        for name in sorted(after):
            if name.startswith(layer):
                print(f"{name}: {str(after[name].dtype).removeprefix('torch.')} {list(after[name].shape)}")

        weight = before[f"{layer}.weight"].float()
        packed, scale, global_scale = (
            after[f"{layer}.{part}"] for part in ("weight", "weight_scale", "weight_scale_2")
        )
        error = (dequantize_nvfp4(packed, scale, global_scale) - weight).norm() / weight.norm()
        print(f"relative error of {layer}: {error:.3f}")


if __name__ == "__main__":
    main()
