"""Clients that do not read: uvicorn waits for them for ever, so their connections are watched."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import struct
import termios
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

logger = logging.getLogger(__name__)

# How often a connection is looked at before it is given up: the end comes at most a quarter of the time too late.
_LOOKS = 4

_Protocol: Any = AutoHTTPProtocol


class WatchedProtocol(_Protocol):  # type: ignore[misc]
    """uvicorn's protocol with an end for a connection of which the client accepts nothing for :attr:`write_timeout`
    seconds although much is waiting. To whoever writes the answer the client has hung up."""

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


def http_protocol(write_timeout: float | None) -> type[asyncio.Protocol]:
    """What uvicorn shall speak HTTP with. None: it waits for ever."""
    if write_timeout is None:
        return AutoHTTPProtocol
    return type("WatchedProtocol", (WatchedProtocol,), {"write_timeout": write_timeout})
