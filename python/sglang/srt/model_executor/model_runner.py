"""The model on its device with its KV cache: computes steps and samples from them."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from sglang.kernels.cpu_extension import has_amx
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed import SINGLE, RankFailedError, TensorParallelGroup, check_same_on_all_ranks
from sglang.srt.errors import CheckpointError, StartupError
from sglang.srt.flag_combinations import check_device
from sglang.srt.layers.attention.attention_registry import create_attention_backend
from sglang.srt.layers.attention.base_attn_backend import AttentionTarget
from sglang.srt.layers.logits_processor import logprobs_of
from sglang.srt.layers.quantization import get_quantization
from sglang.srt.layers.quantization.fp4_autotune import MAX_ROWS, Autotuner
from sglang.srt.layers.quantization.fp4_utils import get_fp4_gemm_runner_backend
from sglang.srt.layers.quantization.nvfp4_linear import linears_of, warm_up_fp4_gemm
from sglang.srt.layers.sampler import sample_tokens
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.model_executor.cuda_graph_runner import DecodeGraphRunner, captured_sizes, why_no_graphs
from sglang.srt.model_executor.device_graph import capture_for
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, LogitsProcessorOutput
from sglang.srt.model_executor.memory_plan import GB, MemoryPlan, measure_graphs, measure_largest_steps, padding_pools
from sglang.srt.model_executor.prefill_cuda_graph_runner import (
    PrefillGraphRunner,
    captured_tokens,
    why_no_prefill_graphs,
)
from sglang.srt.model_loader.loader import load_model, module_names, weight_bytes
from sglang.srt.models.llama import LlamaForCausalLM
from sglang.srt.models.registry import get_model_class
from sglang.srt.platforms import available_memory, release_unused_memory, resolve_device, total_memory

if TYPE_CHECKING:
    from sglang.srt.layers.quantization.base_config import QuantizationConfig
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

KV_CACHE_DTYPES = {"fp8_e4m3": torch.float8_e4m3fn, "bf16": torch.bfloat16, "bfloat16": torch.bfloat16}

# The CPU's memory is shared with everything else that runs, so by default the KV cache takes at most this part of what
# is available once the weights are loaded, and no more than DEFAULT_MAX_RUNNING_REQUESTS sequences can use.
CPU_KV_FRACTION_OF_AVAILABLE = 0.25
DEFAULT_MAX_RUNNING_REQUESTS = {"cpu": 32, "cuda": 256}

# What the rest of the server took from the first checkpoint's configuration, so that a later one must agree. Everything
# else (MLP size, rope, quantisation, ...) only matters inside the model, which is built anew from its own.
FIXED_IN_UPDATES = (
    "architecture",
    "dtype",
    "vocab_size",
    "context_len",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "eos_token_ids",
)


class ModelRunner:
    """Builds the model, loads it and allocates its KV cache.

    Attributes:
        model: the loaded model.
        device, dtype: where and in what activations are computed.
        kv_cache_dtype: what keys and values are stored in.
        max_total_num_tokens: tokens that the KV cache holds, a multiple of ``page_size``.
        max_running_requests: rows of ``req_to_token_pool`` for requests.
        memory_plan: what there was for the KV cache.
        decode_graphs: what replays decode steps; None if nothing does, for the reason ``why_no_graphs``.
        prefill_graphs: what replays the other steps; None if nothing does, for ``why_no_prefill_graphs``.

    Raises:
        StartupError: a flag or the checkpoint can't be used, or there is too little memory; the text says what to do.
    """

    def __init__(self, server_args: ServerArgs, model_config: ModelConfig, tp: TensorParallelGroup = SINGLE) -> None:
        self.server_args = server_args
        self.model_config = model_config
        self.tp = tp
        self.device = resolve_device(server_args.device, tp.local_rank)
        check_device(server_args, self.device.type)
        self.dtype = model_config.dtype
        if self.device.type == "cpu" and server_args.dtype == "auto" and self.dtype == torch.float32 and has_amx():
            logger.info("This CPU has AMX: --dtype bfloat16 computes prompts 2 to 4 times as fast as float32.")
        self.page_size = server_args.page_size
        self.num_kv_heads = max(1, model_config.num_key_value_heads // tp.size)
        torch.manual_seed(server_args.random_seed or 0)
        quant_config = get_quantization(model_config, server_args)
        self.kv_cache_dtype = self._wanted_kv_cache_dtype(quant_config)
        self.attn_backend = create_attention_backend(server_args.attention_backend, self._attention_target())
        fp4_gemm = get_fp4_gemm_runner_backend().value
        check_same_on_all_ranks(tp, {"--attention-backend": self.attn_backend.name, "--fp4-gemm-backend": fp4_gemm})
        self.fp4_autotuner = Autotuner(server_args.fp4_gemm_autotune, self.device, self._most_rows(), tp)

        before = available_memory(self.device)
        started = time.perf_counter()
        logger.info("Load weight begin. avail mem=%.2f GB", before / GB)
        with self.fp4_autotuner.active(measure=True):
            self.model = self._build_model(model_config, quant_config, server_args.load_format)
        if self.device.type == "cuda":  # compile and load kernels before requests wait for them
            warm_up_fp4_gemm(linears_of(self.model), self.fp4_autotuner.rows, show_progress=tp.rank == 0)
        release_unused_memory(self.device)
        available = tp.minimum(available_memory(self.device))
        logger.info(
            "Load weight end. elapsed=%.2f s, type=%s, dtype=%s, avail mem=%.2f GB, mem usage=%.2f GB.",
            time.perf_counter() - started, model_config.architecture, self.dtype, available / GB,
            max(before - available, 0) / GB,
        )  # fmt: skip
        running = self._wanted_running_requests
        self.decode_graphs: DecodeGraphRunner | None = None
        self.prefill_graphs: PrefillGraphRunner | None = None
        self.why_no_graphs = why_no_graphs(server_args, self.attn_backend)
        if self.why_no_graphs is None:
            most = captured_sizes(server_args, running, pads=False)[-1]
            self.attn_backend.init_cuda_graph_state(most, model_config.context_len)
        else:
            logger.info("Decode steps are not recorded in graphs: %s", self.why_no_graphs)
        if self.device.type == "cuda" and (reason := self.why_no_prefill_graphs) is not None:
            logger.info("Prompts are not recorded in graphs: %s", reason)
        self.memory_plan = self._plan_memory(available, running)
        self._allocate(self.memory_plan, running)
        self._record_graphs()
        logger.info(
            "max_total_num_tokens=%d, chunked_prefill_size=%d, max_running_requests=%d, context_len=%d, "
            "available_%s_mem=%.2f GB",
            self.max_total_num_tokens, server_args.chunked_prefill_size, self.max_running_requests,
            model_config.context_len, self.device.type, available_memory(self.device) / GB,
        )  # fmt: skip

    def _attention_target(self) -> AttentionTarget:
        config, size = self.model_config, self.tp.size
        switches = get_model_class(config.architecture).switches
        return AttentionTarget(
            device=self.device,
            dtype=self.dtype,
            kv_cache_dtype=self.kv_cache_dtype,
            num_heads=config.num_attention_heads // size,
            num_kv_heads=self.num_kv_heads,
            head_dim=config.head_dim,
            page_size=self.page_size,
            sliding_windows=frozenset(switches.window(config.hf_config, i) for i in range(config.num_hidden_layers)),
        )

    def _most_rows(self) -> int:
        """The largest number of tokens in one step, as far as the flags say."""
        args = self.server_args
        chunk = args.chunked_prefill_size if args.chunked_prefill_size > 0 else MAX_ROWS
        return max(chunk, self._wanted_running_requests)

    @property
    def _wanted_running_requests(self) -> int:
        return self.server_args.max_running_requests or DEFAULT_MAX_RUNNING_REQUESTS[self.device.type]

    @property
    def why_no_prefill_graphs(self) -> str | None:
        """Another model that takes the first one's place may have another answer."""
        return why_no_prefill_graphs(self.server_args, self.device, linears_of(self.model))

    def _wanted_kv_cache_dtype(self, quant_config: QuantizationConfig | None) -> torch.dtype:
        stored = quant_config.kv_cache_dtype if quant_config is not None else None
        return KV_CACHE_DTYPES.get(self.server_args.kv_cache_dtype) or stored or self.dtype

    def _build_model(
        self, model_config: ModelConfig, quant_config: QuantizationConfig | None, load_format: str
    ) -> LlamaForCausalLM:
        model_class = get_model_class(model_config.architecture)
        with self.device, _default_dtype(self.dtype):
            model = model_class(model_config.hf_config, quant_config, self.tp, self.kv_cache_dtype)
        if quant_config is not None:
            quant_config.check_names(module_names(model))
        load_model(model, model_config.model_path, load_format, progress=self.tp.rank == 0)
        return model.eval()

    def update_weights_from_disk(self, model_path: str, load_format: str) -> tuple[bool, str]:
        """Replace the model by that of another checkpoint, on every rank or on none.

        The new one is built and loaded beside the old one, exactly as at the start, and takes its place only when all
        of that went well: memory for both is needed meanwhile. What the KV cache holds belongs to the old one.

        Args:
            model_path, load_format: as the flags.

        Returns:
            Whether the weights were replaced, and SGLang's message or what went wrong.
        """
        logger.info(
            "Update engine weights online from disk begin. avail mem=%.2f GB", available_memory(self.device) / GB
        )
        release_unused_memory(self.device)  # what earlier steps took is there for the new weights
        new: tuple[ServerArgs, ModelConfig, LlamaForCausalLM] | None = None
        problem, others_load = "", True
        try:
            new = self._load_replacement(model_path, load_format)
        except RankFailedError:
            others_load = False  # as all of them know: there is no verdict to exchange
        except Exception as error:  # whatever it is (too little memory, say), the old model is untouched
            if not isinstance(error, StartupError):
                logger.exception("The new weights could not be loaded.")
            problem = str(error) or type(error).__name__
        everywhere = others_load and bool(self.tp.minimum(int(new is not None)))
        if everywhere and new is not None:
            self.decode_graphs = self.prefill_graphs = None  # they read the old weights where they are
            self.server_args, self.model_config, self.model = new
            message = "Succeeded to update model weights."
        else:
            problem = problem or "another tensor-parallel rank could not load them, see the log"
            message = f"Failed to update weights: {problem}. The weights from before are still served."
            logger.error(message)
        # Parameters and layers refer to each other, so the model that is not needed would stay until some later time.
        new = None
        release_unused_memory(self.device)
        if everywhere:
            self._record_graphs()
        logger.info("Update weights end. avail mem=%.2f GB", available_memory(self.device) / GB)
        return everywhere, message

    def _load_replacement(self, model_path: str, load_format: str) -> tuple[ServerArgs, ModelConfig, LlamaForCausalLM]:
        # A revision belongs to the model that it was given with.
        changes: dict[str, Any] = {"model_path": model_path, "load_format": load_format, "revision": None}
        server_args = replace(self.server_args, **changes)
        model_config = ModelConfig.from_server_args(server_args)
        quant_config = get_quantization(model_config, server_args)
        self._check_replacement(model_config, quant_config)
        needed, available = weight_bytes(self.model), available_memory(self.device)
        available = available // self.tp.local_size if self.device.type == "cpu" else available
        if needed > available:
            raise StartupError(
                f"the old and the new weights must fit into memory together: {needed / GB:.2f} GB more are needed, "
                f"{available / GB:.2f} GB are available; start the server with a smaller --mem-fraction-static"
            )
        with self.fp4_autotuner.active(measure=False):
            return server_args, model_config, self._build_model(model_config, quant_config, load_format)

    def _check_replacement(self, new: ModelConfig, quant_config: QuantizationConfig | None) -> None:
        """Raise CheckpointError unless a model of this configuration fits into the running server."""
        changes = [
            f"{name} {getattr(new, name)} instead of {getattr(self.model_config, name)}"
            for name in FIXED_IN_UPDATES
            if getattr(new, name) != getattr(self.model_config, name)
        ]
        kv_cache_dtype = self._wanted_kv_cache_dtype(quant_config)
        if kv_cache_dtype != self.kv_cache_dtype:
            changes.append(f"a KV cache in {kv_cache_dtype} instead of {self.kv_cache_dtype}")
        if changes:
            raise CheckpointError(
                f"{new.model_path} has {', '.join(changes)}; a running server can't change that, start one with this "
                "checkpoint"
            )

    @property
    def token_bytes(self) -> int:
        """Of one token in the KV cache of this rank."""
        config = self.model_config
        return 2 * config.num_hidden_layers * self.num_kv_heads * config.head_dim * self.kv_cache_dtype.itemsize

    def _plan_memory(self, available: int, running: int) -> MemoryPlan:
        """What there is for the pools, where ``available`` bytes are free; on a GPU this runs the largest steps."""
        if self.device.type == "cpu":
            # Ranks on a CPU share its memory; the least that one saw is what is left now that all have loaded.
            return MemoryPlan(total_memory(self.device), available // self.tp.local_size)
        activations = measure_largest_steps(self, running)
        graphs = measure_graphs(self.device, self._graph_runners(*padding_pools(self), running))
        release_unused_memory(self.device)
        return MemoryPlan(total_memory(self.device), available_memory(self.device), activations, graphs)

    def _graph_runners(
        self, req_to_token_pool: ReqToTokenPool, token_to_kv_pool: MHATokenToKVPool, running: int
    ) -> tuple[PrefillGraphRunner | None, DecodeGraphRunner | None]:
        """Those that there are to be, with nothing recorded yet. They share memory; the first one needs more."""
        model, args, pads = self.model, self.server_args, self.device.type == "cuda"
        capture, pools = capture_for(self.device), (req_to_token_pool, token_to_kv_pool)
        prefill = decode = None

        def logits_of(batch: ForwardBatch) -> torch.Tensor:
            output: LogitsProcessorOutput = model(batch)
            return output.next_token_logits

        if self.why_no_prefill_graphs is None:
            prefill = PrefillGraphRunner(model.model, capture, *pools, captured_tokens(args, self._most_rows()))
        if self.why_no_graphs is None:
            sizes = captured_sizes(args, running, pads)
            share = any(linear.rows_share_a_scale for linear in linears_of(model))
            decode = DecodeGraphRunner(logits_of, capture, self.attn_backend, *pools, sizes, pads, repeats_first=share)
        return prefill, decode

    def _record_graphs(self) -> None:
        """On a GPU all that will be wanted; on a CPU each when it is first wanted."""
        pools = self.req_to_token_pool, self.token_to_kv_pool
        self.prefill_graphs, self.decode_graphs = runners = self._graph_runners(*pools, self.max_running_requests)
        for graphs in runners:
            if graphs is not None and self.device.type == "cuda":
                graphs.record_logged(self.device, show_progress=self.tp.rank == 0)

    def _allocate(self, plan: MemoryPlan, running: int) -> None:
        """Size and allocate the pools for ``running`` requests."""
        args, config = self.server_args, self.model_config
        token_bytes = self.token_bytes
        row_bytes = 4 * config.context_len
        if args.max_total_tokens is not None:
            tokens, budget = args.max_total_tokens, plan.room
        else:
            budget = plan.budget(args.mem_fraction_static)
            if self.device.type == "cpu" and args.mem_fraction_static is None:
                budget = int(plan.available * CPU_KV_FRACTION_OF_AVAILABLE)
            tokens = (budget - (running + 1) * row_bytes) // token_bytes - self.page_size
            tokens = min(tokens, running * config.context_len)
        tokens = self.tp.minimum(tokens) // self.page_size * self.page_size
        self.max_running_requests = max(1, min(running, tokens // self.page_size))
        needed = (tokens + self.page_size) * token_bytes + (self.max_running_requests + 1) * row_bytes
        if tokens <= 0 or needed > plan.room:
            raise StartupError(
                f"not enough memory for the KV cache: a token takes {token_bytes} bytes, {plan.room / GB:.2f} GB are "
                f"available and {max(budget, 0) / GB:.2f} GB may be used, after the weights were loaded{plan.reserved}."
                + (
                    f" Reduce --max-total-tokens ({args.max_total_tokens})"
                    if args.max_total_tokens is not None
                    else " Increase --mem-fraction-static, set --max-total-tokens"
                )
                + ", reduce --max-running-requests or --context-length, or use --kv-cache-dtype fp8_e4m3"
            )
        self.max_total_num_tokens = tokens
        self.req_to_token_pool = ReqToTokenPool(self.max_running_requests, config.context_len, self.device)
        self.token_to_kv_pool = MHATokenToKVPool(
            tokens,
            self.page_size,
            self.kv_cache_dtype,
            self.num_kv_heads,
            config.head_dim,
            config.num_hidden_layers,
            self.device,
        )
        size = tokens * token_bytes / 2 / GB
        logger.info("KV Cache is allocated. #tokens: %d, K size: %.2f GB, V size: %.2f GB", tokens, size, size)
        if self.device.type == "cuda":
            logger.info("Memory of %.2f GB: %s", plan.total / GB, plan.describe(needed))

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> LogitsProcessorOutput:
        """Compute one step: writes the new tokens' keys and values, returns the logits. Those of a decode step are good
        until the next one."""
        logits = self.decode_graphs.run(batch) if self.decode_graphs is not None else None
        if logits is not None:
            return LogitsProcessorOutput(next_token_logits=logits)
        self.attn_backend.init_forward_metadata(batch)
        hidden_states = self.prefill_graphs.run(batch) if self.prefill_graphs is not None else None
        if hidden_states is None:
            hidden_states = self.model.model(batch)
        return self.model.compute_logits(hidden_states, batch)

    @torch.inference_mode()
    def sample(self, output: LogitsProcessorOutput, batch: ForwardBatch) -> torch.Tensor:
        """Choose each request's next token, int64 [B]; fills the output's log-probabilities if the batch wants them.

        Penalties, biases and masks change the output's logits in place first. A request without a token to choose gets
        a negative number, see ``sample_tokens``. On a GPU this doesn't wait for it. Rank 0 chooses for all ranks: where
        one samples, sums of probabilities need not come out equal on two GPUs, and ranks that disagree about a token
        never meet again.
        """
        info = batch.sampling_info
        info.apply(output.next_token_logits)
        if self.tp.rank == 0:
            token_ids = sample_tokens(output.next_token_logits, info, batch.seq_lens)
        else:
            token_ids = torch.empty(batch.batch_size, dtype=torch.int64, device=self.device)
        self.tp.broadcast(token_ids)
        info.count(token_ids)
        if batch.return_logprob:
            output.next_logprobs = logprobs_of(
                info.tempered(output.next_token_logits),
                token_ids.clamp(min=0),
                batch.top_logprobs_nums or [0] * batch.batch_size,
                batch.token_ids_logprobs or [[]] * batch.batch_size,
            )
        return token_ids


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(previous)
