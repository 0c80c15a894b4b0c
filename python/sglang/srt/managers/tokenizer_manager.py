"""The asyncio side of the server: validates and tokenises requests, exchanges messages with the scheduler, and hands
every step's output to whoever waits for it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, TypeVar

import msgspec

from sglang.srt.constrained.grammar_manager import Grammar, GrammarManager
from sglang.srt.errors import RequestError
from sglang.srt.managers.aborts import ABORTED, Preparations, end_with, is_named
from sglang.srt.managers.detokenizer import TokenDecoder
from sglang.srt.managers.generate_request import GenerateBatch, GenerateRequest, new_rid
from sglang.srt.managers.hf_tokenizer import encode
from sglang.srt.managers.io_struct import (
    AbortReq,
    ControlReply,
    FlushCacheReq,
    GetInternalStateReq,
    LoadSnapshot,
    TokenizedGenerateReqInput,
    ToTokenizer,
    UpdateWeightFromDiskReqInput,
)
from sglang.srt.managers.request_limits import Limits, tokenized_request
from sglang.srt.managers.request_state import ReqState, RequestGroup, ServiceError
from sglang.srt.managers.scheduler_channel import SchedulerChannel
from sglang.srt.observability.request_observer import RequestObserver
from sglang.srt.sampling.sampling_params import GRAMMAR_FIELDS, SamplingParams

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Above this many characters tokenising would hold up the event loop noticeably.
_TOKENIZE_IN_THREAD = 10_000
# Tokenising takes about 150 bytes of memory for each character, so what can't fit into the context is not tried.
CHARS_PER_TOKEN, _LEAST_PROMPT_CHARS = 64, 1 << 20
# Each of n samples is a message of its own with the prompt in it; bounds what one small request makes of that.
_MAX_CALL_SIZE = 1 << 25


class TokenizerManager:
    """Everything between a parsed request and its output.

    Args:
        tokenizer: from :func:`get_tokenizer`.
        vocab_size: of the model; token ids at or above it are refused.
        context_len: of the model, prompt and output together.
        channel: to the scheduler.

    Attributes:
        load: what the scheduler does, as it said with its last output.
        observers: who is told what requests do.
        grammars: None with ``--grammar-backend none``.
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
        self._preparations = Preparations()
        self._calls: dict[str, asyncio.Future[ControlReply]] = {}
        self._refusal: ServiceError | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self._update_lock = asyncio.Lock()
        self._no_update = asyncio.Event()
        self._no_update.set()
        self.last_receive_time = 0.0
        self.load = LoadSnapshot()
        self.observers: list[RequestObserver] = []
        self.grammars: GrammarManager | None = None

    def start(self) -> None:
        """Receive from now on; call it in the event loop that will use this object."""
        self._channel.start(self._on_message)

    # Requests

    async def submit(
        self, requests: Sequence[GenerateRequest], *, stream: bool, log_metrics: bool = True
    ) -> RequestGroup:
        """Validate all of ``requests`` and, if all are right, start them. The caller must :meth:`release` the group.
        Observers hear nothing of them unless ``log_metrics``.

        Raises:
            RequestError: one of them can't be served as written; none was started.
            ServiceError: the server is not serving.
        """
        if self._refusal is not None:
            raise self._refusal
        with self._preparations.of(requests) as aborted:
            prepared = await self._tokenize_all(requests)
            limits = Limits(self.vocab_size, self.context_len, self.max_req_input_len)
            messages = []
            for request, ids in prepared:
                messages.append(tokenized_request(request, ids, limits))
                await asyncio.sleep(0)  # others have their turn between the sequences of a batch
            grammars = await asyncio.gather(*(self._grammar(request.sampling_params) for request in requests))
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
        group = RequestGroup(states, stream, log_metrics)
        for state, message, grammar in zip(states, messages, grammars, strict=True):
            self._states[state.rid] = state, group
            self._rids[state.request.rid] = state
            for observer in self._observers_of(group):
                observer.received(state, stream)
            self._idle.clear()
            if state.request.rid in aborted:
                self._abort(state, ABORTED, sent=False)
                continue
            if grammar is not None:
                self._send_grammar(grammar, message)
            self._channel.send(message)
        return group

    async def generate(self, batch: GenerateBatch, *, log_metrics: bool = True) -> AsyncIterator[Any]:
        """SGLang's response objects: one (a list for a batch) at the end, or cumulative ones as they come if
        ``batch.stream`` (with ``index`` in a batch). Closing the iterator early aborts.

        Raises:
            RequestError, ServiceError: as :meth:`submit`, or the scheduler could not serve it.
        """
        group = await self.submit(batch.requests, stream=batch.stream, log_metrics=log_metrics)
        try:
            if not batch.stream:
                outputs = [state.to_dict() for state in await group.wait()]
                yield outputs[0] if batch.is_single else outputs
                return
            while (state := await group.next()) is not None:
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
                self._forget(state, group)

    def abort_request(self, rid: str | None = None, *, abort_all: bool = False) -> None:
        """End the requests called ``rid`` (or all) with what they have; unknown names are ignored, they may just have
        finished. ``rid`` also names all sequences of a batch that was given this one name."""
        self._preparations.abort(is_meant := is_named(rid, abort_all=abort_all))
        for state in [state for name, state in self._rids.items() if is_meant(name)]:
            self._abort(state, ABORTED)

    def _abort(self, state: ReqState, reason: dict[str, Any], *, sent: bool = True) -> None:
        _, group = self._states[state.rid]
        if sent:  # else the scheduler has never seen it
            self._channel.send(AbortReq(rid=state.rid))
        end_with(state, reason)
        self._forget(state, group)
        group.notify(state)

    def _observers_of(self, group: RequestGroup) -> list[RequestObserver]:
        return self.observers if group.log_metrics else []

    def _forget(self, state: ReqState, group: RequestGroup) -> None:
        for observer in self._observers_of(group):
            observer.finished(state, group.stream)
        del self._states[state.rid]
        del self._rids[state.request.rid]
        if not self._states:
            self._idle.set()

    async def _tokenize_all(self, requests: Sequence[GenerateRequest]) -> list[tuple[GenerateRequest, list[int]]]:
        """Every request with its token ids; a prompt of which n samples are wanted is tokenised once."""
        known: dict[tuple[str | None, bool], list[int]] = {}
        prepared, size = [], 0
        for request in requests:
            key = request.text, request.add_special_tokens
            ids = known.get(key) if request.input_ids is None else None
            if ids is None:
                ids = await self._tokenize(request)
                await asyncio.sleep(0)  # as above
                known[key] = ids
            prepared.append((request, ids))
            params = request.sampling_params
            size += len(ids) + len(params.logit_bias or ()) + len(params.stop_token_ids)
            if size > _MAX_CALL_SIZE:
                raise RequestError(
                    f"The sequences of one request may have {_MAX_CALL_SIZE} tokens, biases and stop tokens together, "
                    "and these have more; ask for fewer at a time."
                )
        return prepared

    async def _tokenize(self, request: GenerateRequest) -> list[int]:
        if request.input_ids is not None:
            ids = request.input_ids
        elif request.text:
            ids = await self.encode(request.text, "text", add_special_tokens=request.add_special_tokens)
        else:
            raise RequestError("The prompt is empty.", "text")
        if not ids:
            raise RequestError("The prompt has no tokens.", "input_ids")
        self.check_token_ids(ids, "input_ids")
        return ids

    async def encode(self, text: str, name: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``, which is the field ``name`` of a request.

        Raises:
            RequestError: it can't be encoded.
        """
        most = max(_LEAST_PROMPT_CHARS, CHARS_PER_TOKEN * self.context_len)
        if len(text) > most:
            raise RequestError(
                f"The prompt has {len(text)} characters, {most} are accepted: the context has {self.context_len} "
                "tokens.",
                name,
            )
        try:
            if len(text) > _TOKENIZE_IN_THREAD:
                return await asyncio.to_thread(encode, self.tokenizer, text, add_special_tokens=add_special_tokens)
            return encode(self.tokenizer, text, add_special_tokens=add_special_tokens)
        except (UnicodeEncodeError, TypeError):  # the latter from tokenizers' batches
            raise RequestError("The prompt has an unpaired surrogate, which is no text.", name) from None

    def check_token_ids(self, ids: Sequence[int], name: str) -> None:
        """Raise RequestError if one of ``ids`` is no token of the model."""
        if ids and (min(ids) < 0 or max(ids) >= self.vocab_size):
            wrong = next(i for i in ids if not 0 <= i < self.vocab_size)
            raise RequestError(f"Token id {wrong} is outside the vocabulary [0, {self.vocab_size}).", name)

    async def _grammar(self, params: SamplingParams) -> Grammar | None:
        if self.grammars is not None:
            return await self.grammars.prepare(params)
        if kind := next((name for name in GRAMMAR_FIELDS if getattr(params, name) is not None), None):
            raise RequestError(f"{kind} can't be served: the server was started with --grammar-backend none.", kind)
        return None

    def _send_grammar(self, grammar: Grammar, message: TokenizedGenerateReqInput) -> None:
        assert self.grammars is not None
        for each in self.grammars.messages(grammar):
            self._channel.send(each)
        message.grammar = grammar.number
        # The text is of no more use, and may be long.
        message.sampling_params = msgspec.structs.replace(message.sampling_params, **dict.fromkeys(GRAMMAR_FIELDS))

    # Messages from the scheduler

    def _on_message(self, message: ToTokenizer) -> None:
        if isinstance(message, ControlReply):
            future = self._calls.pop(message.call_id, None)
            if future is not None and not future.done():  # done: its caller was cancelled
                future.set_result(message)
            return
        self.last_receive_time = time.monotonic()
        self.load = message.load
        for out in message.outputs:
            if (entry := self._states.get(out.rid)) is None:  # aborted meanwhile
                continue
            state, group = entry
            tokens = len(state.output_ids)
            try:
                stopped = state.push(out)
            except Exception as error:  # must not cost the others of this message their tokens
                group.fail(error)
                continue
            if stopped:
                self._channel.send(AbortReq(rid=state.rid))
            for observer in self._observers_of(group):
                observer.progressed(state, group.stream, len(state.output_ids) - tokens)
            if state.finished:
                self._forget(state, group)
            group.notify(state)

    # Control

    async def flush_cache(self, timeout: float = 0.0) -> bool:
        """Empty the prefix cache; False if requests are still running ``timeout`` seconds from now."""
        if timeout > 0:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._idle.wait(), timeout)
        return (await self._call(FlushCacheReq(call_id=new_rid()))).success

    async def internal_state(self) -> dict[str, Any]:
        """What the scheduler says of itself."""
        return (await self._call(GetInternalStateReq(call_id=new_rid()))).data

    async def update_weights_from_disk(
        self, model_path: str, load_format: str, replaced: Callable[[], None], *, abort_all_requests: bool = False
    ) -> tuple[bool, str]:
        """Serve another checkpoint's weights from now on. Requests that run come to their end with the old weights
        first (or are aborted), those that come meanwhile wait. ``replaced`` is called when it was done, also if the
        caller was cancelled after the scheduler was told: the scheduler can't be stopped then.

        Returns:
            Whether it was done, and a message.
        """
        async with self._update_lock:
            self._no_update.clear()
            try:
                if abort_all_requests:
                    for state in list(self._rids.values()):  # not those that will get the new weights
                        self._abort(state, ABORTED)
                await self._idle.wait()
                if self._refusal is not None:
                    raise self._refusal
                message = UpdateWeightFromDiskReqInput(
                    call_id=new_rid(), model_path=model_path, load_format=load_format
                )
                answer = self._send_call(message)
                answer.add_done_callback(lambda answer: _record(answer, replaced))
                reply = await asyncio.shield(answer)
            finally:
                self._no_update.set()
        return reply.success, reply.data["message"]

    async def _call(self, message: FlushCacheReq | GetInternalStateReq) -> ControlReply:
        future = self._send_call(message)
        try:
            return await future
        finally:
            self._calls.pop(message.call_id, None)

    def _send_call(
        self, message: FlushCacheReq | GetInternalStateReq | UpdateWeightFromDiskReqInput
    ) -> asyncio.Future[ControlReply]:
        """The scheduler's answer, when it comes."""
        if self._refusal is not None and self._refusal.status == 500:
            raise self._refusal
        self._channel.send(message)
        future: asyncio.Future[ControlReply] = asyncio.get_running_loop().create_future()
        self._calls[message.call_id] = future
        return future

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


def _record(answer: asyncio.Future[ControlReply], replaced: Callable[[], None]) -> None:
    if not answer.cancelled() and answer.exception() is None and answer.result().success:
        replaced()


async def last(outputs: AsyncIterator[T]) -> T:
    """The last (for a call that doesn't stream: the only) output."""
    async for output in outputs:
        result = output
    return result


async def close(outputs: AsyncIterator[Any]) -> None:
    """Close an asynchronous generator now, not when it is collected."""
    while getattr(outputs, "ag_running", False):  # it was cancelled and has yet to notice
        await asyncio.sleep(0)
    if (aclose := getattr(outputs, "aclose", None)) is not None:
        await aclose()
