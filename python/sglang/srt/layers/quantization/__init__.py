"""Which quantisation a run uses: the checkpoint's own config and ``--quantization``, reconciled once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.errors import ArgumentError, CheckpointError

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.layers.quantization.base_config import QuantizationConfig
    from sglang.srt.server_args import ServerArgs

# Values of --quantization and what they mean for a checkpoint that is / is not quantised already.
QUANTIZATION_METHODS = {
    "modelopt": "a ModelOpt checkpoint, as its config says",
    "modelopt_fp4": "the same (SGLang's name for ModelOpt NVFP4)",
    "nvfp4": "W4A4: an NVFP4 checkpoint as it is; a bf16 checkpoint is quantised while it loads",
    "w4a16_nvfp4": "weight-only: activations are left alone; a bf16 checkpoint is quantised while it loads",
}


def get_quantization(model_config: ModelConfig, server_args: ServerArgs) -> QuantizationConfig | None:
    """The quantisation of this run; None: every layer in the model's dtype. Reads no weight.

    Raises:
        ArgumentError: ``--quantization`` contradicts the checkpoint.
        CheckpointError: the checkpoint's quantisation is not served.
    """
    from sglang.srt.layers.quantization.modelopt_quant import find_modelopt_config
    from sglang.srt.layers.quantization.nvfp4_online import OnlineNvFp4Config

    flag = server_args.quantization
    if flag is not None and flag not in QUANTIZATION_METHODS:
        raise ArgumentError(f"--quantization {flag!r} is unknown; valid: {', '.join(QUANTIZATION_METHODS)}")
    weight_only = flag == "w4a16_nvfp4"
    stored = model_config.quantization_config
    config = find_modelopt_config(model_config.hf_quant_config, stored, weight_only)
    if config is not None:
        if flag == "nvfp4" and config.quant_algo == "W4A16_NVFP4":
            raise ArgumentError(
                "--quantization nvfp4: the checkpoint is weight-only (W4A16_NVFP4) and has no activation scales; "
                "leave the flag out or use w4a16_nvfp4"
            )
        return config
    if stored is not None:
        raise CheckpointError(
            f"the checkpoint's quant_method {stored.get('quant_method')!r} is not served by this version; "
            "served are ModelOpt NVFP4 checkpoints and unquantised ones"
        )
    if flag is None:
        return None
    if flag.startswith("modelopt"):
        raise ArgumentError(
            f"--quantization {flag} says that the checkpoint is quantised already, but its config has no ModelOpt "
            "quantisation; to quantise a bf16 checkpoint while it loads use --quantization nvfp4 or w4a16_nvfp4"
        )
    return OnlineNvFp4Config(weight_only)
