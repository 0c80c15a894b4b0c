"""``sglang.Engine``: the same runtime as the server's, called in the same process instead of over HTTP."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from concurrent.futures import Future
from types import TracebackType
from typing import Any, TypeVar

from sglang.srt.entrypoints.runtime import Runtime
from sglang.srt.entrypoints.scheduler_process import RunScheduler
from sglang.srt.errors import ArgumentError
from sglang.srt.managers.generate_request import parse_generate_request
from sglang.srt.managers.request_state import ServiceError
from sglang.srt.managers.scheduler_main import run_scheduler_process
from sglang.srt.managers.tokenizer_manager import close, last
from sglang.srt.managers.weight_update_request import parse_update_weights_request
from sglang.srt.server_args import ServerArgs

T = TypeVar("T")

_SHUT_DOWN = "The engine was shut down."


class Engine:
    """Loads a model and generates with it. Also a context manager.

    Keyword arguments are the server's (:class:`ServerArgs`), or one ``server_args``. ``log_level`` is "error" unless
    given, as in SGLang. The runtime has an event loop in a thread of its own, so every method may be called from any
    thread, with or without a running event loop.

    Raises:
        StartupError: the model can't be served as asked.
    """

    def __init__(self, *, _run_scheduler: RunScheduler = run_scheduler_process, **kwargs: Any) -> None:
        given = kwargs.pop("server_args", None)
        if given is not None and kwargs:
            raise TypeError(f"Engine(server_args=...) takes no other arguments, got {', '.join(kwargs)}")
        self.server_args: ServerArgs = given or ServerArgs.from_kwargs(**{"log_level": "error", **kwargs})
        if self.server_args.node_rank > 0:
            raise ArgumentError(
                f"node_rank {self.server_args.node_rank}: an Engine is node 0; start `python -m sglang.launch_server` "
                "with the same arguments on the other nodes"
            )
        # Handlers are the caller's; a library has no say in them.
        logging.getLogger("sglang").setLevel(self.server_args.log_level.upper())
        self._runtime = Runtime(self.server_args, _run_scheduler)
        # Work is handed to the loop under the first, so that none comes behind what ends the loop. Reentrant, as a
        # signal's handler may shut down.
        self._handing_over, self._shutting_down = threading.RLock(), threading.RLock()
        self._started = self._stopped = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="sglang-engine", daemon=True)
        self._thread.start()
        atexit.register(self.shutdown)
        try:
            self._run(self._runtime.start())
            self._started = True
        except BaseException:
            self.shutdown()
            raise

    def generate(
        self,
        prompt: str | list[str] | None = None,
        sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None,
        input_ids: list[int] | list[list[int]] | None = None,
        *,
        return_logprob: bool | list[bool] = False,
        logprob_start_len: int | list[int] | None = None,
        top_logprobs_num: int | list[int] | None = None,
        stream: bool = False,
        rid: str | list[str] | None = None,
        **others: Any,
    ) -> Any:
        """SGLang's response object for one prompt, a list of them for several; an iterator of cumulative ones if
        ``stream``. ``others`` are further fields of ``/generate``; what is not supported is refused by name.

        Raises:
            RequestError: the request can't be served as written.
            ServiceError: the scheduler failed.
        """
        outputs = self._start(
            text=prompt,
            sampling_params=sampling_params,
            input_ids=input_ids,
            return_logprob=return_logprob,
            logprob_start_len=logprob_start_len,
            top_logprobs_num=top_logprobs_num,
            stream=stream,
            rid=rid,
            **others,
        )
        return self._iterate(outputs) if stream else self._run(last(outputs))

    async def async_generate(
        self,
        prompt: str | list[str] | None = None,
        sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None,
        input_ids: list[int] | list[list[int]] | None = None,
        *,
        return_logprob: bool | list[bool] = False,
        logprob_start_len: int | list[int] | None = None,
        top_logprobs_num: int | list[int] | None = None,
        stream: bool = False,
        rid: str | list[str] | None = None,
        **others: Any,
    ) -> Any:
        """As :meth:`generate`, from any event loop; an asynchronous iterator if ``stream``."""
        outputs = self._start(
            text=prompt,
            sampling_params=sampling_params,
            input_ids=input_ids,
            return_logprob=return_logprob,
            logprob_start_len=logprob_start_len,
            top_logprobs_num=top_logprobs_num,
            stream=stream,
            rid=rid,
            **others,
        )
        return self._iterate_async(outputs) if stream else await self._submit(last(outputs))

    def _start(self, **fields: Any) -> AsyncIterator[Any]:
        return self._runtime.manager.generate(parse_generate_request(fields))

    def _iterate(self, outputs: AsyncIterator[Any]) -> Iterator[Any]:
        try:
            while True:
                try:
                    yield self._run(_next(outputs))
                except StopAsyncIteration:
                    return
        finally:
            with contextlib.suppress(ServiceError):  # shutting down has closed it
                self._run(close(outputs))

    async def _iterate_async(self, outputs: AsyncIterator[Any]) -> AsyncIterator[Any]:
        try:
            while True:
                try:
                    yield await self._submit(_next(outputs))
                except StopAsyncIteration:
                    return
        finally:
            with contextlib.suppress(ServiceError):  # as above
                await self._submit(close(outputs))

    def _submit(self, work: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
        """``work`` in the runtime's loop, awaitable in the caller's."""
        return asyncio.wrap_future(self._hand_over(work))

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of ``work`` in the runtime's loop; an interrupted wait cancels it."""
        future = self._hand_over(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _hand_over(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        with self._handing_over:
            if self._stopped:
                work.close()
                raise ServiceError(_SHUT_DOWN)
            return asyncio.run_coroutine_threadsafe(self._until_shutdown(work), self._loop)

    async def _until_shutdown(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            return await work
        except asyncio.CancelledError:
            if self._stopped:  # else it is the caller who cancels
                raise ServiceError(_SHUT_DOWN) from None
            raise

    def flush_cache(self, timeout: float = 0.0) -> bool:
        """Empty the prefix cache. False, and nothing is done, if requests still run ``timeout`` seconds from now.

        Raises:
            ServiceError: the scheduler failed.
        """
        return self._run(self._runtime.manager.flush_cache(timeout))

    def abort_request(self, rid: str = "", abort_all: bool = False) -> None:
        """End the request called ``rid``, or all, with what it has; its ``finish_reason`` is "abort". A name that
        nobody has is ignored: its request may just have ended."""
        self._run(self._abort(rid, abort_all))

    async def _abort(self, rid: str, abort_all: bool) -> None:
        self._runtime.manager.abort_request(rid, abort_all=abort_all)

    def get_server_info(self) -> dict[str, Any]:
        """What ``/server_info`` answers: the arguments, what the scheduler reported, and its state now.

        Raises:
            ServiceError: the scheduler failed.
        """
        return self._run(self._runtime.server_info())

    def update_weights_from_disk(
        self, model_path: str, load_format: str | None = None, **others: Any
    ) -> tuple[bool, str, int]:
        """Serve the weights of another checkpoint of the same shape from now on. ``others`` are further fields of
        ``/update_weights_from_disk``.

        Returns:
            SGLang's triple: whether it was done (else the old weights still serve), a message, and 0.

        Raises:
            RequestError: a field is unknown, of the wrong type, or asks for what is not supported.
            ServiceError: the scheduler failed.
        """
        request = parse_update_weights_request({"model_path": model_path, "load_format": load_format, **others})
        return (*self._run(self._runtime.update_weights_from_disk(request)), 0)

    def shutdown(self) -> None:
        """End the scheduler process; what still runs gets an error. Safe to call twice, and called at exit."""
        atexit.unregister(self.shutdown)
        with self._shutting_down:
            with self._handing_over:
                self._stopped = True
            if self._thread.is_alive():
                asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result()
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._thread.join()
                self._loop.close()

    async def _stop(self) -> None:
        if self._started:
            self._runtime.manager.scheduler_died(_SHUT_DOWN)
        self._runtime.stop()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._loop.shutdown_asyncgens()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()


async def _next(outputs: AsyncIterator[T]) -> T:
    return await outputs.__anext__()
