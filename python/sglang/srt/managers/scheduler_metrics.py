"""The scheduler's log lines and the numbers behind them."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from sglang.srt.managers.io_struct import LoadSnapshot
from sglang.srt.managers.schedule_batch import MemoryPools
from sglang.srt.managers.schedule_policy import PrefillAdder

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)

DECODE_LOG_INTERVAL = 40


class SchedulerMetrics:
    """Counts what runs; one per scheduler."""

    def __init__(self, pools: MemoryPools) -> None:
        self._pools = pools
        self.num_retracted_reqs = 0
        self.last_gen_throughput = 0.0  # tokens per second
        self.cache_hit_rate = 0.0  # of the last prefill
        self._forward_ct_decode = 0
        self._num_generated_tokens = 0
        self._last_stats_time = time.perf_counter()

    def num_used_tokens(self) -> int:
        """KV slots that requests hold."""
        allocator = self._pools.allocator
        return allocator.size - allocator.available_size() - self._pools.tree_cache.evictable_size()

    def token_usage(self) -> float:
        """The same as a part of all slots."""
        return self.num_used_tokens() / self._pools.allocator.size

    def load(self, num_running: int, num_queued: int) -> LoadSnapshot:
        """What the scheduler is doing now."""
        used = self.num_used_tokens()
        return LoadSnapshot(
            num_running_reqs=num_running,
            num_waiting_reqs=num_queued,
            num_used_tokens=used,
            num_evictable_tokens=self._pools.tree_cache.evictable_size(),
            token_usage=used / self._pools.allocator.size,
            gen_throughput=self.last_gen_throughput if num_running else 0.0,
            cache_hit_rate=self.cache_hit_rate,
            num_retracted_reqs=self.num_retracted_reqs,
        )

    def exclude_idle_time(self, seconds: float) -> None:
        """Time spent waiting for requests is no generation time."""
        self._last_stats_time += seconds

    def log_prefill(self, adder: PrefillAdder, num_running: int, num_queued: int) -> None:
        self.cache_hit_rate = adder.log_hit_tokens / (adder.log_hit_tokens + adder.log_input_tokens)
        logger.info(
            "Prefill batch. #new-seq: %d, #new-token: %d, #cached-token: %d, token usage: %.2f, #running-req: %d, "
            "#queue-req: %d",
            len(adder.can_run_list), adder.log_input_tokens, adder.log_hit_tokens, self.token_usage(), num_running,
            num_queued,
        )  # fmt: skip

    def count_decode_step(self, batch_size: int, num_queued: int) -> None:
        self._forward_ct_decode += 1
        self._num_generated_tokens += batch_size
        if self._forward_ct_decode % DECODE_LOG_INTERVAL:
            return
        now = time.perf_counter()
        self.last_gen_throughput = self._num_generated_tokens / (now - self._last_stats_time)
        self._last_stats_time, self._num_generated_tokens = now, 0
        logger.info(
            "Decode batch. #running-req: %d, #token: %d, token usage: %.2f, gen throughput (token/s): %.1f, "
            "#queue-req: %d",
            batch_size, self.num_used_tokens(), self.token_usage(), self.last_gen_throughput, num_queued,
        )  # fmt: skip

    def log_retraction(self, num_retracted: int, new_token_ratio: float) -> None:
        self.num_retracted_reqs += num_retracted
        logger.warning(
            "KV cache pool is full. Retract requests. #retracted_reqs: %d, #new_token_ratio: %.4f",
            num_retracted, new_token_ratio,
        )  # fmt: skip


def model_state(model_runner: ModelRunner) -> dict[str, Any]:
    """What the model takes and how its NVFP4 layers are computed, for ``/get_server_info``."""
    from sglang.srt.layers.quantization.fp4_utils import get_fp4_gemm_resolution
    from sglang.srt.layers.quantization.nvfp4_linear import linears_of
    from sglang.srt.model_loader.loader import weight_bytes

    resolution = get_fp4_gemm_resolution()
    return {
        "memory_usage": {
            "weight_bytes": weight_bytes(model_runner.model),
            "kv_cache_bytes": model_runner.token_to_kv_pool.get_kv_size_bytes(),
        },
        "fp4_gemm_backend": resolution.as_dict() if resolution is not None else None,
        "fp4_gemm_choices": {linear.product: linear.choices for linear in linears_of(model_runner.model)},
    }
