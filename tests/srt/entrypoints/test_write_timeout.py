"""Clients that do not read their answer."""

import asyncio
import contextlib
import json
import logging
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import uvicorn
from uvicorn.server import ServerState

from http_server_thread import serve
from sglang.srt.entrypoints.write_timeout import http_protocol

TIMEOUT = 0.6
# A hundred megabytes, by log-probabilities that every event of the stream repeats.
LARGE: dict[str, Any] = {
    "text": "hello", "stream": True, "return_logprob": True, "top_logprobs_num": 20,
    "sampling_params": {"max_new_tokens": 900, "ignore_eos": True},
}  # fmt: skip


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_WRITE_TIMEOUT", str(TIMEOUT))
        with serve(random_seed=5) as base:
            yield base


def asked(url: str, body: dict[str, Any]) -> socket.socket:
    """A client that has sent its request and takes in little."""
    host, _, port = url.removeprefix("http://").partition(":")
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect((host, int(port)))
    data = json.dumps(body).encode()
    client.sendall(b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(data) + data)
    return client


def state(url: str) -> dict[str, Any]:
    return dict(httpx.get(f"{url}/server_info").json()["internal_states"][0])


def test_who_never_reads_is_disconnected(url: str, caplog: pytest.LogCaptureFixture) -> None:
    aborted = state(url)["aborted"]
    with asked(url, LARGE) as client, caplog.at_level(logging.WARNING):
        deadline = time.monotonic() + 30
        while not (now := state(url))["#running"]:
            assert time.monotonic() < deadline
        while now["#running"]:
            assert time.monotonic() < deadline, "it runs for nobody"
            other = httpx.post(f"{url}/generate", json={"text": "hello", "sampling_params": {"max_new_tokens": 2}})
            assert other.status_code == 200
            now = state(url)
        assert now["aborted"] == aborted + 1
        (message,) = [record.message for record in caplog.records]
        assert str(client.getsockname()) in message and "SGLANG_WRITE_TIMEOUT" in message
        received = b""
        with contextlib.suppress(ConnectionResetError):
            while piece := client.recv(1 << 20):
                received += piece
        assert b"data:" in received and b"[DONE]" not in received


@pytest.mark.parametrize("size", [1 << 10, 1 << 18])
def test_who_reads_slowly_is_served(url: str, size: int) -> None:
    """So many bytes at a time of what would be a hundred megabytes, for several times as long as the timeout."""
    with asked(url, LARGE) as client:
        for _ in range(12):
            time.sleep(TIMEOUT / 4)
            left = size
            while left > 0:
                left -= len(client.recv(size)) or pytest.fail("disconnected")
        assert state(url)["#running"] == 1


class FullTransport(asyncio.Transport):
    """To which as much is added as the client takes."""

    aborted = False

    def __init__(self) -> None:
        super().__init__({"socket": socket.socket()})

    def get_write_buffer_size(self) -> int:
        return 100_000

    def is_closing(self) -> bool:
        return False

    def abort(self) -> None:
        self.aborted = True


@pytest.mark.parametrize("takes", [True, False])
def test_full_buffers_are_no_sign_of_a_client_that_takes_nothing(takes: bool) -> None:
    async def aborted() -> bool:
        config = uvicorn.Config(lambda scope: None, log_config=None)  # type: ignore[arg-type,return-value]
        make: Any = http_protocol(0.2)
        protocol, transport = make(config=config, server_state=ServerState(), app_state={}), FullTransport()
        protocol.connection_made(transport)
        for _ in range(40):
            protocol.pause_writing()
            await asyncio.sleep(0.02)
            if takes:
                protocol.resume_writing()
        protocol.connection_lost(ConnectionResetError())
        return transport.aborted

    assert asyncio.run(aborted()) is not takes


def test_the_rest_of_a_finished_answer_is_not_kept(url: str, caplog: pytest.LogCaptureFixture) -> None:
    """The server is done with it, and waits only for the client to take it."""
    params = {"max_new_tokens": 200, "ignore_eos": True, "n": 4}
    body = {**LARGE, "stream": False, "top_logprobs_num": 320, "sampling_params": params}  # 7 MB
    with asked(url, body), caplog.at_level(logging.WARNING):
        deadline = time.monotonic() + 60
        while not caplog.records:
            assert time.monotonic() < deadline
            time.sleep(0.05)
