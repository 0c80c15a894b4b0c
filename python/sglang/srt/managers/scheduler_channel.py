"""The HTTP process's end of the connection to the scheduler."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import zmq

from sglang.srt.managers.io_struct import PortArgs, ToScheduler, ToTokenizer, decode_to_tokenizer, encode


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
        self._push.send(encode(message), zmq.NOBLOCK)

    def close(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._pull.fileno())
        self._loop = None
        self._context.destroy(linger=0)
