"""Flags, values and request fields of SGLang (and flags of vLLM): what this server has not is refused by name, never
ignored."""

_NOT_YET = "is not in this version yet"
_NOT_SUPPORTED = "is not supported by this version"


def _say(text: str, values: str) -> dict[str, str]:
    return dict.fromkeys(values.split(), text)


# Field -> value -> what is said about it.
REFUSED_VALUES: dict[str, dict[str, str]] = {
    "attention_backend": _say(
        _NOT_YET,
        "aiter ascend cutlass_mla dsa dual_chunk_flash_attn fa3 fa4 flashmla flex_attention intel_amx nsa "
        "triton trtllm_mha trtllm_mla wave",
    ),
    "cuda_graph_backend_prefill": _say(_NOT_SUPPORTED, "full tc_piecewise"),
    "device": _say(_NOT_SUPPORTED, "hpu mps musa npu xpu"),
    "grammar_backend": _say(_NOT_SUPPORTED, "llguidance outlines"),
    "kv_cache_dtype": _say(_NOT_SUPPORTED, "fp4_e2m1 fp8_e5m2"),
    "load_format": _say(
        _NOT_SUPPORTED,
        "bitsandbytes fastsafetensors flash_rl gguf layered npcache private pt remote remote_instance runai_streamer "
        "sharded_state",
    ),
    "reasoning_parser": _say(
        _NOT_SUPPORTED,
        "auto deepseek-v3 deepseek-v31 deepseek-v4 gemma4 glm45 gpt-oss hunyuan inkling interns1 kimi kimi_k2 kimi_k3 "
        "mimo minimax minimax-append-think minimax-m3 nano_v3 nemotron_3 poolside_v1 step3 step3p5",
    ),
    "tool_call_parser": _say(
        _NOT_SUPPORTED,
        "apertus2509 auto cohere_command4 deepseekv3 deepseekv31 deepseekv32 deepseekv4 dots gemma4 gigachat3 "
        "gigachat35 glm glm45 glm47 gpt-oss hunyuan inkling interns1 kimi_k2 kimi_k3 lfm2 ling3 llama4 mimo minicpm5 "
        "minimax-m2 minimax-m3 muse poolside_v1 pythonic qwen3_coder spark25 step3 step3p5 trinity",
    ),
    "quantization": _say(
        _NOT_SUPPORTED,
        "auto-round awq awq_marlin bitsandbytes fp8 gguf gptq gptq_marlin marlin modelopt_fp8 modelslim moe_wna16 "
        "mxfp4 mxfp8 petit_nvfp4 qoq quark_int4fp8_moe w4afp8 w8a8_fp8 w8a8_int8",
    ),
}

# Flags that have another name here: retired in SGLang, or vLLM's.
REPLACED_FLAGS: dict[str, str] = {
    "--cuda-graph-bs-decode": "--cuda-graph-bs",
    "--cuda-graph-max-bs-decode": "--cuda-graph-max-bs",
    "--disable-decode-cuda-graph": "--disable-cuda-graph",
    "--disable-flashinfer": "--attention-backend",
    "--disable-piecewise-cuda-graph": "--cuda-graph-backend-prefill disabled",
    "--disable-prefill-cuda-graph": "--cuda-graph-backend-prefill disabled",
    "--enable-piecewise-cuda-graph": "--cuda-graph-backend-prefill breakable",
    "--piecewise-cuda-graph-max-tokens": "--cuda-graph-max-bs-prefill",
    "--piecewise-cuda-graph-tokens": "--cuda-graph-bs-prefill",
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

# Every other flag of SGLang 0.5.23 and, where it is still written in scripts, of versions before; the ones that this
# server takes are among them.
_NAMES = """
abort-on-priority-when-disabled admin-api-key allow-auto-truncate allowed-media-domains api-key asr-max-buffer-seconds
asr-max-concurrent-sessions attention-backend attention-context-parallel-size attention-data-parallel-size attn-cp-size
attn-dp-size base-gpu-id batch-notify-size bf16-gemm-backend boundary-reduction c128-page-size chat-template
checkpoint-engine-wait-weights-before-ready chunked-prefill-size collect-tokens-histogram completion-template config
constrained-json-disable-any-whitespace constrained-json-max-whitespace-cnt constrained-json-whitespace-pattern
context-bucket context-length cp-strategy cpu-offload-gb crash-dump-folder cuda-graph-backend-decode
cuda-graph-backend-prefill cuda-graph-bs cuda-graph-bs-decode cuda-graph-bs-prefill cuda-graph-config cuda-graph-max-bs
cuda-graph-max-bs-decode cuda-graph-max-bs-prefill cuda-graph-max-seq-len-prefill cuda-graph-prefill-max-context
custom-weight-loader data-parallel-size dcp-comm-backend dcp-replicate-q-proj dcp-size debug-cuda-graph
decode-attention-backend decode-context-parallel-size decode-log-interval decoupled-spec-bind-endpoint
decoupled-spec-connect-endpoints decoupled-spec-rank decoupled-spec-role decrypted-config-file
decrypted-draft-config-file default-chat-template-kwargs default-priority-value delete-ckpt-after-loading
detokenizer-worker-num device disable-aiter-allreduce-fusion-in-decode disable-aiter-allreduce-fusion-in-prefill
disable-attn-tp-gather disable-chunked-prefix-cache disable-cuda-graph disable-cuda-graph-padding
disable-custom-all-reduce disable-decode-cuda-graph disable-fast-image-processor disable-flashinfer-autotune
disable-flashinfer-cutlass-moe-fp4-allgather disable-hybrid-swa-memory disable-outlines-disk-cache
disable-overlap-schedule disable-prefill-cuda-graph disable-priority-preemption disable-radix-cache
disable-shared-experts-fusion disable-tokenizer-batch-decode dist-init-addr dist-timeout download-dir dp dp-size
dsv4-attn-backend dsv4-prefill-backend dtype dwdp-size dynamic-batch-tokenizer-batch-size
dynamic-batch-tokenizer-batch-timeout elastic-ep-backend elastic-ep-initial-size elastic-ep-join-mode
elastic-ep-join-rank-offset elastic-ep-scale-timeout enable-adaptive-dispatch-to-encoder enable-aiter-allreduce-fusion
enable-amd-monokernel enable-attn-tp-input-scattered enable-broadcast-mm-inputs-process enable-cache-report
enable-cp-decode-attn-tp enable-cudagraph-gc enable-custom-logit-processor enable-decoder-swa-bounded-replay
enable-deepseek-v4-fp4-indexer enable-dense-mlp-attn-tp enable-deterministic-inference enable-dp-attention
enable-dp-attention-local-control-broadcast enable-dp-lm-head enable-draft-weights-cpu-backup
enable-dsa-cache-layer-split enable-dsa-fused-indexer enable-dynamic-batch-tokenizer enable-dynamic-chunking
enable-elastic-expert-backup enable-encoder-swa-bounded-replay enable-eplb enable-flashinfer-allreduce-fusion
enable-flexkv enable-forward-pass-metrics enable-fp32-lm-head enable-fused-moe-sum-all-reduce enable-fused-qk-norm-rope
enable-hicache enable-hierarchical-cache enable-hisparse enable-http-worker-reuseport enable-http2
enable-int8-mamba-checkpoint enable-kv-cache-sharding enable-layernorm-sp enable-layerwise-nvtx-marker
enable-lean-attention enable-linear-replayssm enable-linear-replayssm-spec enable-linker-mla-dedup enable-lmcache
enable-lora enable-lora-overlap-loading enable-mamba-cache-stochastic-rounding enable-megamoe-for-layernorm-sp
enable-memory-saver enable-metrics enable-metrics-for-all-schedulers enable-mfu-metrics enable-mis enable-mixed-chunk
enable-mm-global-cache enable-mscclpp enable-multi-layer-eagle enable-multimodal enable-nan-detection enable-nccl-nvls
enable-nvidia-megakernel enable-p2p-check enable-page-major-kv-layout enable-paged-experts enable-pd-role-switch
enable-pdmux enable-precise-embedding-interpolation enable-prefill-cp enable-prefill-delayer enable-prefix-mm-cache
enable-priority-scheduling enable-profile-cuda-graph enable-quant-communications enable-request-time-stats-logging
enable-response-store enable-return-aux-hidden-states enable-return-hidden-states enable-return-indexer-topk
enable-return-routed-experts enable-scattered-sconv enable-session-radix-cache enable-shared-experts-attn-tp
enable-single-batch-overlap enable-ssl-refresh enable-streaming-session enable-strict-thinking enable-symm-mem
enable-tf32-matmul enable-tokenizer-batch-encode enable-torch-compile enable-torch-compile-debug-mode
enable-torch-symm-mem enable-tp-lm-head-all-to-all enable-trace enable-two-batch-overlap
enable-unified-cache-external-linker enable-unified-memory enable-w4a4-mxfp4-megamoe enable-waterfill enable-watermark
enable-weights-cpu-backup enforce-disable-flashinfer-allreduce-fusion enforce-shared-experts-fusion
engine-info-bootstrap-port ep ep-dispatch-algorithm ep-num-redundant-experts ep-size expert-balancedness-report-mode
expert-parallel-size experts-shared-outer-loras export-metrics-to-file export-metrics-to-file-dir extra-metric-labels
fastapi-root-path file-storage-path flashinfer-a2a-dispatch-type flashinfer-allreduce-fusion-backend
flashinfer-autotune-skip-ops flashinfer-mla-disable-ragged flashinfer-mxfp4-moe-precision flexkv-config-file
forward-hooks forward-pass-metrics-ipc-name forward-pass-metrics-worker-id fp4-gemm-backend fp8-gemm-backend fuseep-mode
gated-launch-port gc-threshold gc-warning-threshold-secs generation-tokens-buckets gpu-id-step grammar-backend
grpc-http-sidecar-port grpc-mode grpc-port grpc-response-timeout-secs hf-chat-template-name
hierarchical-sparse-attention-extra-config hisparse-config host http2-initial-connection-window-size
http2-max-concurrent-streams image-processor-backend incremental-streaming-output init-expert-location
int8-mamba-ckpt-size is-embedding json-model-override-args keep-mm-feature-on-device kv-cache-dtype kv-canary
kv-canary-real-data kv-canary-sweep-interval kv-events-config language-model-only language-only
limit-mm-data-per-request linear-attn-backend linear-attn-decode-backend linear-attn-prefill-backend
linear-attn-verify-backend linear-replayssm-cache-len lmcache-config-file load-balance-method load-format
load-publish-endpoint load-snapshot-publish-interval log-level log-level-http log-requests log-requests-format
log-requests-level log-requests-target max-ep-size max-loaded-loras max-lora-chunk-size max-lora-rank
max-loras-per-batch max-mamba-cache-size max-prefill-tokens max-queued-requests max-running-requests max-total-tokens
media-url-max-file-size-mb mem-fraction-static min-free-slots-delay mlx-enable-sampling mm-attention-backend
mm-enable-dp-encoder mm-feature-transport mm-global-cache-backend mm-io-worker-num mm-preprocess-cache-size-mb
mm-process-config mm-processor-worker-num model model-checksum model-config-parser model-impl model-loader-extra-config
model-path modelexpress-config moe-a2a-backend moe-data-parallel-size moe-dense-tp-size moe-dp-size moe-runner-backend
monokernel-backend mooncake-ib-device msprobe-dump-config nccl-init-addr nccl-port nnodes node-rank
num-continuous-decode-steps num-reserved-decode-tokens numa-node optimistic-prefill-attempts otlp-service-name
otlp-traces-endpoint page-size paged-experts-num-resident pdmux-config-path pipeline-parallel-size ple-offload-backend
ple-offload-dir ple-offload-embedding port pp-async-batch-depth pp-max-micro-batch-size pp-size pre-warm-nccl
preferred-sampling-params prefill-attention-backend prefill-decode-interval prefill-decode-interval-min-bs
prefill-kv-cache-dequant-dtype prefill-max-requests prefill-only-disable-kv-cache
priority-scheduling-preemption-threshold prompt-tokens-buckets qsa-indexer-dtype quantization quantization-param-path
quantize-and-serve radix-cache-backend radix-eviction-policy radix-eviction-policy-config random-seed reasoning-parser
remote-instance-weight-loader-backend remote-instance-weight-loader-seed-instance-ip
remote-instance-weight-loader-seed-instance-service-port remote-instance-weight-loader-send-weights-group-ports
remote-instance-weight-loader-start-seed-via-transfer-engine retraction-policy return-aux-hidden-state-layer-ids
return-hidden-states-mode return-input-ids return-output-ids revision rl-on-policy-target rl-quant-profile
sampling-backend sampling-defaults sampling-mask-max-tokens schedule-conservativeness schedule-low-priority-values-first
schedule-policy scheduler-recv-interval served-model-name shared-experts-tp-size show-time-cost sidecar sidecar-args
skip-server-warmup skip-tokenizer-init sleep-on-idle sm-group-num smg-grpc-mode smg-http-sidecar-port
soft-watchdog-timeout spec-trace-dir ssl-ca-certs ssl-certfile ssl-keyfile ssl-keyfile-password startup-weight-load-mode
stream-interval stream-response-default-include-usage strip-thinking-cache swa-full-tokens-ratio swa-prefix-tails
tbo-token-distribution-threshold tensor-parallel-size tokenizer-backend tokenizer-mode tokenizer-path
tokenizer-worker-num tool-call-parser tool-server torch-compile-max-bs torchao-config tp-size trace-modules
trust-mm-content-hashes trust-remote-code trust-request-chat-template unified-cache-external-linker-backend
unified-cache-external-linker-config uno-lora-path use-ray uvicorn-access-log-exclude-prefixes warmups watchdog-timeout
watermark-config weight-cache-mode weight-cache-socket weight-cache-timeout weight-loader-disable-mmap
weight-loader-drop-cache-after-load weight-loader-prefetch-checkpoints weight-loader-prefetch-num-threads weight-version
"""
UPSTREAM_FLAGS: frozenset[str] = frozenset(f"--{name}" for name in _NAMES.split())

# The fields of SGLang 0.5.23's requests, by endpoint; "sampling_params" is an object in that of /generate.
_FIELDS = {
    "/generate": """
audio_data background bootstrap_host bootstrap_pair_key bootstrap_port bootstrap_room cache_salt conversation_id
custom_labels custom_logit_processor data_parallel_rank decode_tp_size disagg_prefill_dp_rank encoder_urls
external_trace_header extra_key http_worker_ipc image_data image_max_dynamic_patch images_config input_embeds
input_ids kv_hints log_metrics logprob_start_len lora_id lora_path max_dynamic_patch max_thinking_tokens
min_dynamic_patch mm_content_hashes mm_hashes mm_processor_kwargs modalities multi_item_delimiter_indices
need_wait_for_mm_inputs no_logs num_items_assigned positional_embed_overrides priority received_time require_reasoning
return_bytes return_entropy return_flat_raw_output_top_logprobs return_flat_raw_top_logprobs
return_flat_raw_top_logprobs_b64 return_hidden_states return_indexer_topk return_logprob return_prompt_token_ids
return_routed_experts return_sampling_mask return_text_in_logprobs rid routed_dp_rank routed_experts_start_len
routing_key sampling_logprobs_mode sampling_params session_id session_params stream text token_ids_logprob
token_indices_to_pool top_logprobs_num use_audio_in_video video_config video_data video_max_dynamic_patch watermark
""",
    "sampling_params": """
beam_width custom_params ebnf frequency_penalty ignore_eos json_schema logit_bias max_new_tokens min_new_tokens min_p
n no_stop_trim presence_penalty regex repetition_penalty sampling_seed skip_special_tokens
spaces_between_special_tokens stop stop_regex stop_token_ids stream_interval structural_tag temperature top_k top_p
watermark
""",
    "/v1/chat/completions": """
bootstrap_host bootstrap_port bootstrap_room cache_salt chat_template_kwargs continue_final_message
custom_logit_processor custom_params data_parallel_rank disagg_prefill_dp_rank ebnf extra_key frequency_penalty
ignore_eos images_config input_ids logit_bias logprobs lora_path max_completion_tokens max_dynamic_patch max_tokens
messages min_dynamic_patch min_p min_tokens mm_processor_kwargs model n no_stop_trim parallel_tool_calls
presence_penalty priority reasoning_effort regex repetition_penalty response_format return_cached_tokens_details
return_flat_raw_output_top_logprobs return_flat_raw_top_logprobs_b64 return_hidden_states return_input_ids_in_sglext
return_meta_info return_output_ids_in_sglext return_prompt_token_ids return_routed_experts return_sampling_mask
return_spec_tokens_details return_token_ids rid routed_dp_rank routed_experts_start_len sampling_logprobs_mode seed
separate_reasoning session_id session_params skip_special_tokens stop stop_regex stop_token_ids stream stream_options
stream_reasoning task temperature thinking tool_choice tools top_k top_logprobs top_p use_audio_in_video user
video_config watermark
""",
    "/v1/completions": """
best_of bootstrap_host bootstrap_port bootstrap_room cache_salt custom_labels custom_logit_processor custom_params
data_parallel_rank disagg_prefill_dp_rank ebnf echo extra_key frequency_penalty ignore_eos images_config json_schema
logit_bias logprobs lora_path max_tokens min_p min_tokens mm_processor_kwargs model n no_stop_trim presence_penalty
priority prompt regex repetition_penalty response_format return_cached_tokens_details return_hidden_states
return_routed_experts return_spec_tokens_details return_token_ids rid routed_dp_rank routed_experts_start_len seed
session_id session_params skip_special_tokens stop stop_regex stop_token_ids stream stream_options suffix temperature
top_k top_p user watermark
""",
}
UPSTREAM_FIELDS: dict[str, frozenset[str]] = {where: frozenset(names.split()) for where, names in _FIELDS.items()}


def is_upstream_flag(flag: str) -> bool:
    """Whether SGLang has ``flag`` (``--with-dashes``) as far as this table knows."""
    return flag in UPSTREAM_FLAGS or flag.startswith(UPSTREAM_FAMILIES)
