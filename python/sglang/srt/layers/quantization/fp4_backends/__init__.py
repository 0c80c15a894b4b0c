"""One file per NVFP4 GEMM backend; every module of this folder is imported by the registry."""
