"""What SGLang's own NVFP4 GEMM tests import from ``sglang.test``, so that their files run here unchanged."""
