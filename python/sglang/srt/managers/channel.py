"""The scheduler's end of the connection to the HTTP process, shared by tensor-parallel ranks."""

from __future__ import annotations

import os
import signal
from typing import Protocol

import zmq

from sglang.srt.distributed import TensorParallelGroup
from sglang.srt.managers.io_struct import (
    PortArgs,
    ShutdownReq,
    ToScheduler,
    ToTokenizer,
    decode_to_ranks,
    decode_to_scheduler,
    encode,
    encode_to_ranks,
)


class Channel(Protocol):
    """What a scheduler needs of its connection."""

    def recv(self, block: bool) -> list[ToScheduler]:
        """Everything that has arrived, in order. ``block`` waits for something to happen, at the least a signal."""

    def send(self, message: ToTokenizer) -> None: ...

    def post(self, message: ToScheduler) -> None:
        """Have ``message`` arrive with the next :meth:`recv`, on every rank if this is rank 0, else on none."""

    def close(self) -> None: ...


class ZmqChannel:
    """Two ZMQ sockets, and the means to wake from waiting when a signal comes. SIGTERM arrives as a ShutdownReq.

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
        self._terminated = False
        self._posted: list[ToScheduler] = []
        self._previous_handler = signal.signal(signal.SIGTERM, self._on_sigterm)

    def _on_sigterm(self, *_: object) -> None:
        self._terminated = True

    def recv(self, block: bool) -> list[ToScheduler]:
        messages, self._posted = self._posted, []
        ready = dict(self._poller.poll(None if block and not messages else 0))
        if self._wakeup_reader in ready:
            os.read(self._wakeup_reader, 4096)
        if self._terminated:
            self._terminated = False
            messages.append(ShutdownReq())
        if self._pull in ready:
            try:
                while True:
                    messages.append(decode_to_scheduler(self._pull.recv(zmq.NOBLOCK)))
            except zmq.Again:
                pass
        return messages

    def send(self, message: ToTokenizer) -> None:
        self._push.send(encode(message))

    def post(self, message: ToScheduler) -> None:
        self._posted.append(message)

    def close(self) -> None:
        """Close the sockets; what was sent last still has a second to leave."""
        signal.signal(signal.SIGTERM, self._previous_handler)
        signal.set_wakeup_fd(-1)
        os.close(self._wakeup_reader)
        os.close(self._wakeup_writer)
        self._context.destroy(linger=1000)


class RankChannel:
    """What one of several tensor-parallel ranks has for a channel: rank 0 receives for all of them and alone sends.

    One broadcast per :meth:`recv`, so that all ranks act on the same messages in the same step. While rank 0 waits for
    a message the others wait for its broadcast. SIGTERM concerns rank 0 only, which tells the others.
    """

    def __init__(self, tp: TensorParallelGroup, port_args: PortArgs) -> None:
        self._tp = tp
        self._zmq = ZmqChannel(port_args) if tp.rank == 0 else None
        if self._zmq is None:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def recv(self, block: bool) -> list[ToScheduler]:
        if self._zmq is None:
            data = self._tp.broadcast_bytes(b"")
            return decode_to_ranks(data) if data else []
        messages = self._zmq.recv(block)
        self._tp.broadcast_bytes(encode_to_ranks(messages) if messages else b"")
        return messages

    def send(self, message: ToTokenizer) -> None:
        if self._zmq is not None:
            self._zmq.send(message)

    def post(self, message: ToScheduler) -> None:
        if self._zmq is not None:
            self._zmq.post(message)

    def close(self) -> None:
        if self._zmq is not None:
            self._zmq.close()
