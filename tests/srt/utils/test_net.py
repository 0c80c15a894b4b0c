import contextlib
import socket

import pytest

from sglang.srt.errors import StartupError
from sglang.srt.utils.net import listen_on


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
