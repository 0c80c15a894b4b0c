"""What a checkpoint folder says about its model, read once and checked before any weight is read."""

from __future__ import annotations

import json
import logging
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig

from sglang.srt.errors import ArgumentError, CheckpointError
from sglang.srt.models.registry import SUPPORTED_ARCHITECTURES
from sglang.srt.platforms import resolve_device
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.hub import CODE_PATTERNS, CONFIG_PATTERNS, WEIGHT_PATTERNS, resolve_folder

logger = logging.getLogger(__name__)

_DTYPES = {
    "half": torch.float16,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float": torch.float32,
    "float32": torch.float32,
}

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")

# A configuration without one of these gets an arbitrary default from transformers; all exporters write them.
_REQUIRED = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size")

# Key of config.json or of its rope parameters -> the values that the models compute. Any other value would be
# computed wrong, so it is refused. A missing key is fine.
_UNDERSTOOD: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "partial_rotary_factor": (None, 1.0),
}

# Keys of generation_config.json that SGLang takes as defaults.
_RECOMMENDED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model to run.

    Attributes:
        model_path: local folder of the checkpoint.
        hf_config: transformers' configuration; ``rope_parameters`` is normalised, ``quantization_config`` removed.
        architecture: one of ``SUPPORTED_ARCHITECTURES``.
        dtype: of activations and unquantised weights.
        context_len: most tokens of one sequence, prompt and output together.
        eos_token_ids: tokens that end an output (``config.json`` and ``generation_config.json`` together).
        quantization_config, hf_quant_config: the JSON objects as written (the ``config.json`` entry, and ModelOpt's
            ``hf_quant_config.json``); None where there is none.
        sampling_defaults: what ``generation_config.json`` recommends, by SGLang's names; not checked.
    """

    model_path: str
    hf_config: PreTrainedConfig
    architecture: str
    dtype: torch.dtype
    context_len: int
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    eos_token_ids: frozenset[int]
    quantization_config: dict[str, Any] | None
    hf_quant_config: dict[str, Any] | None
    sampling_defaults: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_server_args(cls, server_args: ServerArgs) -> ModelConfig:
        """Find the checkpoint of ``--model-path`` (downloading it from the hub if needed) and read its configuration.

        Raises:
            CheckpointError: no such checkpoint, or its configuration is unreadable, contradictory or not supported.
            ArgumentError: ``--context-length`` is more than the model can do, or ``--tp-size`` can't share it.
        """
        patterns = list(CONFIG_PATTERNS)
        patterns += WEIGHT_PATTERNS if server_args.load_format != "dummy" else ()
        patterns += CODE_PATTERNS if server_args.trust_remote_code else ()
        folder = resolve_folder(server_args.model_path, server_args.revision, patterns)
        config = cls.from_folder(
            folder,
            dtype=server_args.dtype,
            context_length=server_args.context_length,
            trust_remote_code=server_args.trust_remote_code,
        )
        config.check_tp_size(server_args.tp_size)
        quantized = server_args.quantization or config.quantization_config or config.hf_quant_config
        if server_args.dtype == "auto" and quantized and resolve_device(server_args.device).type == "cpu":
            # Products are in float32 there anyway, and rounding between them would only make a request's result
            # depend on what it is batched with.
            return replace(config, dtype=torch.float32)
        return config

    @classmethod
    def from_folder(
        cls,
        folder: Path,
        *,
        dtype: str = "auto",
        context_length: int | None = None,
        trust_remote_code: bool = False,
    ) -> ModelConfig:
        """Read a checkpoint folder's configuration; arguments and errors as in :meth:`from_server_args`."""
        config_file = folder / "config.json"
        raw = _read_json(config_file)
        if raw is None:
            raise CheckpointError(f"{folder} has no config.json; give the folder of a Hugging Face checkpoint")
        architecture = _architecture(raw, config_file)
        _refuse_unknown_features(raw, config_file)
        quantization_config = _object(raw, "quantization_config", config_file)
        hf_config = _transformers_config(folder, trust_remote_code)
        heads = _size(hf_config, "num_attention_heads", config_file)
        hidden = _size(hf_config, "hidden_size", config_file)
        kv_heads = _size(hf_config, "num_key_value_heads", config_file, default=heads)
        if heads % kv_heads:
            raise CheckpointError(
                f"{config_file}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
            )
        if getattr(hf_config, "head_dim", None) is None and hidden % heads:
            raise CheckpointError(
                f"{config_file}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}, "
                "and there is no head_dim"
            )
        generation = _read_json(folder / "generation_config.json") or {}
        return cls(
            model_path=str(folder),
            hf_config=hf_config,
            architecture=architecture,
            dtype=_dtype(dtype, raw, config_file),
            context_len=_context_len(context_length, hf_config, raw, config_file),
            vocab_size=_size(hf_config, "vocab_size", config_file),
            hidden_size=hidden,
            num_hidden_layers=_size(hf_config, "num_hidden_layers", config_file),
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=_size(hf_config, "head_dim", config_file, default=hidden // heads),
            eos_token_ids=_token_ids(raw, config_file) | _token_ids(generation, folder / "generation_config.json"),
            quantization_config=quantization_config,
            hf_quant_config=_read_json(folder / "hf_quant_config.json"),
            sampling_defaults={name: generation[name] for name in _RECOMMENDED if generation.get(name) is not None},
        )

    def check_tp_size(self, size: int) -> None:
        """Raise ArgumentError unless ``size`` ranks can share the model's heads and MLP."""
        config_file = Path(self.model_path) / "config.json"
        for key, value in (
            ("num_attention_heads", self.num_attention_heads),
            ("intermediate_size", _size(self.hf_config, "intermediate_size", config_file)),
        ):
            if value % size:
                raise ArgumentError(
                    f"--tp-size {size}: the model's {key} {value} can't be divided by {size}; use a divisor of it"
                )
        # Of fewer KV heads than ranks, each is held by several ranks.
        kv_heads = self.num_key_value_heads
        if kv_heads % size and size % kv_heads:
            raise ArgumentError(
                f"--tp-size {size}: the model's num_key_value_heads {kv_heads} is neither a multiple nor a divisor of "
                f"{size}"
            )


def _read_json(file: Path) -> dict[str, Any] | None:
    """The JSON object in ``file``; None if there is no such file."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{file} is not valid JSON (line {error.lineno}: {error.msg})") from None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file} can't be read: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} must hold a JSON object, not {type(value).__name__}")
    return value


def _object(raw: Mapping[str, Any], key: str, file: Path) -> dict[str, Any] | None:
    value = raw.get(key)
    if value is not None and not isinstance(value, dict):
        raise CheckpointError(f"{file}: {key} must be an object, not {value!r}")
    return value


def _architecture(raw: Mapping[str, Any], file: Path) -> str:
    names = raw.get("architectures")
    supported = ", ".join(SUPPORTED_ARCHITECTURES)
    if not names or not isinstance(names, list):
        raise CheckpointError(f"{file} names no architecture (key architectures); supported: {supported}")
    for name in names:
        if name in SUPPORTED_ARCHITECTURES:
            return str(name)
    raise CheckpointError(f"{file}: architecture {', '.join(map(str, names))} is not supported; supported: {supported}")


def _refuse_unknown_features(raw: Mapping[str, Any], file: Path) -> None:
    for key in _REQUIRED:
        if key not in raw:
            raise CheckpointError(f"{file} has no {key}")
    rope = _rope(raw, file)
    for source in (raw, rope):
        for key, understood in _UNDERSTOOD.items():
            if key in source and source[key] not in understood:
                raise CheckpointError(f"{file}: {key} {source[key]!r} is not supported (expected {understood[-1]!r})")
    if any(isinstance(value, dict) for value in rope.values()):
        raise CheckpointError(f"{file}: rope parameters that differ between layers are not supported")
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type not in ROPE_TYPES:
        raise CheckpointError(f"{file}: rope type {rope_type!r} is not supported; supported: {', '.join(ROPE_TYPES)}")


def _rope(raw: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """The rope parameters as written; of both spellings ``rope_scaling`` counts, as in transformers. Empty for none."""
    return _object(raw, "rope_scaling", file) or _object(raw, "rope_parameters", file) or {}


def _transformers_config(folder: Path, trust_remote_code: bool) -> PreTrainedConfig:
    try:
        config = AutoConfig.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
    except Exception as error:  # transformers raises whatever the configuration's own code raises
        reason = str(error).replace("the argument `trust_remote_code=True`", "--trust-remote-code")
        reason = textwrap.shorten(reason or type(error).__name__, 500, placeholder=" ...")
        raise CheckpointError(f"{folder / 'config.json'} can't be read by transformers: {reason}") from error
    # The quantisation is ours to read; transformers must not act on it.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return config


def _size(config: PreTrainedConfig, key: str, file: Path, default: int | None = None) -> int:
    value = getattr(config, key, None)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(f"{file}: {key} must be a positive integer, not {value!r}")
    return value


def _dtype(requested: str, raw: Mapping[str, Any], file: Path) -> torch.dtype:
    name = raw.get("dtype")
    if name is None:  # as much as no entry
        name = raw.get("torch_dtype")
    stored = _DTYPES.get(str(name)) if name is not None else torch.float32
    if stored is None:
        raise CheckpointError(f"{file}: dtype {name!r} is not supported; give one with --dtype")
    if requested == "auto":
        if stored is torch.float32:
            logger.info("The checkpoint's dtype is float32; running in float16. Choose another one with --dtype.")
            return torch.float16
        return stored
    chosen = _DTYPES[requested]
    if chosen is not stored:
        logger.info("Casting %s to %s.", stored, chosen)
    return chosen


def _context_len(requested: int | None, config: PreTrainedConfig, raw: Mapping[str, Any], file: Path) -> int:
    limit = _size(config, "max_position_embeddings", file)
    rope = _rope(raw, file)
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    # A configuration that also gives the original length has the extended one in max_position_embeddings.
    if rope_type in ("linear", "dynamic", "yarn") and "original_max_position_embeddings" not in rope:
        factor = rope.get("factor", 1)
        if not isinstance(factor, int | float) or factor < 1:
            raise CheckpointError(f"{file}: rope factor must be a number of at least 1, not {factor!r}")
        limit = int(limit * factor)
    if requested is None:
        return limit
    if requested > limit:
        raise ArgumentError(
            f"--context-length {requested} is more than {limit}, which the model's configuration allows; use at most "
            f"{limit}, or extend the model by rope scaling in {file}"
        )
    return requested


def _token_ids(source: Mapping[str, Any], file: Path) -> frozenset[int]:
    value = source.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(not isinstance(token, int) or isinstance(token, bool) for token in ids):
        raise CheckpointError(f"{file}: eos_token_id must be a token id or a list of them, not {value!r}")
    return frozenset(ids)
