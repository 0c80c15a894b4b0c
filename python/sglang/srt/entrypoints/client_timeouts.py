"""Clients that do not read, or never finish what they send: uvicorn waits for them for ever, so their connections are
watched."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import struct
import termios
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from sglang.srt.entrypoints.http_responses import encode_json, error_body

logger = logging.getLogger(__name__)

# How often a connection is looked at before it is given up: the end comes at most a quarter of the time too late.
_LOOKS = 4

# What both are mixed into is one of uvicorn's two protocols.
_Protocol: Any = asyncio.Protocol


class _WriteTimeout(_Protocol):  # type: ignore[misc]
    """An end for a connection of which the client accepts nothing for :attr:`write_timeout` seconds although much is
    waiting. To whoever writes the answer the client has hung up."""

    write_timeout: float

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._connection = transport
        self._paused = False
        self._left = self._stuck = 0
        self._next_look = self.loop.call_later(self.write_timeout / _LOOKS, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        self._next_look.cancel()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        self._paused = True
        super().pause_writing()

    def resume_writing(self) -> None:
        self._paused = False
        self._stuck = 0  # the client has made room, even if that is filled again before the next look
        super().resume_writing()

    def _look(self) -> None:
        left = _left(self._connection)
        # Otherwise more may have been added meanwhile, and there is room for that.
        waits = left > 0 and (self._paused or self._connection.is_closing())
        self._stuck = self._stuck + 1 if waits and left >= self._left else 0
        self._left = left
        if self._stuck > _LOOKS:
            peer = self._connection.get_extra_info("peername")
            logger.warning(
                "The client %s accepted nothing of its answer for %g s (SGLANG_WRITE_TIMEOUT): it is disconnected, and "
                "what it had asked for ends.",
                peer, self.write_timeout,
            )  # fmt: skip
            self._connection.abort()
            return
        self._next_look = self.loop.call_later(self.write_timeout / _LOOKS, self._look)


def _left(connection: asyncio.Transport) -> int:
    """Bytes that the client's machine has not accepted: ours, and the kernel's, which would hide a slow client's
    progress for megabytes."""
    kernel = b"\0" * struct.calcsize("i")
    with contextlib.suppress(OSError, ValueError):  # unknown to the system, or closed
        kernel = fcntl.ioctl(connection.get_extra_info("socket").fileno(), termios.TIOCOUTQ, kernel)
    return connection.get_write_buffer_size() + int(struct.unpack("i", kernel)[0])


class _ReadTimeout(_Protocol):  # type: ignore[misc]
    """An end for a connection on which a request is not complete :attr:`read_timeout` seconds after it was opened, or
    after the request's first byte. To whoever waits for the body the client has hung up.

    At any time the server works on a complete request, or uvicorn's keep-alive timeout runs, or this clock does.
    """

    read_timeout: float
    _clock: asyncio.TimerHandle | None = None
    # Whether anything has come since the last answer. Who has sent nothing gets no answer: it could be taken for that
    # to what they send at the same moment.
    _begun = False

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._begun = True
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        self._begun = False
        super().on_response_complete()
        self._watch()  # of the next request a part may have come meanwhile

    def _watch(self) -> None:
        cycle = self.cycle  # of the last request of which all headers came
        answering = cycle is not None and not cycle.more_body and not cycle.response_complete
        # httptools queues requests behind the one that is being answered; h11 does not look at them yet.
        queued = getattr(self, "pipeline", None)
        if answering or queued or self.timeout_keep_alive_task is not None or self.transport.is_closing():
            self._stop()
        elif self._clock is None:
            self._clock = self.loop.call_later(self.read_timeout, self._end)

    def _stop(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None

    def _end(self) -> None:
        if self.transport.is_closing():
            return
        cycle = self.cycle
        unfinished = cycle is not None and cycle.more_body
        if begun := self._begun or unfinished:
            logger.warning(
                "The client %s completed no request within %g s (SGLANG_READ_TIMEOUT): it is disconnected.",
                self.transport.get_extra_info("peername"), self.read_timeout,
            )  # fmt: skip
        if begun and not (unfinished and cycle.response_started):
            body = encode_json(
                error_body(f"The request was not complete within {self.read_timeout:g} s.", "invalid_request_error")
            )
            self.transport.write(
                b"HTTP/1.1 408 Request Timeout\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
                b"connection: close\r\n\r\n%b" % (len(body), body)
            )
        if cycle is not None:
            cycle.disconnected = True  # TLS tells only when the client has agreed to the end
            cycle.message_event.set()
        self.transport.close()


def http_protocol(write_timeout: float | None, read_timeout: float | None) -> type[asyncio.Protocol]:
    """What uvicorn shall speak HTTP with.

    Args:
        write_timeout: seconds for which a client may accept nothing of its answer. None: for ever.
        read_timeout: seconds within which a request must be complete. None: no limit.
    """
    bases: tuple[type, ...] = (AutoHTTPProtocol,)
    if read_timeout is not None:
        bases = (_ReadTimeout, *bases)
    if write_timeout is not None:
        bases = (_WriteTimeout, *bases)
    return type("WatchedProtocol", bases, {"write_timeout": write_timeout, "read_timeout": read_timeout})
