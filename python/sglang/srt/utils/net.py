"""Addresses, and the socket that the server listens on, opened before anything expensive is done."""

from __future__ import annotations

import socket
from dataclasses import dataclass

import psutil

from sglang.srt.errors import StartupError


def listen_on(host: str, port: int, flags: tuple[str, str] = ("--host", "--port")) -> socket.socket:
    """A socket that listens on ``host`` and ``port`` (0: any free one): from now on nobody else can.

    ``flags`` are where the two come from.

    Raises:
        StartupError: the port is taken, not permitted, or the host is not an address of this machine.
    """
    try:
        # (family, type, protocol, name, address)
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except socket.gaierror as error:
        raise StartupError(f"{flags[0]} {host}: {error.strerror}; give an address of this machine") from None
    listener = socket.socket(family, socket.SOCK_STREAM)
    # A connection of a previous server in TIME_WAIT does not block the port.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        reason = error.strerror or str(error)
        raise StartupError(
            f"can't listen on {host} port {port}: {reason}; choose another one with {flags[1]}"
        ) from None
    return listener


def split_address(address: str) -> tuple[str, int]:
    """``host:port`` in its parts; an IPv6 address is written in brackets.

    Raises:
        ValueError: it is something else; the text says what is expected.
    """
    host, colon, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        host = ""
    if not (host and colon and port.isascii() and port.isdigit() and 1 <= int(port) <= 65535):
        raise ValueError("must be host:port, such as 10.0.0.1:5000 or [fd00::1]:5000")
    return host, int(port)


def interface_of(address: str) -> str | None:
    """The network interface of this machine that has ``address``; None where none has."""
    for interface, addresses in psutil.net_if_addrs().items():
        # A link-local IPv6 address is given with its interface behind a %.
        if any(entry.address.partition("%")[0] == address.partition("%")[0] for entry in addresses):
            return str(interface)
    return None


@dataclass(frozen=True)
class Rendezvous:
    """Where the ranks of a group find each other, the same for all of a machine.

    Attributes:
        store_file: a file that is new, the same for all, and stays: where all ranks are on this machine.
        address: (host, port) of a TCPStore, which machines share; None where they don't.
        interface: name of the network interface that this machine's ranks use; None leaves it to gloo and NCCL. What
            the user has set in ``GLOO_SOCKET_IFNAME`` or ``NCCL_SOCKET_IFNAME`` wins.
        nnodes: machines with the same number of ranks each.
    """

    store_file: str = ""
    address: tuple[str, int] | None = None
    interface: str | None = None
    nnodes: int = 1

    @classmethod
    def on_this_machine(cls, store_file: str) -> Rendezvous:
        """Nothing listens on a network."""
        loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
        return cls(store_file, interface=loopback)
