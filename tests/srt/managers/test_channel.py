import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest
import zmq

from sglang.srt.managers.channel import ZmqChannel
from sglang.srt.managers.io_struct import (
    AbortReq,
    BatchTokenIDOutput,
    FlushCacheReq,
    PortArgs,
    TokenizedGenerateReqInput,
    decode_to_tokenizer,
    encode,
)
from sglang.srt.sampling.sampling_params import SamplingParams


@pytest.fixture
def channel() -> Iterator[ZmqChannel]:
    ports = PortArgs.create()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    pull, push = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    pull.bind(ports.tokenizer_ipc)
    push.connect(ports.scheduler_input_ipc)
    channel = ZmqChannel(ports)
    channel.other_end = pull, push  # type: ignore[attr-defined]
    yield channel
    channel.close()
    context.destroy(linger=0)
    ports.remove()


def test_messages_come_in_order_and_all_at_once(channel: ZmqChannel) -> None:
    pull, push = channel.other_end  # type: ignore[attr-defined]
    assert channel.recv(block=False) == []
    params = SamplingParams(stop_token_ids=(3,))
    sent = [
        TokenizedGenerateReqInput(rid="a", input_ids=[1, 2], sampling_params=params),
        AbortReq(rid="a"),
        FlushCacheReq(call_id="c"),
    ]
    for message in sent:
        push.send(encode(message))
    got = channel.recv(block=True)
    deadline = time.monotonic() + 10
    while len(got) < 3 and time.monotonic() < deadline:
        got += channel.recv(block=False)
    assert got == sent
    channel.send(BatchTokenIDOutput(outputs=[]))
    assert pull.poll(10_000)
    assert decode_to_tokenizer(pull.recv()) == BatchTokenIDOutput(outputs=[])


def test_a_signal_ends_the_wait(channel: ZmqChannel) -> None:
    """Even one that comes before the wait begins, and only once."""
    caught: list[int] = []
    previous = signal.signal(signal.SIGUSR1, lambda number, _: caught.append(number))
    try:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert channel.recv(block=True) == [] and caught == [signal.SIGUSR1]
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        began = time.monotonic()
        assert channel.recv(block=True) == [] and len(caught) == 2
        assert time.monotonic() - began > 0.1
    finally:
        signal.signal(signal.SIGUSR1, previous)
