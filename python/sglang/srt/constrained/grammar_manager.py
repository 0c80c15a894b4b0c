"""Grammars on their way from clients to the scheduler: tried once, sent once."""

from __future__ import annotations

import asyncio
import importlib.util
import multiprocessing
import os
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import msgspec

from sglang.srt.constrained.compile_worker import MAX_MEMORY_BYTES, CompileJob, CompileResult, run_compile_worker
from sglang.srt.constrained.xgrammar_backend import GrammarSource, Vocabulary
from sglang.srt.environ import envs
from sglang.srt.errors import RequestError
from sglang.srt.managers.io_struct import LoadGrammarReq, LoadVocabularyReq, ToScheduler
from sglang.srt.managers.request_state import ServiceError
from sglang.srt.sampling.sampling_params import GRAMMAR_FIELDS, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sglang.srt.managers.detokenizer import TokenDecoder

# The scheduler keeps the latest ones; each is of the order of a megabyte there.
MAX_GRAMMARS = 256
MAX_GRAMMAR_CHARS = 1 << 20
# Grammars that wait to be tried; and how long, in times of SGLANG_GRAMMAR_TIMEOUT, a request waits for its own.
MAX_TRYING = 256
_PATIENCE = 3
# For importing torch and xgrammar, on a slow disk.
_START_SECONDS = 120.0
_DEATH = "the process that compiles grammars ended; try again"


class CompilerDied(Exception):  # noqa: N818
    """The process that tries grammars ended while it had this one."""


class Grammar:
    """One that was tried. ``number`` is its name between the processes, ``known`` says that the scheduler has it."""

    def __init__(self, number: int, source: GrammarSource) -> None:
        self.number = number
        self.source = source
        self.known = False


class GrammarManager:
    """Tries the grammars of requests and remembers which ones the scheduler has.

    Args:
        decoder: the text of tokens.
        vocab_size: of the model.
        stop_token_ids: that end an output of the model.
        any_whitespace, max_whitespace_cnt: as in :class:`GrammarSource`.
    """

    def __init__(
        self,
        decoder: TokenDecoder,
        vocab_size: int,
        stop_token_ids: Iterable[int],
        *,
        any_whitespace: bool = True,
        max_whitespace_cnt: int | None = None,
    ) -> None:
        self._decoder = decoder
        self._vocab_size = vocab_size
        self._stop_token_ids = sorted(i for i in stop_token_ids if i < vocab_size)
        self._white_space = any_whitespace, max_whitespace_cnt
        self._vocabulary: Vocabulary | None = None
        self._vocabulary_sent = False
        self._grammars: OrderedDict[GrammarSource, Grammar] = OrderedDict()
        self._trying: dict[GrammarSource, asyncio.Task[Grammar]] = {}
        self._forgotten: list[int] = []
        self._count = 0
        self._worker: _Worker | None = None
        self._unusable = None if importlib.util.find_spec("xgrammar") else "the package xgrammar is not installed"

    async def prepare(self, params: SamplingParams) -> Grammar | None:
        """The grammar of ``params``, tried; None where there is none.

        Raises:
            RequestError: it can't be served: xgrammar's words, or a bound that it exceeds.
            ServiceError: the process that tries it ended, or has too many others to try.
        """
        kind = next((name for name in GRAMMAR_FIELDS if getattr(params, name) is not None), None)
        if kind is None:
            return None
        text = getattr(params, kind)
        if len(text) > MAX_GRAMMAR_CHARS:
            raise RequestError(f"{kind} has {len(text)} characters, {MAX_GRAMMAR_CHARS} are accepted.", kind)
        self._raise_if_unusable(kind)
        if not self._stop_token_ids:
            raise RequestError(f"{kind} needs a model with an end-of-sequence token, and this one has none.", kind)
        source = GrammarSource(kind, text, not params.skip_special_tokens, *self._white_space)
        if (grammar := self._grammars.get(source)) is not None:
            return grammar
        if source not in self._trying:
            if len(self._trying) >= MAX_TRYING:
                raise ServiceError(f"{kind}: too many grammars are being compiled; try again later.", 503)
            # Not the request's own task: it may be cancelled, and others may wait for the same grammar.
            task = self._trying[source] = asyncio.ensure_future(self._try(source))
            task.add_done_callback(lambda task: self._tried(source, task))
        task = self._trying[source]
        started = self._worker is not None and self._worker.is_ready()
        patience = _PATIENCE * envs.SGLANG_GRAMMAR_TIMEOUT.get() + (0 if started else _START_SECONDS)
        # Who loses patience leaves the grammar to be tried, for when they come again.
        done, _ = await asyncio.wait({task}, timeout=patience)
        if not done:
            raise ServiceError(f"{kind}: too many grammars are being compiled; try again later.", 503)
        return task.result()

    def _tried(self, source: GrammarSource, task: asyncio.Task[Grammar]) -> None:
        del self._trying[source]
        if not task.cancelled():
            task.exception()  # nobody need be waiting

    def messages(self, grammar: Grammar) -> list[ToScheduler]:
        """What the scheduler must get before a request with ``grammar``; they must be sent now."""
        messages: list[ToScheduler] = []
        if not self._vocabulary_sent:
            assert self._vocabulary is not None
            messages.append(LoadVocabularyReq(vocabulary=self._vocabulary))
            self._vocabulary_sent = True
        self._grammars[grammar.source] = grammar
        self._grammars.move_to_end(grammar.source)
        if grammar.known:
            return messages
        grammar.known = True
        while len(self._grammars) > MAX_GRAMMARS:
            _, oldest = self._grammars.popitem(last=False)
            if oldest.known:
                oldest.known = False
                self._forgotten.append(oldest.number)
        forgotten, self._forgotten = self._forgotten, []
        messages.append(LoadGrammarReq(number=grammar.number, source=grammar.source, forget=forgotten))
        return messages

    async def _try(self, source: GrammarSource) -> Grammar:
        if self._vocabulary is None:
            self._vocabulary = await asyncio.to_thread(self._make_vocabulary)
        if self._worker is None or self._worker.ended:
            self._worker = _Worker(self._vocabulary)
        try:
            error = await self._worker.check(source, envs.SGLANG_GRAMMAR_TIMEOUT.get())
        except CompilerDied as death:
            self._unusable = self._worker.unusable
            self._raise_if_unusable(source.kind)
            raise ServiceError(f"{source.kind}: {death}.") from None
        if error is not None:
            raise RequestError(f"Invalid {source.kind}: {error}", source.kind)
        self._count += 1
        grammar = self._grammars[source] = Grammar(self._count, source)
        return grammar

    def _raise_if_unusable(self, kind: str) -> None:
        if self._unusable is not None:
            raise RequestError(f"{kind} can't be served: {self._unusable}.", kind)

    def _make_vocabulary(self) -> Vocabulary:
        pieces = self._decoder.pieces
        special = [i for i in self._decoder.special_ids if i < self._vocab_size]
        return Vocabulary([pieces[i] for i in range(self._vocab_size)], sorted(special), self._stop_token_ids)

    def close(self) -> None:
        """End the process."""
        if self._worker is not None:
            self._worker.close("the server is shutting down")


class _Worker:
    """The process of :func:`run_compile_worker`, seen from the event loop."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        children = max(2, min(8, (os.cpu_count() or 1) // 2))
        self._process = context.Process(
            target=run_compile_worker, args=(theirs, vocabulary, children), name="sglang::grammar", daemon=True
        )
        self._process.start()
        theirs.close()
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._jobs: dict[int, asyncio.Future[str | None]] = {}
        self._count = 0
        self.ended = False
        self.unusable: str | None = None
        self._loop.add_reader(self._connection.fileno(), self._read)
        # uvloop makes what it watches non-blocking, and a message longer than the socket's buffer would be cut.
        os.set_blocking(self._connection.fileno(), True)

    def is_ready(self) -> bool:
        """It has started, or ended."""
        return self._ready.done()

    async def check(self, source: GrammarSource, timeout: float) -> str | None:
        """Why ``source`` is refused; None if it is not.

        Raises:
            CompilerDied: no answer will come.
        """
        done, _ = await asyncio.wait([self._ready], timeout=_START_SECONDS)
        if not done:
            self.close(f"the process that compiles grammars was not ready after {_START_SECONDS:g} s")
        await self._ready
        return await self.submit(source, timeout)

    def submit(
        self, source: GrammarSource, timeout: float, memory_bytes: int = MAX_MEMORY_BYTES
    ) -> asyncio.Future[str | None]:
        """The answer to one :class:`CompileJob`."""
        self._count += 1
        answer: asyncio.Future[str | None] = self._loop.create_future()
        self._jobs[self._count] = answer
        try:
            job = CompileJob(self._count, source, timeout, memory_bytes)
            self._connection.send_bytes(msgspec.msgpack.encode(job))
        except OSError:
            self.close(_DEATH)
        return answer

    def _read(self) -> None:
        try:
            result = msgspec.msgpack.decode(self._connection.recv_bytes(), type=CompileResult)
        except (EOFError, OSError):
            self.close(_DEATH)
            return
        if result.number >= 0:
            self._jobs.pop(result.number).set_result(result.error)
        elif result.error is None:
            self._ready.set_result(None)
        else:
            self.unusable = result.error
            self.close(result.error)

    def close(self, reason: str) -> None:
        """End the process; who waits gets ``reason``."""
        if self.ended:
            return
        self.ended = True
        self._loop.remove_reader(self._connection.fileno())
        self._connection.close()
        self._process.kill()
        self._process.join()
        waiting: list[asyncio.Future[Any]] = [self._ready, *self._jobs.values()]
        for future in waiting:
            if not future.done():
                future.set_exception(CompilerDied(reason))
                future.exception()  # nobody need be waiting
        self._jobs.clear()
