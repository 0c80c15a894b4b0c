"""Flags and values that SGLang (or vLLM) has and this server has not: refused by name, never ignored."""

_NOT_YET = "is not in this version yet"
_NOT_SUPPORTED = "is not supported by this version"


def _say(text: str, values: str) -> dict[str, str]:
    return dict.fromkeys(values.split(), text)


# Field -> value -> what is said about it.
REFUSED_VALUES: dict[str, dict[str, str]] = {
    "attention_backend": _say(
        _NOT_YET,
        "aiter ascend cutlass_mla dsa dual_chunk_flash_attn fa3 fa4 flashinfer flashmla flex_attention intel_amx nsa "
        "triton trtllm_mha trtllm_mla wave",
    ),
    "device": _say(_NOT_SUPPORTED, "hpu mps musa npu xpu"),
    "kv_cache_dtype": _say(_NOT_SUPPORTED, "fp4_e2m1 fp8_e5m2"),
    "load_format": _say(
        _NOT_SUPPORTED,
        "bitsandbytes fastsafetensors flash_rl gguf layered npcache private pt remote remote_instance runai_streamer "
        "sharded_state",
    ),
    "quantization": _say(
        _NOT_SUPPORTED,
        "auto-round awq awq_marlin bitsandbytes fp8 gguf gptq gptq_marlin marlin modelopt_fp8 modelslim moe_wna16 "
        "mxfp4 mxfp8 petit_nvfp4 qoq quark_int4fp8_moe w4afp8 w8a8_fp8 w8a8_int8",
    ),
}

# Flags that have another name here: retired in SGLang, or vLLM's.
REPLACED_FLAGS: dict[str, str] = {
    "--disable-flashinfer": "--attention-backend",
    "--disable-piecewise-cuda-graph": "--cuda-graph-backend-prefill",
    "--fp4-gemm-runner-backend": "--fp4-gemm-backend",
    "--block-size": "--page-size",
    "--gpu-memory-utilization": "--mem-fraction-static",
    "--max-model-len": "--context-length",
    "--max-num-batched-tokens": "--chunked-prefill-size",
    "--max-num-seqs": "--max-running-requests",
    "--no-enable-prefix-caching": "--disable-radix-cache",
    "--seed": "--random-seed",
    "--tokenizer": "--tokenizer-path",
}

# Beginnings of SGLang's flags of whole features.
UPSTREAM_FAMILIES: tuple[str, ...] = tuple(
    f"--{name}-"
    for name in (
        "bucket",
        "debug-tensor-dump",
        "deepep",
        "disaggregation",
        "dllm",
        "dsa",
        "encoder",
        "eplb",
        "expert-distribution",
        "hicache",
        "kt",
        "lora",
        "mamba",
        "modelopt",
        "nsa",
        "offload",
        "piecewise-cuda-graph",
        "prefill-delayer",
        "speculative",
        "tokenizer-metrics",
        "triton-attention",
    )
)

_NAMES = """
admin-api-key allow-auto-truncate api-key attention-context-parallel-size attn-cp-size base-gpu-id chat-template
collect-tokens-histogram completion-template config constrained-json-disable-any-whitespace
constrained-json-whitespace-pattern cpu-offload-gb crash-dump-folder
cuda-graph-backend-decode cuda-graph-bs cuda-graph-max-bs data-parallel-size decode-attention-backend
decode-log-interval delete-ckpt-after-loading disable-chunked-prefix-cache disable-cuda-graph
disable-cuda-graph-padding disable-custom-all-reduce disable-fast-image-processor disable-flashinfer-autotune
disable-hybrid-swa-memory disable-outlines-disk-cache disable-overlap-schedule
disable-shared-experts-fusion disable-tokenizer-batch-decode dist-init-addr dist-timeout download-dir dp dp-size
elastic-ep-backend enable-cache-report enable-custom-logit-processor enable-deterministic-inference
enable-dp-attention enable-dp-lm-head enable-dynamic-batch-tokenizer enable-dynamic-chunking enable-eplb
enable-flashinfer-allreduce-fusion enable-fp32-lm-head enable-hierarchical-cache enable-layerwise-nvtx-marker
enable-lmcache enable-lora enable-memory-saver enable-metrics enable-mixed-chunk enable-mscclpp enable-multimodal
enable-nan-detection enable-nccl-nvls enable-p2p-check enable-priority-scheduling enable-profile-cuda-graph
enable-request-time-stats-logging enable-return-hidden-states enable-single-batch-overlap enable-symm-mem
enable-tokenizer-batch-encode enable-torch-compile enable-torch-symm-mem enable-trace enable-two-batch-overlap
enable-weights-cpu-backup ep ep-dispatch-algorithm ep-num-redundant-experts ep-size expert-parallel-size
export-metrics-to-file fastapi-root-path file-storage-path fp8-gemm-backend gpu-id-step grammar-backend grpc-mode
hf-chat-template-name incremental-streaming-output init-expert-location is-embedding json-model-override-args
keep-mm-feature-on-device kv-events-config language-only load-balance-method log-level-http log-requests
log-requests-format log-requests-level log-requests-target max-loaded-loras max-lora-rank max-loras-per-batch
max-mamba-cache-size max-prefill-tokens max-queued-requests mm-attention-backend model-checksum model-impl
model-loader-extra-config moe-a2a-backend moe-data-parallel-size moe-dense-tp-size moe-dp-size moe-runner-backend
nccl-init-addr nccl-port nnodes node-rank num-continuous-decode-steps num-reserved-decode-tokens numa-node
otlp-traces-endpoint pipeline-parallel-size pp-max-micro-batch-size pp-size preferred-sampling-params
prefill-attention-backend prefill-max-requests priority-scheduling-preemption-threshold quantization-param-path
quantize-and-serve radix-eviction-policy reasoning-parser sampling-backend sampling-defaults
schedule-conservativeness schedule-low-priority-values-first schedule-policy scheduler-recv-interval show-time-cost
skip-tokenizer-init sleep-on-idle soft-watchdog-timeout stream-interval swa-full-tokens-ratio tokenizer-mode
tokenizer-worker-num tool-call-parser tool-server torch-compile-max-bs torchao-config
uvicorn-access-log-exclude-prefixes warmups watchdog-timeout weight-version
"""
UPSTREAM_FLAGS: frozenset[str] = frozenset(f"--{name}" for name in _NAMES.split())


def is_upstream_flag(flag: str) -> bool:
    """Whether SGLang has ``flag`` (``--with-dashes``) as far as this table knows."""
    return flag in UPSTREAM_FLAGS or flag.startswith(UPSTREAM_FAMILIES)
