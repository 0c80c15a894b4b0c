"""A llama GGUF file as a Hugging Face checkpoint: config, tensors, tokenizer, chat template.

Only what can be carried over exactly is read: a key, tensor, token type or tokenizer that this module does not know
is a :class:`CheckpointError` that names it.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Final, TypeVar

import gguf
import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tqdm import tqdm

from sglang.srt.errors import CheckpointError

T = TypeVar("T")

# What the file has to say for the conversion below to be exact.
_REQUIRED: Final[dict[str, object]] = {
    "general.architecture": "llama",
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.add_bos_token": False,
    "tokenizer.ggml.add_space_prefix": False,
}
# `llama.*` keys and their names in config.json.
_CONFIG_KEYS: Final[dict[str, str]] = {
    "llama.attention.head_count": "num_attention_heads",
    "llama.attention.head_count_kv": "num_key_value_heads",
    "llama.attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "llama.block_count": "num_hidden_layers",
    "llama.context_length": "max_position_embeddings",
    "llama.embedding_length": "hidden_size",
    "llama.feed_forward_length": "intermediate_size",
    "llama.rope.dimension_count": "head_dim",
    "llama.rope.freq_base": "rope_theta",
    "llama.vocab_size": "vocab_size",
}
_SPECIAL_TOKENS: Final[dict[str, str]] = {
    "bos": "tokenizer.ggml.bos_token_id",
    "eos": "tokenizer.ggml.eos_token_id",
    "pad": "tokenizer.ggml.padding_token_id",
    "unk": "tokenizer.ggml.unknown_token_id",
}
_NORMAL_TOKEN, _CONTROL_TOKEN = 1, 3

_MODEL_TENSORS: Final[dict[str, str]] = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_TENSORS: Final[dict[str, str]] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Projections whose rows GGUF permutes, and the config entry that counts their heads.
_PERMUTED: Final[dict[str, str]] = {
    "self_attn.q_proj.weight": "num_attention_heads",
    "self_attn.k_proj.weight": "num_key_value_heads",
}


def undo_rope_permutation(weight: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """Rows of a GGUF q or k projection in Hugging Face's order.

    GGUF makes rotary pairs neighbours (of every head: 0, d/2, 1, d/2+1, ...), Hugging Face keeps the halves apart.

    Args:
        weight: [num_heads * head_dim, in_features].

    Returns:
        the same shape.
    """
    rows, columns = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(weight.shape)


def _hf_name(name: str) -> str | None:
    if name in _MODEL_TENSORS:
        return _MODEL_TENSORS[name]
    block, _, rest = name.partition(".")
    layer, _, rest = rest.partition(".")
    module, _, kind = rest.partition(".")
    if block != "blk" or not layer.isdecimal() or module not in _LAYER_TENSORS or kind != "weight":
        return None
    return f"model.layers.{layer}.{_LAYER_TENSORS[module]}.weight"


class GgufLlama:
    """A llama GGUF file, opened by memory map.

    Attributes:
        config: the content of ``config.json``.
        special_tokens: the ids of "bos", "eos", "pad", "unk", as far as the file names them.

    Raises:
        CheckpointError: not a GGUF file, or it says something this class can't carry over exactly.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._reader = gguf.GGUFReader(path)
        except (ValueError, IndexError) as e:  # what GGUFReader raises for a foreign and for a truncated file
            raise CheckpointError(f"{path} is not a readable GGUF file: {e}") from e
        for key, value in _REQUIRED.items():
            if self._get(key, type(value)) != value:
                raise CheckpointError(f"{path}: {key} is {self._get(key, object)!r}; only {value!r} is supported.")
        self._tokens: list[str] = self._get("tokenizer.ggml.tokens", list)
        self.special_tokens = {k: self._get(key, int) for k, key in _SPECIAL_TOKENS.items() if key in self._fields}
        self.config = self._read_config()

    @property
    def _fields(self) -> dict[str, gguf.ReaderField]:
        return self._reader.fields  # type: ignore[no-any-return]

    @property
    def num_tensors(self) -> int:
        return len(self._reader.tensors)

    def _get(self, key: str, *kinds: type[T]) -> T:
        if key not in self._fields:
            raise CheckpointError(f"{self._path}: the GGUF has no {key}.")
        value = self._fields[key].contents()
        if not isinstance(value, kinds):
            raise CheckpointError(f"{self._path}: {key} is a {type(value).__name__}, expected {kinds[0].__name__}.")
        return value

    def _read_config(self) -> dict[str, object]:
        unknown = [k for k in self._fields if k.startswith("llama.") and k not in _CONFIG_KEYS]
        if unknown:
            raise CheckpointError(f"{self._path}: {', '.join(unknown)} can't be expressed in the checkpoint.")
        values: dict[str, float] = {}
        for key, name in _CONFIG_KEYS.items():
            value = self._get(key, int, float)
            # Stored as float32: the shortest decimal that names it is what the model's own config says.
            values[name] = float(str(np.float32(value))) if isinstance(value, float) else value
        if values["vocab_size"] != len(self._tokens):
            raise CheckpointError(f"{self._path}: {len(self._tokens)} tokens, but vocab_size {values['vocab_size']}.")
        if values["head_dim"] * values["num_attention_heads"] != values["hidden_size"]:
            raise CheckpointError(f"{self._path}: partial rotary embedding ({values}) is not supported.")
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            **values,
            **{f"{name}_token_id": i for name, i in self.special_tokens.items() if name != "unk"},
            "attention_bias": False,
            "hidden_act": "silu",
            "mlp_bias": False,
            "tie_word_embeddings": all(t.name != "output.weight" for t in self._reader.tensors),
            "torch_dtype": "bfloat16",
        }

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor with its Hugging Face name, in bf16, one at a time in the order of the file.

        Raises:
            CheckpointError: a tensor, or its storage type, that isn't known.
        """
        for tensor in self._reader.tensors:
            name = _hf_name(tensor.name)
            if name is None:
                raise CheckpointError(f"{self._path}: tensor {tensor.name} has no place in LlamaForCausalLM.")
            try:
                values: npt.NDArray[np.float32] = gguf.dequantize(tensor.data, tensor.tensor_type)
            except NotImplementedError as e:
                raise CheckpointError(f"{self._path}: tensor {tensor.name}: {e}") from e
            for suffix, heads in _PERMUTED.items():
                if name.endswith(suffix):
                    values = undo_rope_permutation(values, int(str(self.config[heads])))
            yield name, torch.tensor(values).to(torch.bfloat16)

    def tokenizer(self) -> Tokenizer:
        """Byte-level BPE with the model's own splits: every digit alone, then the GPT-2 pattern.

        Raises:
            CheckpointError: a token type or merge that isn't known.
        """
        merges = [tuple(merge.split(" ")) for merge in self._get("tokenizer.ggml.merges", list)]
        vocab = {token: i for i, token in enumerate(self._tokens)}
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        tokenizer.decoder = decoders.ByteLevel()
        types = self._get("tokenizer.ggml.token_type", list)
        unknown = sorted(set(types) - {_NORMAL_TOKEN, _CONTROL_TOKEN})
        if unknown:
            raise CheckpointError(f"{self._path}: token types {unknown} are not supported.")
        control = [token for token, kind in zip(self._tokens, types, strict=True) if kind == _CONTROL_TOKEN]
        tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
        return tokenizer

    def tokenizer_config(self) -> dict[str, object]:
        """The content of ``tokenizer_config.json``, without the chat template."""
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **{f"{name}_token": self._tokens[i] for name, i in self.special_tokens.items()},
            "clean_up_tokenization_spaces": False,
            "model_max_length": self.config["max_position_embeddings"],
        }

    def chat_template(self) -> str:
        return self._get("tokenizer.chat_template", str)


def convert_gguf(path: Path, output: Path) -> None:
    """Write a llama GGUF as a bf16 Hugging Face checkpoint, with a progress bar on a terminal.

    The whole checkpoint is held in memory once.

    Args:
        path: the GGUF file.
        output: folder to create.

    Raises:
        CheckpointError: see :class:`GgufLlama`.
        OSError: ``output`` exists or can't be written.
    """
    model = GgufLlama(path)
    output.mkdir(parents=True)
    eos_and_others = {k: v for k, v in model.config.items() if k.endswith("_token_id")}
    for name, content in {
        "config.json": model.config,
        "generation_config.json": eos_and_others,
        "tokenizer_config.json": model.tokenizer_config(),
    }.items():
        (output / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    (output / "chat_template.jinja").write_text(model.chat_template(), encoding="utf-8")
    (output / "tokenizer.json").write_text(model.tokenizer().to_str(), encoding="utf-8")
    bar = tqdm(model.tensors(), total=model.num_tensors, desc="Converting", unit="tensor", disable=None)
    weights = output / "model.safetensors"
    weights.touch()
    mode = weights.stat().st_mode
    try:
        save_file(dict(bar), weights, metadata={"format": "pt"})
    except SafetensorError as e:  # how safetensors reports that the disk is full
        raise OSError(f"{weights}: {e}") from e
    weights.chmod(mode)  # safetensors makes files that only their owner can read
