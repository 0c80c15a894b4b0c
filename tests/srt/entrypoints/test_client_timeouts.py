"""Clients that do not read their answer, and clients that never finish their request."""

import asyncio
import contextlib
import json
import logging
import re
import select
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme
import uvicorn
from uvicorn.config import HTTP_PROTOCOLS
from uvicorn.importer import import_from_string
from uvicorn.server import ServerState

from http_server_thread import serve
from sglang.srt.entrypoints.client_timeouts import http_protocol

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


def address(url: str) -> tuple[str, int]:
    host, _, port = url.removeprefix("http://").partition(":")
    return host, int(port)


def asked(url: str, body: dict[str, Any]) -> socket.socket:
    """A client that has sent its request and takes in little."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(address(url))
    client.sendall(post(body))
    return client


def post(body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    return b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(data) + data


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
        make: Any = http_protocol(0.2, None)
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


# Requests that do not come to their end

READ_TIMEOUT = 1.0
HALF_OF_HEADERS = b"POST /generate HTTP/1.1\r\nhost: x\r\nx-slow: "
HALF_OF_BODY = b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{"
WHOLE = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
# Twice as long as the timeout: a step is 5 ms.
LONG: dict[str, Any] = {"text": "hello", "sampling_params": {"max_new_tokens": 400, "ignore_eos": True}}


@pytest.fixture(scope="module", params=["h11", "httptools"])
def strict(request: pytest.FixtureRequest) -> Iterator[str]:
    """A server for each of the protocols that uvicorn chooses from."""
    pytest.importorskip(request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_READ_TIMEOUT", str(READ_TIMEOUT))
        protocol = import_from_string(HTTP_PROTOCOLS[request.param])
        patch.setattr("sglang.srt.entrypoints.client_timeouts.AutoHTTPProtocol", protocol)
        with serve(random_seed=5, enable_metrics=True) as base:
            yield base


def connected(url: str, sends: bytes = b"") -> socket.socket:
    client = socket.create_connection(address(url), timeout=30)
    client.sendall(sends)
    return client


def rest(client: socket.socket) -> bytes:
    """What comes until the server ends the connection."""
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := client.recv(1 << 20):
            received += piece
    return received


def trickle(client: socket.socket) -> None:
    """Send a byte now and then until the server says something."""
    deadline = time.monotonic() + 10 * READ_TIMEOUT
    while not select.select([client], [], [], READ_TIMEOUT / 10)[0]:
        assert time.monotonic() < deadline, "it is waited for"
        client.sendall(b" ")


def assert_refused(answer: bytes) -> None:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 ") and b"connection: close" in head
    assert b"content-length: %d" % len(body) in head
    assert json.loads(body)["error"]["type"] == "invalid_request_error"


def hung_up(url: str) -> int:
    """Requests of which the application knows that nobody waits for them."""
    found = re.search(r'http_responses_total\{[^}]*status_code="499"[^}]*\} (\d+)', httpx.get(f"{url}/metrics").text)
    return int(found[1]) if found else 0


@pytest.mark.parametrize("goes_on", [False, True], ids=["stops", "trickles"])
@pytest.mark.parametrize("sends", [HALF_OF_HEADERS, HALF_OF_BODY], ids=["headers", "body"])
def test_who_never_finishes_is_disconnected(
    strict: str, sends: bytes, goes_on: bool, caplog: pytest.LogCaptureFixture
) -> None:
    before = hung_up(strict)
    with connected(strict, sends) as client, caplog.at_level(logging.WARNING):
        if goes_on:
            trickle(client)
        assert_refused(rest(client))
        (record,) = caplog.records
        assert record.levelno == logging.WARNING and "SGLANG_READ_TIMEOUT" in record.message
        assert str(client.getsockname()) in record.message and f" {READ_TIMEOUT:g} s" in record.message
    assert hung_up(strict) - before == (sends == HALF_OF_BODY)


def test_who_sends_nothing_is_disconnected_without_a_word(strict: str, caplog: pytest.LogCaptureFixture) -> None:
    """An answer could be taken for that to a request which is under way."""
    with connected(strict) as client:
        assert rest(client) == b"" and not caplog.records


@pytest.mark.parametrize("sends", [HALF_OF_HEADERS, HALF_OF_BODY], ids=["headers", "body"])
def test_the_second_request_of_a_connection_has_its_own_time(strict: str, sends: bytes) -> None:
    with connected(strict, WHOLE) as client:
        assert client.recv(1000).startswith(b"HTTP/1.1 200")
        time.sleep(1.5 * READ_TIMEOUT)  # idle
        client.sendall(WHOLE)
        assert client.recv(1000).startswith(b"HTTP/1.1 200")
        client.sendall(sends)
        assert_refused(rest(client))


@pytest.mark.parametrize("behind", [b"", WHOLE], ids=["alone", "pipelined"])
def test_a_complete_request_may_take_longer(strict: str, behind: bytes) -> None:
    with connected(strict, post(LONG) + behind) as client:
        answer = b""
        while answer.count(b"HTTP/1.1 200") < 1 + bool(behind):
            answer += client.recv(1000) or pytest.fail("disconnected")


def test_what_comes_behind_a_complete_request_has_its_time_afterwards(strict: str) -> None:
    """Whatever happens to other connections."""
    with connected(strict, post(LONG) + HALF_OF_BODY) as client, connected(strict, HALF_OF_BODY) as other:
        assert_refused(rest(other))
        assert state(strict)["#running"] == 1
        first, second, third = rest(client).partition(b"HTTP/1.1 408 ")
        assert first.startswith(b"HTTP/1.1 200") and json.loads(first.partition(b"\r\n\r\n")[2])["text"]
        assert_refused(second + third)


def test_who_is_slow_but_in_time_is_served(strict: str) -> None:
    data = post({"text": "hello", "sampling_params": {"max_new_tokens": 2}})
    with connected(strict) as client:
        for begin in range(0, len(data), len(data) // 4):
            client.sendall(data[begin : begin + len(data) // 4])
            time.sleep(READ_TIMEOUT / 12)
        assert client.recv(1000).startswith(b"HTTP/1.1 200")


def test_an_answer_before_the_end_of_the_request_is_the_only_one(strict: str) -> None:
    with connected(strict, HALF_OF_BODY.replace(b"/generate", b"/nowhere")) as client:
        answer = b""
        while not answer.endswith(b"}}"):
            answer += client.recv(1000) or pytest.fail("disconnected")
        trickle(client)
        answer += rest(client)
    assert answer.startswith(b"HTTP/1.1 404") and answer.count(b"HTTP/1.1") == 1


def test_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The application need not wait until the client agrees to the end of the encrypted connection."""
    authority = trustme.CA()
    pair = authority.issue_cert("127.0.0.1")
    pair.private_key_pem.write_to_path(tmp_path / "key.pem")
    pair.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    context = ssl.create_default_context()
    authority.configure_trust(context)
    monkeypatch.setenv("SGLANG_READ_TIMEOUT", str(READ_TIMEOUT))
    files = {"ssl_keyfile": str(tmp_path / "key.pem"), "ssl_certfile": str(tmp_path / "cert.pem")}
    with serve(**files, enable_metrics=True) as base, httpx.Client(verify=context) as other, caplog.at_level("WARNING"):
        url = base.replace("http:", "https:")
        with context.wrap_socket(connected(base), server_hostname="127.0.0.1") as client:
            client.sendall(HALF_OF_BODY)
            deadline = time.monotonic() + 10 * READ_TIMEOUT
            while 'status_code="499"' not in other.get(f"{url}/metrics").text:
                assert time.monotonic() < deadline
                time.sleep(READ_TIMEOUT / 10)
            assert_refused(rest(client))
        assert all("SGLANG_READ_TIMEOUT" in record.message for record in caplog.records)


def test_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_READ_TIMEOUT", "0")
    with serve() as base, connected(base, WHOLE[:20]) as client:
        assert not select.select([client], [], [], READ_TIMEOUT)[0]
        client.sendall(WHOLE[20:])
        assert client.recv(1000).startswith(b"HTTP/1.1 200")
