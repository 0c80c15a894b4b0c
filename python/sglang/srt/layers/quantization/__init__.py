"""Which quantisation a run uses: the checkpoint's own config and ``--quantization``, reconciled once."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from sglang.srt.errors import ArgumentError, CheckpointError

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.layers.quantization.base_config import QuantizationConfig
    from sglang.srt.layers.quantization.compressed_tensors import CompressedTensorsConfig
    from sglang.srt.layers.quantization.modelopt_quant import ModelOptFp4Config
    from sglang.srt.server_args import ServerArgs

# Values of --quantization and what they mean for a checkpoint that is / is not quantised already.
QUANTIZATION_METHODS = {
    "modelopt": "a ModelOpt checkpoint, as its config says",
    "modelopt_fp4": "the same (SGLang's name for ModelOpt NVFP4)",
    "compressed-tensors": "a compressed-tensors checkpoint, as its config says",
    "nvfp4": "W4A4: an NVFP4 checkpoint as it is; a bf16 checkpoint is quantised while it loads",
    "w4a16_nvfp4": "weight-only: activations are left alone; a bf16 checkpoint is quantised while it loads",
}

# Those that say which tool wrote the checkpoint.
_CHECKPOINT_METHODS = {
    "modelopt": "ModelOpt",
    "modelopt_fp4": "ModelOpt",
    "compressed-tensors": "compressed-tensors",
}


def get_quantization(model_config: ModelConfig, server_args: ServerArgs) -> QuantizationConfig | None:
    """The quantisation of this run; None: every layer in the model's dtype. Reads no weight.

    Raises:
        ArgumentError: ``--quantization`` contradicts the checkpoint.
        CheckpointError: the checkpoint's quantisation is not served.
    """
    from sglang.srt.layers.quantization.compressed_tensors import CompressedTensorsConfig
    from sglang.srt.layers.quantization.modelopt_quant import find_modelopt_config
    from sglang.srt.layers.quantization.nvfp4_online import OnlineNvFp4Config

    flag = server_args.quantization
    if flag is not None and flag not in QUANTIZATION_METHODS:
        raise ArgumentError(f"--quantization {flag!r} is unknown; valid: {', '.join(QUANTIZATION_METHODS)}")
    weight_only = flag == "w4a16_nvfp4"
    stored = model_config.quantization_config
    method = None if stored is None else stored.get("quant_method")
    config: ModelOptFp4Config | CompressedTensorsConfig | None = find_modelopt_config(
        model_config.hf_quant_config, stored, weight_only
    )
    if config is None and stored is not None and method == "compressed-tensors":
        config = CompressedTensorsConfig.from_config(stored, weight_only)
    if config is not None:
        _check_flag(flag, config.get_name(), config.algorithms)
        return config
    if stored is not None:
        raise CheckpointError(
            f"the checkpoint's quant_method {method!r} is not served by this version; served are ModelOpt and "
            "compressed-tensors checkpoints with NVFP4 layers, and unquantised ones"
        )
    if flag is None:
        return None
    if flag in _CHECKPOINT_METHODS:
        raise ArgumentError(
            f"--quantization {flag} says that the checkpoint is quantised already, but its config has no "
            f"{_CHECKPOINT_METHODS[flag]} quantisation; to quantise a bf16 checkpoint while it loads use "
            "--quantization nvfp4 or w4a16_nvfp4"
        )
    return OnlineNvFp4Config(weight_only)


def _check_flag(flag: str | None, method: str, algorithms: Collection[str]) -> None:
    """Whether ``flag`` is what a checkpoint of this method (by its name in ``--quantization``), whose layers have these
    algorithms, can be served as."""
    kind = _CHECKPOINT_METHODS[method]
    if flag in _CHECKPOINT_METHODS and _CHECKPOINT_METHODS[flag] != kind:
        raise ArgumentError(
            f"--quantization {flag}: the checkpoint is a {kind} one; leave the flag out or use {method}"
        )
    nvfp4 = {algorithm for algorithm in algorithms if "NVFP4" in algorithm}
    if flag in ("nvfp4", "w4a16_nvfp4") and not nvfp4:
        raise ArgumentError(
            f"--quantization {flag}: the checkpoint is quantised but has no NVFP4 layer; leave the flag out"
        )
    if flag == "nvfp4" and nvfp4 == {"W4A16_NVFP4"}:
        raise ArgumentError(
            "--quantization nvfp4: the checkpoint is weight-only in its NVFP4 layers (W4A16_NVFP4), which have no "
            "activation scales; leave the flag out or use w4a16_nvfp4"
        )
