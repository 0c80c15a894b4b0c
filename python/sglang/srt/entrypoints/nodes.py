"""The servers of several machines (nodes) that share a model: how they meet, agree, and end together.

Node 0 listens at ``--dist-init-addr``. Every other one connects to it, and that connection stays: what ends one node
is told to all of them over it, and a node that dies without a word is noticed because its connection closes or, where
the machine is gone, because it answers no more. Ranks that wait for a dead one for ever are then ended by their server.

Messages are lines of JSON, one of the structures below each. Who can connect is not checked: the address belongs into
a network of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from sglang import __version__
from sglang.srt.errors import StartupError
from sglang.srt.server_args import ServerArgs, field_specs
from sglang.srt.utils.net import Rendezvous, interface_of, listen_on, split_address

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig

logger = logging.getLogger(__name__)

# What may differ from node to node; everything else decides what the ranks compute, and when.
_OWN_ARGUMENTS = """
admin_api_key api_key dist_init_addr dist_timeout host log_level log_level_http mem_fraction_static model_path node_rank
port random_seed revision served_model_name ssl_ca_certs ssl_certfile ssl_keyfile ssl_keyfile_password tokenizer_path
"""
OWN_ARGUMENTS = frozenset(_OWN_ARGUMENTS.split())
RETRY_SECONDS = 0.5
ANSWER_SECONDS = 10.0
# A connection that is silent is probed after the first number of seconds, at intervals of the second, and given up
# after as many probes as the third says.
KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
LONGEST_MESSAGE = 1 << 20
LONGEST_TRACEBACK = 20_000


class Hello(msgspec.Struct, tag=True, kw_only=True):
    """A node's first message to node 0. ``agreed`` is what all nodes must have in common."""

    node_rank: int
    agreed: dict[str, Any]


class Welcome(msgspec.Struct, tag=True, kw_only=True):
    """Node 0's answer once all have come: the port of the TCPStore at its address, and the seed for all."""

    store_port: int
    random_seed: int


class Drain(msgspec.Struct, tag=True, kw_only=True):
    """To node 0: this node was asked to end, please let running requests finish and end all."""


class End(msgspec.Struct, tag=True, kw_only=True):
    """The sender ends, and so must the receiver.

    ``error`` says which node failed and how, a sentence; empty if the end is as asked. ``traceback`` is that of the
    rank that failed, if there is one.
    """

    error: str
    traceback: str = ""


Message = Hello | Welcome | Drain | End
_decoder: msgspec.json.Decoder[Message] = msgspec.json.Decoder(Message)


def agreed(args: ServerArgs, config: ModelConfig) -> dict[str, Any]:
    """What all nodes must have in common, by the words that name it."""
    digest = hashlib.sha256((Path(config.model_path) / "config.json").read_bytes()).hexdigest()
    flags = {spec.names[0]: getattr(args, spec.name) for spec in field_specs() if spec.name not in OWN_ARGUMENTS}
    # As it arrives: tuples are lists there.
    common = {"version": __version__, "config.json with SHA-256": digest, **flags}
    return msgspec.json.decode(msgspec.json.encode(common), type=dict[str, Any])


class Peer:
    """A connection to another node, served by the running event loop.

    Args:
        on_message: called with this and each message.
        on_lost: called once with this when the other side is gone, or sends what is none of the messages.
    """

    def __init__(
        self,
        connection: socket.socket,
        on_message: Callable[[Peer, Message], None],
        on_lost: Callable[[Peer], None],
    ) -> None:
        self.node_rank: int | None = None
        self.address = str(connection.getpeername()[0])
        self.own_address = str(connection.getsockname()[0])
        self._socket, self._on_message, self._on_lost = connection, on_message, on_lost
        self._received = b""
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEPALIVE.items():
            if (option := getattr(socket, name, None)) is not None:  # not everywhere
                connection.setsockopt(socket.IPPROTO_TCP, option, value)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(connection, self._read)

    def send(self, message: Message) -> None:
        """At once, so that it leaves although the process may end next. Messages are few and short."""
        with contextlib.suppress(OSError):  # it is gone, which reading will tell
            self._socket.send(msgspec.json.encode(message) + b"\n")

    def _read(self) -> None:
        try:
            data = self._socket.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        *lines, self._received = (self._received + data).split(b"\n")
        for line in lines:
            try:
                message = _decoder.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError):
                data = b""
                break
            self._on_message(self, message)
        if not data or len(self._received) > LONGEST_MESSAGE:
            self.close()
            self._on_lost(self)

    def close(self) -> None:
        if self._socket.fileno() >= 0:
            if not self._loop.is_closed():
                self._loop.remove_reader(self._socket)
            self._socket.close()


class Nodes(ABC):
    """What one node knows of the others. Made in a running event loop.

    Attributes:
        ended: the End of another node, as soon as one ends or is lost.
        drain: done when another node asks node 0 to drain.
        random_seed: of all nodes, once they have met.
    """

    def __init__(self, args: ServerArgs, config: ModelConfig) -> None:
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[End] = self._loop.create_future()
        self.drain: asyncio.Future[None] = self._loop.create_future()
        self.random_seed = args.random_seed
        self._args = args
        self._agreed = agreed(args, config)
        self._peers: dict[int, Peer] = {}
        assert args.dist_init_addr is not None
        self._host, self._port = split_address(args.dist_init_addr)

    @abstractmethod
    async def meet(self) -> Rendezvous:
        """Wait for the others, ``--dist-timeout`` seconds at most; where this node's ranks meet theirs.

        Raises:
            StartupError: some did not come, can't be reached, or were started with other arguments.
        """

    def tell_end(self, error: str = "", traceback: str = "") -> None:
        """Have the other nodes end, because this one failed or, without ``error``, because that was asked for."""
        words = f"node {self._args.node_rank}: {error}" if error else ""
        self._send_to_all(End(error=words, traceback=traceback[-LONGEST_TRACEBACK:]))

    def ask_to_drain(self) -> None:
        """Ask node 0 for what SIGTERM does there."""
        self._send_to_all(Drain())

    def close(self) -> None:
        """Close the connections: the end is as asked, unless something else was told. Safe to call twice."""
        self.tell_end()
        for peer in self._peers.values():
            peer.close()
        self._peers.clear()

    def _send_to_all(self, message: Message, sender: Peer | None = None) -> None:
        for peer in self._peers.values():
            if peer is not sender:
                peer.send(message)

    def _on_message(self, peer: Peer, message: Message) -> None:
        if isinstance(message, End):
            self._end(message)
        elif isinstance(message, Drain) and not self.drain.done():
            self.drain.set_result(None)

    def _end(self, message: End) -> None:
        if not self.ended.done():
            self.ended.set_result(message)

    def _rendezvous(self, store_host: str, store_port: int, own_address: str) -> Rendezvous:
        interface = interface_of(own_address)
        logger.info(
            "Node %d of %d: ranks meet at %s port %d, over network interface %s.",
            self._args.node_rank, self._args.nnodes, store_host, store_port, interface or "of the libraries' choice",
        )  # fmt: skip
        return Rendezvous(address=(store_host, store_port), interface=interface, nnodes=self._args.nnodes)


class FirstNode(Nodes):
    """Node 0: it is where the others meet."""

    def __init__(self, args: ServerArgs, config: ModelConfig) -> None:
        super().__init__(args, config)
        self._complete = asyncio.Event()
        self._strangers: set[Peer] = set()
        self._listener: socket.socket | None = None
        self._store: Any = None

    async def meet(self) -> Rendezvous:
        args = self._args
        self._listener = listen_on(self._host, self._port, ("--dist-init-addr", "--dist-init-addr"))
        self._listener.setblocking(False)
        self._loop.add_reader(self._listener, self._accept)
        logger.info("Waiting at %s for %d other node(s).", args.dist_init_addr, args.nnodes - 1)
        try:
            await asyncio.wait_for(self._complete.wait(), args.dist_timeout)
        except asyncio.TimeoutError:
            absent = ", ".join(str(node) for node in range(1, args.nnodes) if node not in self._peers)
            message = (
                f"of {args.nnodes} nodes, number {absent} did not come to {args.dist_init_addr} within "
                f"{args.dist_timeout} seconds (--dist-timeout); see the log of each, and whether a firewall is between"
            )
            self.tell_end(message)
            raise StartupError(message) from None
        self._hear_no_more()
        from torch import distributed

        own_address = self._peers[1].own_address
        listener = listen_on(own_address, 0)
        port = int(listener.getsockname()[1])
        self._store = distributed.TCPStore(  # type: ignore[attr-defined]
            own_address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        self._send_to_all(Welcome(store_port=port, random_seed=args.random_seed))
        return self._rendezvous(own_address, port, own_address)

    def close(self) -> None:
        super().close()
        self._hear_no_more()

    def _hear_no_more(self) -> None:
        for peer in self._strangers:
            peer.close()
        self._strangers.clear()
        if self._listener is not None:
            if not self._loop.is_closed():
                self._loop.remove_reader(self._listener)
            self._listener.close()
            self._listener = None

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            connection, _ = self._listener.accept()
        except OSError:  # it has gone again
            return
        self._strangers.add(Peer(connection, self._on_message, self._on_lost))

    def _on_message(self, peer: Peer, message: Message) -> None:
        if isinstance(message, Hello) and peer in self._strangers:
            self._on_hello(peer, message)
        elif peer.node_rank is not None:
            super()._on_message(peer, message)

    def _on_hello(self, peer: Peer, hello: Hello) -> None:
        if problem := self._why_not(hello):
            logger.warning("Node %d at %s was turned away: %s", hello.node_rank, peer.address, problem)
            peer.send(End(error=problem))
            return
        self._strangers.discard(peer)
        peer.node_rank = hello.node_rank
        self._peers[hello.node_rank] = peer
        logger.info("Node %d has come from %s.", hello.node_rank, peer.address)
        if len(self._peers) == self._args.nnodes - 1:
            self._complete.set()

    def _why_not(self, hello: Hello) -> str:
        node = hello.node_rank
        for name, value in self._agreed.items():
            if hello.agreed.get(name) != value:
                return (
                    f"node {node} has {name} {hello.agreed.get(name)}, node 0 has {value}; all nodes need the same "
                    "version, model and arguments, with another --node-rank each"
                )
        if not 1 <= node < self._args.nnodes or node in self._peers:
            return f"there is a node {node} already; give each machine a --node-rank of its own"
        return ""

    def _on_lost(self, peer: Peer) -> None:
        self._strangers.discard(peer)
        if peer.node_rank is None:
            return
        if not self._complete.is_set():  # it may come again
            del self._peers[peer.node_rank]
            return
        self._end(End(error=f"node {peer.node_rank} at {peer.address} is gone without a word"))

    def _end(self, message: End) -> None:
        if not self.ended.done():
            self._send_to_all(message)
        super()._end(message)


class OtherNode(Nodes):
    """A node that has joined node 0."""

    def __init__(self, args: ServerArgs, config: ModelConfig) -> None:
        super().__init__(args, config)
        self._welcome: asyncio.Future[Welcome] = self._loop.create_future()

    async def meet(self) -> Rendezvous:
        args = self._args
        connection = await self._connect(self._loop.time() + args.dist_timeout)
        peer = self._peers[0] = Peer(connection, self._on_message, self._on_lost)
        peer.send(Hello(node_rank=args.node_rank, agreed=self._agreed))
        # Node 0 gives up after as long a time, and says who did not come.
        answers: set[asyncio.Future[Any]] = {self._welcome, self.ended}
        await asyncio.wait(answers, timeout=args.dist_timeout + ANSWER_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        if self.ended.done():
            raise StartupError(self.ended.result().error or "node 0 has ended")
        if not self._welcome.done():
            raise StartupError(f"{args.dist_init_addr} does not answer as node 0 would; check --dist-init-addr")
        welcome = self._welcome.result()
        self.random_seed = welcome.random_seed
        return self._rendezvous(peer.address, welcome.store_port, peer.own_address)

    async def _connect(self, deadline: float) -> socket.socket:
        loop, args = self._loop, self._args
        problem = "no address was found"
        waiting = False
        while True:
            try:
                found = await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
            except socket.gaierror as error:
                found, problem = [], error.strerror or str(error)
            for family, kind, _, _, address in found:
                connection = socket.socket(family, kind)
                connection.setblocking(False)
                try:
                    await asyncio.wait_for(loop.sock_connect(connection, address), max(deadline - loop.time(), 0.1))
                    return connection
                except BaseException as error:
                    connection.close()
                    if isinstance(error, asyncio.TimeoutError):
                        problem = "nothing answers"
                    elif isinstance(error, OSError):
                        problem = error.strerror or str(error)
                    else:
                        raise
            if loop.time() > deadline:
                raise StartupError(
                    f"node 0 can't be reached at {args.dist_init_addr} within {args.dist_timeout} seconds "
                    f"(--dist-timeout): {problem}; check --dist-init-addr, the log of node 0, and whether a firewall "
                    "is between"
                )
            if not waiting:
                logger.info("Node 0 can't be reached at %s yet (%s); trying again.", args.dist_init_addr, problem)
                waiting = True
            await asyncio.sleep(RETRY_SECONDS)

    def _on_message(self, peer: Peer, message: Message) -> None:
        if isinstance(message, Welcome) and not self._welcome.done():
            self._welcome.set_result(message)
        else:
            super()._on_message(peer, message)

    def _on_lost(self, peer: Peer) -> None:
        self._end(End(error=f"node 0 at {peer.address} is gone without a word"))


def make_nodes(args: ServerArgs, config: ModelConfig) -> Nodes | None:
    """This node's end of the connections; None where the model is on this machine alone."""
    if args.nnodes == 1:
        return None
    return FirstNode(args, config) if args.node_rank == 0 else OtherNode(args, config)
