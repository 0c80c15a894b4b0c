"""A llama GGUF small enough to check by eye, in the shape of the demo model's file."""

from pathlib import Path

import gguf
import numpy as np

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, LAYERS = 64, 4, 2, 16, 96, 2
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["h e", "l l", "he ll", "Ġ w", "1 2"]
CHAT_TEMPLATE = "{% for m in messages %}{{ '<|im_start|>' + m['content'] + '<|im_end|>\n' }}{% endfor %}"


def vocabulary() -> list[str]:
    from tokenizers.pre_tokenizers import ByteLevel

    return SPECIAL + sorted(ByteLevel.alphabet()) + [m.replace(" ", "") for m in MERGES]


def float_tensors(seed: int = 0) -> dict[str, np.ndarray]:
    """GGUF names to fp32 values (q and k in GGUF's row order); norms [n], weights [out, in]."""
    rng = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (len(vocabulary()), HIDDEN)}
    for i in range(LAYERS):
        for name, shape in {
            "attn_norm": (HIDDEN,),
            "attn_q": (HEADS * HEAD_DIM, HIDDEN),
            "attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
            "attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
            "attn_output": (HIDDEN, HEADS * HEAD_DIM),
            "ffn_norm": (HIDDEN,),
            "ffn_gate": (INTERMEDIATE, HIDDEN),
            "ffn_up": (INTERMEDIATE, HIDDEN),
            "ffn_down": (HIDDEN, INTERMEDIATE),
        }.items():
            shapes[f"blk.{i}.{name}.weight"] = shape
    shapes["output_norm.weight"] = (HIDDEN,)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def write_tiny_gguf(
    path: Path,
    tensors: dict[str, np.ndarray] | None = None,
    *,
    pre: str = "smollm",
    architecture: str = "llama",
    token_types: list[int] | None = None,
    extra: dict[str, float] | None = None,
    quantised: bool = True,
) -> None:
    """Write it; ``quantised``: projections as Q4_1 and the embedding as Q8_0, as in the demo model's file."""
    tokens = vocabulary()
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(12345.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_add_bos_token(False)
    writer.add_add_space_prefix(False)
    writer.add_token_list(tokens)
    writer.add_token_types(token_types or [3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(CHAT_TEMPLATE)
    for key, value in (extra or {}).items():
        writer.add_float32(key, value)
    for name, values in (tensors or float_tensors()).items():
        if quantised and values.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0 if "embd" in name else gguf.GGMLQuantizationType.Q4_1
            writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
