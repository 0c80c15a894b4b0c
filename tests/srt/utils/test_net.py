import contextlib
import socket

import pytest

from sglang.srt.errors import StartupError
from sglang.srt.utils.net import check_port_free


def test_taken_port_is_reported_and_a_free_one_accepted():
    with contextlib.closing(socket.socket()) as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        with pytest.raises(StartupError, match=rf"127\.0\.0\.1 port {port}: Address already in use.*--port") as caught:
            check_port_free("127.0.0.1", port)
        assert caught.value.exit_code == 1
    check_port_free("127.0.0.1", port)
    check_port_free("127.0.0.1", port)  # the check itself leaves nothing behind


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
    check_port_free("127.0.0.1", port)


@pytest.mark.parametrize("host", ["192.0.2.1", "not an address"])
def test_foreign_host(host):
    with pytest.raises(StartupError, match=host):
        check_port_free(host, 30000)
