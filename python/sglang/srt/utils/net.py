"""The socket that the server listens on, opened before anything expensive is done."""

import socket

from sglang.srt.errors import StartupError


def listen_on(host: str, port: int) -> socket.socket:
    """A socket that listens on ``host`` and ``port``: from now on nobody else can.

    Raises:
        StartupError: the port is taken, not permitted, or the host is not an address of this machine.
    """
    try:
        # (family, type, protocol, name, address)
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except socket.gaierror as error:
        raise StartupError(f"--host {host}: {error.strerror}; give an address of this machine") from None
    listener = socket.socket(family, socket.SOCK_STREAM)
    # A connection of a previous server in TIME_WAIT does not block the port.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        reason = error.strerror or str(error)
        raise StartupError(f"can't listen on {host} port {port}: {reason}; choose another one with --port") from None
    return listener
