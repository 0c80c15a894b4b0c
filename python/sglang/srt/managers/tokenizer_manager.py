"""The asyncio side of the server: validates and tokenises requests, exchanges messages with the scheduler, and hands
every step's output to whoever waits for it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, TypeVar

import msgspec
import zmq

from sglang.srt.errors import RequestError
from sglang.srt.managers.detokenizer import TokenDecoder
from sglang.srt.managers.generate_request import GenerateBatch, GenerateRequest, new_rid
from sglang.srt.managers.hf_tokenizer import encode
from sglang.srt.managers.io_struct import (
    AbortReq,
    ControlReply,
    FlushCacheReq,
    GetInternalStateReq,
    PortArgs,
    TokenizedGenerateReqInput,
    ToScheduler,
    ToTokenizer,
    UpdateWeightFromDiskReqInput,
    decode_to_tokenizer,
)
from sglang.srt.managers.io_struct import encode as encode_message
from sglang.srt.managers.request_state import ReqState, RequestGroup, ServiceError

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Above this many characters tokenising would hold up the event loop noticeably.
_TOKENIZE_IN_THREAD = 10_000


class SchedulerChannel:
    """The two ZMQ sockets of this process, served by the running event loop."""

    def __init__(self, port_args: PortArgs) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._pull = self._context.socket(zmq.PULL)
        self._push = self._context.socket(zmq.PUSH)
        for socket in (self._pull, self._push):
            socket.set_hwm(0)
            socket.setsockopt(zmq.LINGER, 0)
        self._pull.bind(port_args.tokenizer_ipc)
        self._push.connect(port_args.scheduler_input_ipc)
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self, receive: Callable[[ToTokenizer], None]) -> None:
        """Call ``receive(message)`` for every message, from the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._receive = receive
        self._loop.add_reader(self._pull.fileno(), self._take_one)
        # The descriptor signals changes only; what came before is taken now.
        self._loop.call_soon(self._take_one)

    def _take_one(self) -> None:
        if self._loop is None:
            return
        try:
            data = self._pull.recv(zmq.NOBLOCK)
        except zmq.Again:
            return
        # One message a turn of the loop, so that a fast scheduler leaves room for everything else.
        self._loop.call_soon(self._take_one)
        self._receive(decode_to_tokenizer(data))

    def send(self, message: ToScheduler) -> None:
        self._push.send(encode_message(message), zmq.NOBLOCK)

    def close(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._pull.fileno())
        self._loop = None
        self._context.destroy(linger=0)


class TokenizerManager:
    """Everything between a parsed request and its output.

    Args:
        tokenizer: from :func:`get_tokenizer`.
        vocab_size: of the model; token ids at or above it are refused.
        context_len: of the model, prompt and output together.
        channel: to the scheduler.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, context_len: int, channel: SchedulerChannel) -> None:
        self.tokenizer = tokenizer
        self.decoder = TokenDecoder(tokenizer)
        self.context_len = context_len
        self.vocab_size = vocab_size
        self.max_req_input_len = context_len
        self._channel = channel
        self._states: dict[str, tuple[ReqState, RequestGroup]] = {}
        self._rids: dict[str, ReqState] = {}
        self._calls: dict[str, asyncio.Future[ControlReply]] = {}
        self._refusal: ServiceError | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self._update_lock = asyncio.Lock()
        self._no_update = asyncio.Event()
        self._no_update.set()
        self.last_receive_time = 0.0

    def start(self) -> None:
        """Receive from now on; call it in the event loop that will use this object."""
        self._channel.start(self._on_message)

    # Requests

    async def submit(self, requests: Sequence[GenerateRequest], *, stream: bool) -> RequestGroup:
        """Validate all of ``requests`` and, if all are right, start them. The caller must :meth:`release` the group.

        Raises:
            RequestError: one of them can't be served as written; none was started.
            ServiceError: the server is not serving.
        """
        if self._refusal is not None:
            raise self._refusal
        prepared = [(request, await self._tokenize(request)) for request in requests]
        messages = [self._message(request, ids) for request, ids in prepared]
        while not self._no_update.is_set():
            await self._no_update.wait()
        # Nothing below waits, so that no update of the weights can begin before these requests are known.
        for request in requests:
            if request.rid in self._rids:
                raise RequestError(f"A request with rid {request.rid!r} is running already.", "rid")
        if self._refusal is not None:  # the above may have taken a while
            raise self._refusal
        states = [
            ReqState(message.rid, request, ids, self.decoder, index)
            for index, ((request, ids), message) in enumerate(zip(prepared, messages, strict=True))
        ]
        group = RequestGroup(states, stream)
        for state, message in zip(states, messages, strict=True):
            self._states[state.rid] = state, group
            self._rids[state.request.rid] = state
            self._channel.send(message)
        self._idle.clear()
        return group

    async def generate(self, batch: GenerateBatch) -> AsyncIterator[Any]:
        """SGLang's response objects: one (a list for a batch) at the end, or cumulative ones as they come if
        ``batch.stream`` (with ``index`` in a batch). Closing the iterator early aborts.

        Raises:
            RequestError, ServiceError: as :meth:`submit`, or the scheduler could not serve it.
        """
        group = await self.submit(batch.requests, stream=batch.stream)
        try:
            if not batch.stream:
                outputs = [state.to_dict() for state in await group.wait()]
                yield outputs[0] if batch.is_single else outputs
                return
            while news := await group.news():
                for state in news:
                    state.raise_if_failed()
                    output = state.to_dict()
                    if not batch.is_single:
                        output["index"] = state.index
                    yield output
        finally:
            self.release(group)

    def release(self, group: RequestGroup) -> None:
        """The waiter is gone: abort what of ``group`` still runs."""
        for state in group.states:
            if state.rid in self._states:
                self._channel.send(AbortReq(rid=state.rid))
                self._forget(state)

    def abort_request(self, rid: str | None = None, *, abort_all: bool = False) -> None:
        """End the requests called ``rid`` (or all) with what they have; unknown names are ignored, they may just have
        finished. ``rid`` also names all sequences of a batch that was given this one name."""
        reason = {"type": "abort", "message": "Aborted by an abort request."}
        for name, state in list(self._rids.items()):
            if abort_all or name == rid or (rid and name.rpartition("_")[0] == rid):
                self._abort(state, reason)

    def _abort(self, state: ReqState, reason: dict[str, Any]) -> None:
        _, group = self._states[state.rid]
        self._channel.send(AbortReq(rid=state.rid))
        state.end(reason)
        self._forget(state)
        group.notify(state)

    def _forget(self, state: ReqState) -> None:
        del self._states[state.rid]
        del self._rids[state.request.rid]
        if not self._states:
            self._idle.set()

    async def _tokenize(self, request: GenerateRequest) -> list[int]:
        if request.input_ids is not None:
            ids = request.input_ids
        else:
            text = request.text or ""
            if not text:
                raise RequestError("The prompt is empty.", "text")
            try:
                if len(text) > _TOKENIZE_IN_THREAD:
                    ids = await asyncio.to_thread(
                        encode, self.tokenizer, text, add_special_tokens=request.add_special_tokens
                    )
                else:
                    ids = encode(self.tokenizer, text, add_special_tokens=request.add_special_tokens)
            except UnicodeEncodeError:
                raise RequestError("The prompt has an unpaired surrogate, which is no text.", "text") from None
        if not ids:
            raise RequestError("The prompt has no tokens.", "input_ids")
        if min(ids) < 0 or max(ids) >= self.vocab_size:
            wrong = next(i for i in ids if not 0 <= i < self.vocab_size)
            raise RequestError(f"Token id {wrong} is outside the vocabulary [0, {self.vocab_size}).", "input_ids")
        return ids

    def _message(self, request: GenerateRequest, ids: list[int]) -> TokenizedGenerateReqInput:
        length = len(ids)
        if length >= self.context_len:
            raise RequestError(
                f"The input ({length} tokens) is longer than the model's context length ({self.context_len} tokens)."
            )
        if length > self.max_req_input_len:
            raise RequestError(
                f"Input length ({length} tokens) exceeds the maximum allowed length ({self.max_req_input_len} tokens): "
                "the KV cache has no more room. Use a shorter input, or start the server with more --max-total-tokens."
            )
        params = request.sampling_params
        room = self.context_len - length
        if params.max_new_tokens is None or params.max_new_tokens > room:
            if request.max_new_tokens_given:
                raise RequestError(
                    f"Requested token count exceeds the model's maximum context length of {self.context_len} tokens. "
                    f"You requested a total of {length + (params.max_new_tokens or 0)} tokens: {length} tokens from "
                    f"the input messages and {params.max_new_tokens} tokens for the completion.",
                    "max_new_tokens",
                )
            params = msgspec.structs.replace(params, max_new_tokens=room)
        if any(i >= self.vocab_size for i in params.stop_token_ids):
            raise RequestError(
                f"stop_token_ids must be inside the vocabulary [0, {self.vocab_size}).", "stop_token_ids"
            )
        if request.logprob_start_len > length:
            raise RequestError(
                f"logprob_start_len ({request.logprob_start_len}) is beyond the prompt ({length} tokens).",
                "logprob_start_len",
            )
        if request.top_logprobs_num > self.vocab_size:
            raise RequestError(f"top_logprobs_num must be at most {self.vocab_size}.", "top_logprobs_num")
        return TokenizedGenerateReqInput(
            # A fresh name: what the scheduler still sends for an aborted request never meets a new one of that name.
            rid=new_rid(),
            input_ids=ids,
            sampling_params=params,
            return_logprob=request.return_logprob,
            logprob_start_len=length if request.logprob_start_len < 0 else request.logprob_start_len,
            top_logprobs_num=request.top_logprobs_num,
        )

    # Messages from the scheduler

    def _on_message(self, message: ToTokenizer) -> None:
        if isinstance(message, ControlReply):
            if future := self._calls.pop(message.call_id, None):
                future.set_result(message)
            return
        self.last_receive_time = time.monotonic()
        for out in message.outputs:
            if (entry := self._states.get(out.rid)) is None:  # aborted meanwhile
                continue
            state, group = entry
            try:
                stopped = state.push(out)
            except Exception as error:  # must not cost the others of this message their tokens
                group.fail(error)
                continue
            if stopped:
                self._channel.send(AbortReq(rid=state.rid))
            if state.finished:
                self._forget(state)
            group.notify(state)

    # Control

    async def flush_cache(self) -> bool:
        """Empty the prefix cache; False if requests are running."""
        return (await self._call(FlushCacheReq(call_id=new_rid()))).success

    async def internal_state(self) -> dict[str, Any]:
        """What the scheduler says of itself."""
        return (await self._call(GetInternalStateReq(call_id=new_rid()))).data

    async def update_weights_from_disk(
        self, model_path: str, load_format: str, *, abort_all_requests: bool = False
    ) -> tuple[bool, str]:
        """Serve another checkpoint's weights from now on. Requests that run come to their end with the old weights
        first (or are aborted), those that come meanwhile wait.

        Returns:
            Whether it was done, and a message.
        """
        async with self._update_lock:
            self._no_update.clear()
            try:
                if abort_all_requests:
                    self.abort_request(abort_all=True)
                await self._idle.wait()
                if self._refusal is not None:
                    raise self._refusal
                call_id = new_rid()
                reply = await self._call(
                    UpdateWeightFromDiskReqInput(call_id=call_id, model_path=model_path, load_format=load_format)
                )
            finally:
                self._no_update.set()
        return reply.success, reply.data["message"]

    async def _call(self, message: FlushCacheReq | GetInternalStateReq | UpdateWeightFromDiskReqInput) -> ControlReply:
        if self._refusal is not None and self._refusal.status == 500:
            raise self._refusal
        future: asyncio.Future[ControlReply] = asyncio.get_running_loop().create_future()
        self._calls[message.call_id] = future
        self._channel.send(message)
        return await future

    # Life

    async def drain(self, timeout: float) -> None:
        """Refuse new requests (HTTP 503) and wait until nothing runs; after ``timeout`` seconds abort what does."""
        self._refusal = self._refusal or ServiceError("The server is shutting down.", 503)
        try:
            await asyncio.wait_for(self._idle.wait(), timeout)
        except asyncio.TimeoutError:
            logger.warning("%d requests still run after %g s and are aborted.", len(self._states), timeout)
            reason = {"type": "abort", "message": "The server is shutting down.", "status_code": 503}
            for state, _ in list(self._states.values()):
                self._abort(state, reason)

    def scheduler_died(self, message: str) -> None:
        """Everyone who waits, and everyone who comes, gets HTTP 500 with ``message``."""
        error = self._refusal = ServiceError(message, 500)
        for _, group in self._states.values():
            group.fail(error)
        for future in self._calls.values():
            if not future.done():
                future.set_exception(error)
        self._states.clear()
        self._rids.clear()
        self._calls.clear()
        self._idle.set()


async def last(outputs: AsyncIterator[T]) -> T:
    """The last (for a call that doesn't stream: the only) output."""
    async for output in outputs:
        result = output
    return result


async def close(outputs: AsyncIterator[Any]) -> None:
    """Close an asynchronous generator now, not when it is collected."""
    if (aclose := getattr(outputs, "aclose", None)) is not None:
        await aclose()
