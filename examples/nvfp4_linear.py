"""One NVFP4 linear layer from raw tensors, without a server.

python examples/nvfp4_linear.py

The calls are SGLang's: a config gives a method, the method creates parameters on any module, you fill them from
wherever your tensors are, and ``apply`` multiplies with the best backend that this machine has.
"""

import torch
from torch import nn

from sglang.srt.layers.quantization.fp4_utils import Target, resolve_fp4_gemm_backend
from sglang.srt.layers.quantization.modelopt_quant import ModelOptFp4Config, ModelOptFp4LinearMethod
from sglang.srt.layers.quantization.nvfp4_utils import dequantize_nvfp4
from sglang.srt.layers.quantization.nvfp4_weight import global_scale_from_amax, quantize_nvfp4_weight


def main() -> None:
    n, k, tokens = 1000, 4096, 8
    torch.manual_seed(0)
    weight, x = torch.randn(n, k) * 0.02, torch.randn(tokens, k).bfloat16()

    # What a ModelOpt checkpoint stores for this layer. input_scale comes from calibration; here from x itself.
    weight_scale_2 = global_scale_from_amax(float(weight.abs().max()))
    packed, weight_scale = quantize_nvfp4_weight(weight, weight_scale_2)
    input_scale = global_scale_from_amax(float(x.abs().max()))

    layer = nn.Module()
    method = ModelOptFp4LinearMethod(ModelOptFp4Config("NVFP4"))
    method.create_weights(layer, k, [n], k, n, params_dtype=torch.bfloat16)
    layer.weight.data.copy_(packed)
    layer.weight_scale.data.copy_(weight_scale)
    layer.weight_scale_2.data.fill_(weight_scale_2)
    layer.input_scale.data.fill_(input_scale)
    method.process_weights_after_loading(layer)
    y = method.apply(layer, x)

    exact = x.float() @ dequantize_nvfp4(packed, weight_scale, weight_scale_2).T
    error = ((y.float() - exact).norm() / exact.norm()).item()
    print(resolve_fp4_gemm_backend("auto", None, Target.current(x.device)))
    print(f"y {list(y.shape)} {y.dtype}; quantising x to 4 bits moved it by {100 * error:.1f} %")


if __name__ == "__main__":
    main()
