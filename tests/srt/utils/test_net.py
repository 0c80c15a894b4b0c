import contextlib
import socket

import pytest

from sglang.srt.errors import StartupError
from sglang.srt.utils.net import Rendezvous, interface_of, listen_on, split_address


def test_taken_port_is_reported_and_a_free_one_accepted():
    with contextlib.closing(socket.socket()) as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        with pytest.raises(StartupError, match=rf"127\.0\.0\.1 port {port}: Address already in use.*--port") as caught:
            listen_on("127.0.0.1", port)
        assert caught.value.exit_code == 1
    with contextlib.closing(listen_on("127.0.0.1", port)) as first:
        assert first.getsockname()[1] == port
        with pytest.raises(StartupError, match="already in use"):
            listen_on("127.0.0.1", port)
    listen_on("127.0.0.1", port).close()


def test_time_wait_does_not_block():
    with contextlib.closing(socket.socket()) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port))
        connection, _ = server.accept()
        connection.close()  # the side that closes first keeps TIME_WAIT
        client.close()
    listen_on("127.0.0.1", port).close()


@pytest.mark.parametrize("host", ["192.0.2.1", "not an address"])
def test_foreign_host(host):
    with pytest.raises(StartupError, match=host):
        listen_on(host, 30000)


def test_flags_are_named_by_where_they_come_from():
    with contextlib.closing(listen_on("127.0.0.1", 0)) as first, pytest.raises(StartupError, match="with --dist$"):
        listen_on("127.0.0.1", first.getsockname()[1], ("--dist", "--dist"))
    with pytest.raises(StartupError, match="^--dist not an address: "):
        listen_on("not an address", 0, ("--dist", "--dist"))


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("10.0.0.1:5000", ("10.0.0.1", 5000)),
        ("node-0.cluster:1", ("node-0.cluster", 1)),
        ("[fd00::1]:65535", ("fd00::1", 65535)),
    ],
)
def test_addresses(text, parts):
    assert split_address(text) == parts


@pytest.mark.parametrize("text", ["", "host", ":5000", "host:", "host:0", "host:65536", "host:-1", "fd00::1", "a:b:1"])
def test_what_is_no_address(text):
    with pytest.raises(ValueError, match=r"must be host:port, such as"):
        split_address(text)


def test_interfaces():
    loopback = interface_of("127.0.0.1")
    assert loopback is not None and loopback.startswith("lo")
    assert interface_of("192.0.2.77") is None
    assert Rendezvous.on_this_machine("file") == Rendezvous("file", None, loopback, 1)
