"""The scheduler's end of the connection to the HTTP process."""

from __future__ import annotations

import os
import signal
from typing import Protocol

import zmq

from sglang.srt.managers.io_struct import PortArgs, ToScheduler, ToTokenizer, decode_to_scheduler, encode


class Channel(Protocol):
    """What a scheduler needs of its connection."""

    def recv(self, block: bool) -> list[ToScheduler]:
        """Everything that has arrived, in order. ``block`` waits for something to happen, at the least a signal."""

    def send(self, message: ToTokenizer) -> None: ...


class ZmqChannel:
    """Two ZMQ sockets, and the means to wake from waiting when a signal comes.

    Must be made in the main thread: it takes over the process's signal wake-up descriptor.
    """

    def __init__(self, port_args: PortArgs) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._pull = self._context.socket(zmq.PULL)
        self._push = self._context.socket(zmq.PUSH)
        for socket in (self._pull, self._push):
            socket.set_hwm(0)
        self._pull.bind(port_args.scheduler_input_ipc)
        self._push.connect(port_args.tokenizer_ipc)
        self._poller = zmq.Poller()
        self._poller.register(self._pull, zmq.POLLIN)
        self._wakeup_reader, self._wakeup_writer = os.pipe()
        os.set_blocking(self._wakeup_reader, False)
        os.set_blocking(self._wakeup_writer, False)
        signal.set_wakeup_fd(self._wakeup_writer, warn_on_full_buffer=False)
        self._poller.register(self._wakeup_reader, zmq.POLLIN)

    def recv(self, block: bool) -> list[ToScheduler]:
        ready = dict(self._poller.poll(None if block else 0))
        if self._wakeup_reader in ready:
            os.read(self._wakeup_reader, 4096)
        messages: list[ToScheduler] = []
        if self._pull in ready:
            try:
                while True:
                    messages.append(decode_to_scheduler(self._pull.recv(zmq.NOBLOCK)))
            except zmq.Again:
                pass
        return messages

    def send(self, message: ToTokenizer) -> None:
        self._push.send(encode(message))

    def close(self) -> None:
        """Close the sockets; what was sent last still has a second to leave."""
        signal.set_wakeup_fd(-1)
        os.close(self._wakeup_reader)
        os.close(self._wakeup_writer)
        self._context.destroy(linger=1000)
