"""compressed-tensors checkpoints (llm-compressor's format)."""

from sglang.srt.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig

__all__ = ["CompressedTensorsConfig"]
