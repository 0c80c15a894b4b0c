import os
import signal
import threading
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest
import zmq

from sglang.srt.distributed import TensorParallelGroup
from sglang.srt.managers.channel import RankChannel, ZmqChannel
from sglang.srt.managers.io_struct import (
    AbortReq,
    BatchTokenIDOutput,
    ControlReply,
    FlushCacheReq,
    PortArgs,
    ShutdownReq,
    TokenizedGenerateReqInput,
    ToScheduler,
    decode_to_tokenizer,
    encode,
)
from sglang.srt.sampling.sampling_params import SamplingParams
from thread_ranks import thread_groups

MESSAGES: list[ToScheduler] = [
    TokenizedGenerateReqInput(rid="a", input_ids=[1, 2], sampling_params=SamplingParams(stop_token_ids=(3,))),
    AbortReq(rid="a"),
    FlushCacheReq(call_id="c"),
]


class OtherEnd:
    """The HTTP process's sockets."""

    def __init__(self) -> None:
        self.ports = PortArgs.create()
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.pull, self.push = self.context.socket(zmq.PULL), self.context.socket(zmq.PUSH)
        self.pull.bind(self.ports.tokenizer_ipc)
        self.push.connect(self.ports.scheduler_input_ipc)


@pytest.fixture
def other_end() -> Iterator[OtherEnd]:
    handler = signal.getsignal(signal.SIGTERM)
    end = OtherEnd()
    yield end
    end.context.destroy(linger=0)
    end.ports.remove()
    signal.signal(signal.SIGTERM, handler)


@pytest.fixture
def channel(other_end: OtherEnd) -> Iterator[ZmqChannel]:
    channel = ZmqChannel(other_end.ports)
    yield channel
    channel.close()


def test_messages_come_in_order_and_all_at_once(channel: ZmqChannel, other_end: OtherEnd) -> None:
    assert channel.recv(block=False) == []
    for message in MESSAGES:
        other_end.push.send(encode(message))
    got = channel.recv(block=True)
    deadline = time.monotonic() + 10
    while len(got) < 3 and time.monotonic() < deadline:
        got += channel.recv(block=False)
    assert got == MESSAGES
    channel.send(BatchTokenIDOutput(outputs=[]))
    assert other_end.pull.poll(10_000)
    assert decode_to_tokenizer(other_end.pull.recv()) == BatchTokenIDOutput(outputs=[])


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


def test_what_is_posted_comes_with_the_next_messages_and_ends_the_wait(
    channel: ZmqChannel, other_end: OtherEnd
) -> None:
    channel.post(MESSAGES[1])
    assert channel.recv(block=True) == [MESSAGES[1]]
    assert channel.recv(block=False) == []


def test_sockets_are_the_owners(other_end: OtherEnd, channel: ZmqChannel) -> None:
    for address in (other_end.ports.scheduler_input_ipc, other_end.ports.tokenizer_ipc):
        socket = Path(address.removeprefix("ipc://"))
        assert socket.is_socket()
        folder = socket.parent.stat()
        assert (folder.st_mode & 0o777, folder.st_uid) == (0o700, os.getuid())


def test_sigterm_is_one_message(channel: ZmqChannel) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    assert channel.recv(block=True) == [ShutdownReq()]
    assert channel.recv(block=False) == []
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
    assert channel.recv(block=True) == [ShutdownReq()]


def test_ranks_get_the_same_messages_in_the_same_turns(other_end: OtherEnd) -> None:
    groups = thread_groups(2)
    follower = RankChannel(groups[1], other_end.ports)
    leader = RankChannel(groups[0], other_end.ports)
    turns: list[list[ToScheduler]] = []

    def follow() -> None:
        while ShutdownReq() not in (turns[-1] if turns else []):
            turns.append(follower.recv(block=bool(len(turns) % 2)))

    thread = threading.Thread(target=follow)
    thread.start()
    expected = [leader.recv(block=False)]
    for message in MESSAGES:
        other_end.push.send(encode(message))
    while sum(map(len, expected)) < len(MESSAGES):
        expected.append(leader.recv(block=True))
    late = AbortReq(rid="late", message="It took too long.", status_code=503)
    leader.post(late)
    follower.post(AbortReq(rid="a follower's clock decides nothing"))
    expected.append(leader.recv(block=True))
    os.kill(os.getpid(), signal.SIGTERM)
    while ShutdownReq() not in expected[-1]:
        expected.append(leader.recv(block=False))
    thread.join(10)
    assert turns == expected and expected[0] == []
    assert list(chain.from_iterable(expected)) == [*MESSAGES, late, ShutdownReq()]
    for channel in (follower, leader):
        channel.send(ControlReply(call_id=str(channel is leader), success=True))
    assert other_end.pull.poll(10_000)
    assert decode_to_tokenizer(other_end.pull.recv()) == ControlReply(call_id="True", success=True)
    assert not other_end.pull.poll(100)
    leader.close()
    follower.close()


def test_a_rank_alone_ignores_sigterm(other_end: OtherEnd) -> None:
    RankChannel(TensorParallelGroup(1, 2), other_end.ports).close()
    os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
