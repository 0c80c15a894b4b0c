"""Deliberate faults in how a layer becomes a FlashInfer call: one textual substitution each."""

from typing import NamedTuple

QUANTIZATION = "python/sglang/srt/layers/quantization/"
BACKEND = QUANTIZATION + "fp4_backends/flashinfer.py"
OPS = QUANTIZATION + "flashinfer_ops.py"
LINEAR = QUANTIZATION + "nvfp4_linear.py"
LAYOUTS = QUANTIZATION + "nvfp4_utils.py"
REQUIREMENTS = QUANTIZATION + "flashinfer_requirements.py"


class Mutant(NamedTuple):
    """``old`` stands exactly once in ``file``. ``first`` names the tests most likely to notice, which are run
    before the others. For "w4a16" FlashInfer has to be 0.7."""

    fault: str
    file: str
    old: str
    new: str
    first: str = "dispatch"


_SHUFFLE = "packed, scale = shuffle_rows(packed), shuffle_rows(scale)"
_PREPARED = "packed.contiguous(), swizzle_scale(scale), source"
_LINEAR_SCALE = "torch.nn.functional.pad(scale, (0, 0, 0, -scale.shape[0] % 128))"
_QUANTIZE = "flashinfer.fp4_quantize(_compact(x), input_scale_inv.reshape(1))"
_MULTIPLY = "x_packed, packed.T, x_scale, scale.T, alpha, out_dtype=x.dtype, backend=kernel"

MUTANTS = (
    # ------------------------------------------------------------------------------------------- preparing a weight
    Mutant("weight scales not swizzled", BACKEND, _PREPARED, f"packed.contiguous(), {_LINEAR_SCALE}, source"),
    Mutant("weight scales in the 8x4 layout", BACKEND, _PREPARED, _PREPARED.replace("(scale)", "(scale, 8)")),
    Mutant("rows of scales not shuffled", BACKEND, _SHUFFLE, "packed = shuffle_rows(packed)"),
    Mutant("rows of codes not shuffled", BACKEND, _SHUFFLE, "scale = shuffle_rows(scale)"),
    Mutant("rows shuffled for every backend", BACKEND, "if self.shuffled:", "if True:"),
    Mutant("rows shuffled for none", BACKEND, "if self.shuffled:", "if False:"),
    Mutant("rows shuffled in the inverse order", LAYOUTS, "(lane % 8) * 4 + lane // 8]", "(lane % 4) * 8 + lane // 4]"),
    Mutant(
        "scale padding filled with ones", LAYOUTS, "padded = scale.new_zeros(", "padded = scale.new_ones(", "layouts"
    ),
    Mutant("scale rows not padded", BACKEND, _PREPARED, _PREPARED.replace("(scale)", "(scale)[: scale.shape[0]]")),
    Mutant(
        "nibble order swapped",
        BACKEND,
        _PREPARED,
        _PREPARED.replace("packed.contiguous()", "packed >> 4 | packed << 4"),
    ),
    Mutant("K padded to 32", BACKEND, "    in_multiple = 64\n", "    in_multiple = 32\n"),
    Mutant("N padded to 8", BACKEND, "    out_multiple = 64\n", "    out_multiple = 8\n"),
    Mutant("trtllm's N padded to 64", BACKEND, "    out_multiple = 128\n", "    out_multiple = 64\n"),
    # --------------------------------------------------------------------------------------------------------- scales
    Mutant("alpha without the input's scale", BACKEND, "(weight.global_scales * static)", "(weight.global_scales * 1)"),
    Mutant(
        "alpha divided by the input's scale",
        BACKEND,
        "(weight.global_scales * static)",
        "(weight.global_scales / static)",
    ),
    Mutant(
        "alpha without a dynamic input's scale",
        BACKEND,
        "(source.global_scales * input_scale)",
        "(source.global_scales * 1)",
    ),
    Mutant(
        "alpha of the first of unequal parts",
        LINEAR,
        "return same_input and (per_column_scale or scales[a] == scales[b])",
        "return same_input",
    ),
    Mutant(
        "input's scale not inverted",
        BACKEND,
        "weight.scale, input_scale_inv, alpha",
        "weight.scale, input_scale, alpha",
    ),
    Mutant("dynamic input's scale not inverted", LINEAR, "return scale, 1.0 / scale", "return scale, scale"),
    # -------------------------------------------------------------------------------------------------------- product
    Mutant(
        "columns of padding not cut off",
        LINEAR,
        "outputs.append(y[:, :size] if out_padding else y)",
        "outputs.append(y)",
    ),
    Mutant(
        "input not padded", LINEAR, "self.in_padding = -self.in_features % backend.in_multiple", "self.in_padding = 0"
    ),
    Mutant("weight not transposed", OPS, _MULTIPLY, _MULTIPLY.replace("packed.T", "packed")),
    Mutant("weight scales not transposed", OPS, _MULTIPLY, _MULTIPLY.replace("scale.T", "scale")),
    Mutant("fp16 written as bf16", OPS, _MULTIPLY, _MULTIPLY.replace("x.dtype", "torch.bfloat16")),
    Mutant("our name given for FlashInfer's", OPS, _MULTIPLY, _MULTIPLY.replace("=kernel", "=backend")),
    Mutant("FlashInfer left to choose", OPS, _MULTIPLY, _MULTIPLY.replace("=kernel", '="auto"')),
    Mutant("8x4 input scales announced", OPS, _MULTIPLY, _MULTIPLY + ", use_8x4_sf_layout=True"),
    Mutant("input scales in the 8x4 layout", OPS, _QUANTIZE, _QUANTIZE[:-1] + ", is_sf_8x4_layout=True)"),
    Mutant("input scales not swizzled", OPS, _QUANTIZE, _QUANTIZE[:-1] + ", is_sf_swizzled_layout=False)"),
    Mutant("input's scale announced as inverse", OPS, _QUANTIZE, _QUANTIZE[:-1] + ", is_global_scale_inversed=True)"),
    Mutant(
        "strides of a single row trusted",
        OPS,
        "return x if fits else x.clone(memory_format=torch.contiguous_format)",
        "return x.contiguous()",
    ),
    Mutant("M = 0 given to FlashInfer", OPS, "if rows == 0:  # no kernel takes it", "if rows < 0:"),
    Mutant("bias dropped", BACKEND, "return y if bias is None else y + bias", "return y"),
    Mutant(
        "bias added before scaling",
        BACKEND,
        "return y if bias is None else y + bias",
        "return y if bias is None else (y + bias * alpha).to(y.dtype)",
    ),
    # ----------------------------------------------------------------------------------------------- what is refused
    Mutant(
        "size of weight scales not checked", OPS, '_check("block scales of the weight",', "0 and _check(0,", "faults"
    ),
    Mutant("weight of another backend accepted", BACKEND, "weight.check_owner(self)", "pass"),
    Mutant("only RuntimeError explained", OPS, "except Exception as error:", "except RuntimeError as error:", "errors"),
    Mutant(
        "Hopper said to have FP4 kernels",
        BACKEND,
        "_EVERYWHERE = dict.fromkeys(((10, 0),",
        "_EVERYWHERE = dict.fromkeys(((9, 0), (10, 0),",
        "requirements",
    ),
    Mutant("trtllm said to write fp16", BACKEND, "bfloat16_only = (10,)", "bfloat16_only = ()", "requirements"),
    Mutant("cuDNN 9.10.1 accepted", BACKEND, 'else "9.10.2"', 'else "9.10.1"', "requirements"),
    Mutant("CUDA 12.8 accepted on SM120", REQUIREMENTS, '(12, 0): "12.9"', '(12, 0): "12.8"', "requirements"),
    Mutant("b12x accepted with CUDA 12.9", BACKEND, '"0.7.0") else "13.0"', '"0.7.0") else "12.9"', "requirements"),
    # -------------------------------------------------------------------------------------------------- weight-only
    Mutant(
        "weight-only: scales not swizzled",
        BACKEND,
        "(packed.contiguous(), swizzle_scale(scale), alpha)",
        f"(packed.contiguous(), {_LINEAR_SCALE}, alpha)",
        "w4a16",
    ),
    Mutant(
        "weight-only: no global scale",
        BACKEND,
        "alpha = weight.global_scales.reshape(1).clone()",
        "alpha = torch.ones(1)",
        "w4a16",
    ),
    Mutant("weight-only: bias dropped", BACKEND, "return y if bias is None else y + bias", "return y", "w4a16"),
    Mutant(
        "weight-only: older kernel on SM120",
        BACKEND,
        '(12, 0): ("0.7.1", "cute-dsl-native")',
        '(12, 0): ("0.7.1", "cute-dsl")',
        "w4a16",
    ),
    Mutant(
        "weight-only: any cuDNN accepted",
        BACKEND,
        'cudnn, frontend = "9.23.1" if',
        'cudnn, frontend = "9.10.2" if',
        "w4a16",
    ),
)
