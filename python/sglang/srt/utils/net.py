"""Network checks before anything expensive is done."""

import socket

from sglang.srt.errors import StartupError


def check_port_free(host: str, port: int) -> None:
    """Make sure that the server can listen on ``host`` and ``port``.

    Raises:
        StartupError: the port is taken, not permitted, or the host is not an address of this machine.
    """
    try:
        # (family, type, protocol, name, address)
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except socket.gaierror as error:
        raise StartupError(f"--host {host}: {error.strerror}; give an address of this machine") from None
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As the server does: a connection of a previous server in TIME_WAIT does not block the port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
            probe.listen(1)
        except OSError as error:
            reason = error.strerror or str(error)
            raise StartupError(
                f"can't listen on {host} port {port}: {reason}; choose another one with --port"
            ) from None
