"""The scheduler: continuous batching around one model runner.

One turn of the loop: receive -> process requests -> choose a batch -> launch it -> process a result and send. A prefill
batch goes before a decode step; a prompt longer than ``chunked_prefill_size`` is computed in pieces, one such request
at a time.

With overlap that is the result of the step before: while the device computes one step, the host sends the tokens of the
last one and chooses the next, whose tokens are on the device where it needs them. A request that has ended meanwhile,
other than by a length that could be foreseen, was given to one step too many: its token there is dropped. What is freed
is used by later steps only, which the device computes after those that still read it. Whoever has to know more waits
for the result (``process_pending_result``), and nobody asks whether it is ready: ranks must decide alike.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from sglang.srt.constrained.grammar_backend import GrammarBackend
from sglang.srt.environ import envs
from sglang.srt.managers.batch_result import GenerationBatchResult
from sglang.srt.managers.channel import Channel
from sglang.srt.managers.io_struct import (
    AbortReq,
    BatchTokenIDOutput,
    ControlReply,
    FlushCacheReq,
    GetInternalStateReq,
    LoadGrammarReq,
    LoadSnapshot,
    LoadVocabularyReq,
    ReqOutput,
    ShutdownReq,
    TokenizedGenerateReqInput,
    ToScheduler,
    UpdateWeightFromDiskReqInput,
)
from sglang.srt.managers.request_timeouts import RequestTimeouts
from sglang.srt.managers.schedule_batch import MemoryPools, Req, ScheduleBatch
from sglang.srt.managers.schedule_policy import (
    INIT_NEW_TOKEN_RATIO,
    MIN_NEW_TOKEN_RATIO,
    NEW_TOKEN_RATIO_DECAY,
    AddReqResult,
    PrefillAdder,
    ratio_after_retraction,
)
from sglang.srt.managers.scheduler_metrics import SchedulerMetrics, model_state
from sglang.srt.mem_cache.chunk_cache import ChunkCache
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.sampling.sampling_batch_info import why_no_token

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)


class Scheduler:
    """Owns every request from its arrival to its last token.

    Args:
        channel: where requests come from and outputs go to.

    Attributes:
        enable_overlap: launch a step before the result of the one before is read.
    """

    def __init__(
        self, server_args: ServerArgs, model_config: ModelConfig, model_runner: ModelRunner, channel: Channel
    ) -> None:
        self.model_config = model_config
        self.model_runner = model_runner
        self.channel = channel
        self.chunked_prefill_size = server_args.chunked_prefill_size if server_args.chunked_prefill_size > 0 else None
        cache = ChunkCache if server_args.disable_radix_cache else RadixCache
        self.pools = MemoryPools.of(model_runner, cache, model_config.vocab_size)
        self.tree_cache, allocator = self.pools.tree_cache, self.pools.allocator
        self.max_total_num_tokens = allocator.size
        self.max_running_requests = min(model_runner.max_running_requests, model_runner.req_to_token_pool.size)
        self.max_req_input_len = min(model_config.context_len, allocator.size) - 1
        # Prompt and output together; the last token of the output takes no slot.
        self.max_req_len = min(model_config.context_len, allocator.size + 1)
        if self.max_req_len < model_config.context_len:
            logger.warning(
                "The KV cache holds %d tokens, less than the context length of %d: a request ends there with finish "
                "reason length. Raise --max-total-tokens or --mem-fraction-static to serve longer ones.",
                allocator.size, model_config.context_len,
            )  # fmt: skip

        self.waiting_queue: deque[Req] = deque()
        self.running_batch = ScheduleBatch(self.pools, [])
        self.last_batch: ScheduleBatch | None = None
        # A CPU computes a step before the launch returns: there is nothing to be done meanwhile.
        self.enable_overlap = model_runner.device.type != "cpu" and not server_args.disable_overlap_schedule
        self.pending_result: GenerationBatchResult | None = None
        self.chunked_req: Req | None = None
        # The queue's head was refused for lack of memory: not worth asking again before a request leaves.
        self.batch_is_full = False
        self.new_token_ratio = INIT_NEW_TOKEN_RATIO
        self.max_queued_requests = server_args.max_queued_requests
        self.timeouts = RequestTimeouts(envs.SGLANG_REQ_WAITING_TIMEOUT.get(), envs.SGLANG_REQ_RUNNING_TIMEOUT.get())
        self.metrics = SchedulerMetrics(self.pools)
        self.grammars = GrammarBackend()
        self._sent_load = LoadSnapshot()
        self.shutdown_requested = False
        self._outbox: list[ReqOutput] = []
        self._aborts: dict[str, AbortReq] = {}

    # The loop

    def event_loop(self) -> None:
        """Run until ``shutdown_requested`` is set (by a message) and nothing is left to compute."""
        busy = True
        while busy or not self.shutdown_requested:
            busy = self.step(block=not busy)

    def step(self, block: bool = False) -> bool:
        """One turn of the loop; False if there was nothing to compute. Waits for a message first if ``block``."""
        began = time.perf_counter()
        messages = self.recv_requests(block)
        if block:  # idle time is no generation time
            self.metrics.exclude_idle_time(time.perf_counter() - began)
        for message in messages:
            self.process_input_request(message)
        self._abort_requests()
        batch = self.get_next_batch_to_run()
        if batch is None:
            self.on_idle()
        else:
            result = self.run_batch(batch)
            self.process_pending_result()
            self.pending_result = result
            if not self.enable_overlap or result.has_grammar:
                self.process_pending_result()
        self.last_batch = batch
        self.send_outputs()
        # Only rank 0's clock decides: the other ranks' channels drop what they post.
        for abort in self.timeouts.overdue(self.waiting_queue, self._active_reqs()):
            self.channel.post(abort)
        return batch is not None

    def recv_requests(self, block: bool) -> list[ToScheduler]:
        """What arrived since the last turn, the same on every tensor-parallel rank: whatever follows must depend on
        nothing else that can differ between them (clocks, addresses, signals, free memory)."""
        return self.channel.recv(block)

    def send_outputs(self) -> None:
        outputs, self._outbox = self._outbox, []
        load = self.metrics.load(self.pools.num_active_reqs(), len(self.waiting_queue))
        if outputs or load != self._sent_load:
            self._sent_load = load
            self.channel.send(BatchTokenIDOutput(outputs=outputs, load=load))

    def on_idle(self) -> None:
        """Nothing to compute: then nothing may be left, and nothing may be held.

        Raises:
            RuntimeError: a request is stuck, or slots or rows have leaked.
        """
        if self.num_unfinished_reqs():
            raise RuntimeError(
                f"no batch can run, but {len(self.waiting_queue)} requests wait and {len(self._active_reqs())} hold "
                f"slots, {self.pools.usage()}"
            )
        self.pools.check_integrity()
        self.new_token_ratio = INIT_NEW_TOKEN_RATIO

    def num_unfinished_reqs(self) -> int:
        return len(self.waiting_queue) + len(self._active_reqs())

    def _active_reqs(self) -> list[Req]:
        """The requests that hold slots, between two turns."""
        last = self.last_batch.reqs if self.last_batch is not None else []
        chunked = [self.chunked_req] if self.chunked_req is not None else []
        unique = {id(req): req for req in (*self.running_batch.reqs, *last, *chunked) if req.req_pool_idx is not None}
        return list(unique.values())

    # Messages

    def process_input_request(self, message: ToScheduler) -> None:
        """Aborts are collected, and done with the first message that could notice or at the end: one alone would have
        to look through everything, and a client may abort thousands."""
        if not isinstance(message, (AbortReq, TokenizedGenerateReqInput)):
            self._abort_requests()
        match message:
            case TokenizedGenerateReqInput():
                self._add_request(message)
            case AbortReq():
                self._aborts.setdefault(message.rid, message)
            case LoadVocabularyReq():
                self.grammars.load_vocabulary(message)
            case LoadGrammarReq():
                self.grammars.load(message)
            case FlushCacheReq():
                self.channel.send(ControlReply(call_id=message.call_id, success=self.flush_cache()))
            case UpdateWeightFromDiskReqInput():
                self.channel.send(self.update_weights_from_disk(message))
            case GetInternalStateReq():
                reply = ControlReply(call_id=message.call_id, success=True, data=self.get_internal_state())
                self.channel.send(reply)
            case ShutdownReq():
                self.shutdown_requested = True

    def _add_request(self, recv: TokenizedGenerateReqInput) -> None:
        prompt_len, wanted = len(recv.input_ids), recv.sampling_params.max_new_tokens
        if self._queue_is_full():
            self._abort_requests()  # which may make room
        room = max(self.max_req_len - prompt_len, 0)
        req = Req(recv, room if wanted is None else min(wanted, room), self.model_config.eos_token_ids)
        if not 1 <= prompt_len <= self.max_req_input_len:
            message = f"The prompt has {prompt_len} tokens; it must have 1 to {self.max_req_input_len}."
            req.abort(message, status_code=400)
            self._outbox.append(req.take_output())
        elif self._queue_is_full():
            req.abort("The request queue is full.", status_code=503)
            self._outbox.append(req.take_output())
        elif recv.grammar is not None and not self._start_grammar(req, recv.grammar):
            req.abort(f"Internal error: there is no grammar {recv.grammar}, see the log.", status_code=500)
            self._outbox.append(req.take_output())
        else:
            self.waiting_queue.append(req)

    def _queue_is_full(self) -> bool:
        return self.max_queued_requests is not None and len(self.waiting_queue) >= self.max_queued_requests

    def _start_grammar(self, req: Req, number: int) -> bool:
        req.grammar = self.grammars.start(number, req.sampling_params)
        return req.grammar is not None

    def _abort_requests(self) -> None:
        aborts, self._aborts = self._aborts, {}
        if not aborts:
            return
        for req in (*self.waiting_queue, *self._active_reqs()):
            if (recv := aborts.get(req.rid)) is None:
                continue
            req.abort(recv.message, status_code=recv.status_code)
            if req.req_pool_idx is not None:
                self._release(req)
            self._outbox.append(req.take_output())
        self.waiting_queue = deque(req for req in self.waiting_queue if not req.finished())

    def _release(self, req: Req) -> None:
        self.pools.release(req)
        self.batch_is_full = False
        if req is self.chunked_req:
            self.chunked_req = None

    def flush_cache(self) -> bool:
        """Empty the prefix cache; False (and nothing is done) while there are requests."""
        self.process_pending_result()
        if self.num_unfinished_reqs():
            logger.warning(
                "Cache not flushed because there are pending requests. #queue-req: %d, #running-req: %d",
                len(self.waiting_queue), self.pools.num_active_reqs(),
            )  # fmt: skip
            return False
        self.tree_cache.reset()
        self.pools.allocator.clear()
        logger.info("Cache flushed successfully!")
        return True

    def update_weights_from_disk(self, recv: UpdateWeightFromDiskReqInput) -> ControlReply:
        """Replace the weights and, since what is cached was computed with the old ones, empty the prefix cache."""
        self.process_pending_result()
        if unfinished := self.num_unfinished_reqs():
            success, message = False, f"The weights were not updated because {unfinished} requests are not finished."
        else:
            began = time.perf_counter()
            success, message = self.model_runner.update_weights_from_disk(recv.model_path, recv.load_format)
            self.metrics.exclude_idle_time(time.perf_counter() - began)
        if success:
            self.flush_cache()
        return ControlReply(call_id=recv.call_id, success=success, data={"message": message})

    def get_internal_state(self) -> dict[str, Any]:
        return {
            "max_total_num_tokens": self.max_total_num_tokens,
            "max_running_requests": self.max_running_requests,
            "#running": self.pools.num_active_reqs(),
            "#waiting": len(self.waiting_queue),
            "token usage": self.metrics.token_usage(),
            "last_gen_throughput": self.metrics.last_gen_throughput,
            "num_retracted_reqs": self.metrics.num_retracted_reqs,
            **model_state(self.model_runner),
        }

    # Choosing a batch

    def get_next_batch_to_run(self) -> ScheduleBatch | None:
        """The next step, prepared; None if there is nothing to compute, and then no result is awaited."""
        batch = self._choose_batch()
        if batch is None and self.pending_result is not None:
            # It may end requests, which makes room for others.
            self.process_pending_result()
            batch = self._choose_batch()
        return batch

    def _choose_batch(self) -> ScheduleBatch | None:
        if self.last_batch is not None and self.last_batch.forward_mode.is_extend():
            self.last_batch.filter_batch()
            if not self.last_batch.is_empty():
                self.running_batch.merge_batch(self.last_batch)
        self.last_batch = None
        self.running_batch.filter_batch()
        new_batch = self.get_new_batch_prefill()
        if new_batch is not None:
            return new_batch
        if self.running_batch.is_empty() or not self._make_room_for_decode():
            return None
        self.running_batch.prepare_for_decode()
        return self.running_batch

    def get_new_batch_prefill(self) -> ScheduleBatch | None:
        if self.chunked_req is None and (self.batch_is_full or not self.waiting_queue):
            return None
        running = self.running_batch.reqs
        # Also those that will end with the awaited result hold a row each.
        free_rows = self.max_running_requests - self.pools.num_active_reqs()
        adder = PrefillAdder(self.pools, running, self.new_token_ratio, self.chunked_prefill_size)
        if self.chunked_req is not None:
            adder.add_chunked_req(self.chunked_req)
        if not self.batch_is_full:
            self.batch_is_full = adder.add_waiting_reqs(self.waiting_queue, free_rows) is AddReqResult.NO_TOKEN
        if not adder.can_run_list:
            return None
        self.chunked_req = adder.chunked_req
        self.metrics.log_prefill(adder, len(running), len(self.waiting_queue))
        batch = ScheduleBatch(self.pools, adder.can_run_list, adder.chunked_req)
        batch.prepare_for_extend()
        return batch

    def _make_room_for_decode(self) -> bool:
        """Make sure that the next decode step has slots, retracting requests where it has not; False, and nothing is
        done, where the awaited result has to be known first."""
        batch = self.running_batch
        if batch.check_decode_mem():
            self.new_token_ratio = max(self.new_token_ratio - NEW_TOKEN_RATIO_DECAY, MIN_NEW_TOKEN_RATIO)
            return True
        if self.pending_result is not None:
            return False
        retracted = batch.reqs_to_retract()
        batch.filter_batch()
        self.new_token_ratio = ratio_after_retraction(batch.reqs)
        self.batch_is_full = True
        # Before those that never ran; the one that has waited longest, that is which has generated most, first.
        self.waiting_queue.extendleft(retracted)
        self.metrics.log_retraction(len(retracted), self.new_token_ratio)
        return True

    # Running it

    def run_batch(self, batch: ScheduleBatch) -> GenerationBatchResult:
        """Launch one step. Its tokens are on the device, where the next decode step of ``batch`` takes them."""
        output = self.model_runner.forward(batch.forward_batch)
        next_token_ids = self.model_runner.sample(output, batch.forward_batch)
        batch.input_ids = next_token_ids
        result = GenerationBatchResult(batch, output, next_token_ids)
        if result.is_extend:
            # What comes later on the device finds the prompts' keys and values, whoever asks for them.
            for req in batch.reqs:
                if req is not batch.chunked_req:
                    self.tree_cache.cache_unfinished_req(req)
        return result

    def process_pending_result(self) -> None:
        """Wait for the step that was launched last, if its result has not been processed, and process it."""
        result, self.pending_result = self.pending_result, None
        if result is not None:
            self.process_batch_result(result)

    def process_batch_result(self, result: GenerationBatchResult) -> None:
        """Give every request its token, end those that are done and collect what is to be sent."""
        num_tokens = 0
        for req, token_id, input_logprobs, logprob in result.read():
            if req.finished():  # and was released, while this step was in flight
                continue
            if req.logprobs is not None:
                req.logprobs.add_inputs(input_logprobs)
            if req is result.chunked_req:
                continue
            num_tokens += 1
            if token_id < 0:
                req.abort(*why_no_token(req, token_id))
            else:
                req.append_output(token_id)
                if req.logprobs is not None and logprob is not None and req.output_ids:
                    req.logprobs.add_output(logprob, token_id)
            if req.finished():
                self._release(req)
            self._outbox.append(req.take_output())
        if not result.is_extend:
            self.metrics.count_decode_step(num_tokens, len(self.waiting_queue))
