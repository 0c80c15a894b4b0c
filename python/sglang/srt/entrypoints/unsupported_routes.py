"""SGLang's routes that this server has not: answered with HTTP 501 and words."""

# What is said of them -> the routes.
_ROUTES: dict[str, str] = {
    "it serves models that generate text, nothing else": (
        "/v1/embeddings /v1/classify /v1/rerank /v1/score /v1/decisions /v1/audio/transcriptions /classify /encode"
    ),
    "use /v1/chat/completions": (
        "/v1/responses /v1/responses/{response_id} /v1/responses/{response_id}/cancel /v1/messages "
        "/v1/messages/count_tokens /v1/systemone /invocations /api/chat /api/generate"
    ),
    "/v1/chat/completions tells tool calls and thoughts apart": "/parse_function_call /separate_reasoning",
    "use /v1/models": "/api/tags /api/show",
    "use /generate": "/vertex_generate",
    "it has no LoRA adapters": "/load_lora_adapter /load_lora_adapter_from_tensors /unload_lora_adapter",
    "attach a profiler (py-spy, Nsight Systems) to its process": "/start_profile /stop_profile",
    "it writes no traces": "/set_trace_level",
    "use /update_weights_from_disk": (
        "/update_weights_from_tensor /update_weights_from_distributed /update_weights_from_ipc "
        "/init_weights_update_group /destroy_weights_update_group /begin_weight_update /end_weight_update "
        "/update_weight_version "
        "/init_weights_send_group_for_remote_instance /send_weights_to_remote_instance "
        "/get_remote_instance_transfer_engine_info /remote_instance_transfer_engine_info"
    ),
    "it keeps its weights and its KV cache in memory until it ends": (
        "/release_memory_occupation /resume_memory_occupation"
    ),
    "its weights can't be read": "/get_weights_by_name /weights_checker",
    "requests run as they come; /abort_request ends them": "/pause_generation /continue_generation /slow_down",
    "its arguments are fixed at the start": "/set_internal_state /configure_logging /freeze_gc /pd_role_switch",
    "it has no sessions": "/open_session /close_session",
    "it has no experts": (
        "/start_expert_distribution_record /stop_expert_distribution_record /dump_expert_distribution_record"
    ),
    "its prefix cache is in the device's memory only": (
        "/hicache/storage-backend /hicache/storage-backend/clear /get_hicache_l3_cache_layout"
    ),
    "it has no speculative decoding": "/add_external_corpus /remove_external_corpus /list_external_corpora",
}

UNSUPPORTED_ROUTES: dict[str, str] = {path: words for words, paths in _ROUTES.items() for path in paths.split()}
