"""Servers of several nodes: how they meet, agree and end together. Here all are on the loopback interface."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest
from test_server_process import Server, free_port, in_background, is_running, running
from torch.distributed import TCPStore

from fake_scheduler import Fault
from http_server_thread import FIXTURE
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.entrypoints.nodes import Nodes, Peer, agreed, make_nodes
from sglang.srt.entrypoints.scheduler_process import SchedulerProcesses
from sglang.srt.errors import StartupError
from sglang.srt.managers.io_struct import PortArgs
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.net import Rendezvous


class Cluster:
    """Nodes of one event loop that meet at a free port; ``changes`` are arguments of one of them."""

    def __init__(self, nnodes: int, **arguments: Any) -> None:
        self._arguments: dict[str, Any] = {
            "model_path": str(FIXTURE), "device": "cpu", "tp_size": nnodes, "nnodes": nnodes, "dist_timeout": 20,
            "dist_init_addr": f"127.0.0.1:{free_port()}", **arguments,
        }  # fmt: skip
        self.made: list[Nodes] = []

    def node(self, rank: int, **changes: Any) -> Nodes:
        args = ServerArgs(**{**self._arguments, "node_rank": rank, "random_seed": 100 + rank, **changes})
        node = make_nodes(args, ModelConfig.from_folder(FIXTURE))
        assert node is not None
        self.made.append(node)
        return node

    async def meet(self, nnodes: int) -> tuple[list[Nodes], list[Rendezvous]]:
        nodes = [self.node(rank) for rank in range(nnodes)]
        return nodes, list(await asyncio.gather(*(node.meet() for node in nodes)))


def in_a_loop(scenario: Callable[[Cluster], Awaitable[None]], nnodes: int = 2, **arguments: Any) -> None:
    async def run() -> None:
        cluster = Cluster(nnodes, **arguments)
        try:
            await asyncio.wait_for(scenario(cluster), 60)
        finally:
            for node in cluster.made:
                node.close()

    asyncio.run(run())


def test_they_meet_on_one_interface_and_end_together() -> None:
    async def scenario(cluster: Cluster) -> None:
        nodes, met = await cluster.meet(3)
        assert len(set(met)) == 1 and met[0].nnodes == 3
        assert met[0].interface is not None and met[0].interface.startswith("lo")
        assert [node.random_seed for node in nodes] == [100] * 3
        assert met[0].address is not None
        host, port = met[0].address
        stores = [TCPStore(host, port, is_master=False, timeout=timedelta(seconds=5)) for _ in range(2)]
        stores[0].set("key", b"value")
        assert stores[1].get("key") == b"value"
        listening = {c.laddr.ip for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN}
        assert listening == {"127.0.0.1"}
        with pytest.raises(ConnectionRefusedError):  # all have come
            socket.create_connection((nodes[0]._host, nodes[0]._port))
        nodes[2].tell_end("TP2 has died.", "line\n" * 10_000)
        for node in nodes[:2]:
            end = await node.ended
            assert end.error == "node 2: TP2 has died." and end.traceback.endswith("line\n")
            assert len(end.traceback) == 20_000

    in_a_loop(scenario, 3)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_node_that_dies_without_a_word_is_missed(lost: int) -> None:
    async def scenario(cluster: Cluster) -> None:
        nodes, _ = await cluster.meet(3)
        for peer in list(nodes[lost]._peers.values()):
            peer.close()
        for node in (nodes[1 - lost], nodes[2]):
            assert (await node.ended).error == f"node {lost} at 127.0.0.1 is gone without a word"

    in_a_loop(scenario, 3)


def test_an_end_as_asked_and_the_wish_to_drain() -> None:
    async def scenario(cluster: Cluster) -> None:
        (first, other), _ = await cluster.meet(2)
        other.ask_to_drain()
        await first.drain
        assert not first.ended.done() and not other.ended.done()
        first.close()
        first.close()
        assert (await other.ended).error == ""

    in_a_loop(scenario)


def test_other_arguments_are_turned_away_and_the_right_ones_still_come() -> None:
    async def scenario(cluster: Cluster) -> None:
        first = cluster.node(0, cuda_graph_bs=(1, 2))
        meeting = asyncio.ensure_future(first.meet())
        with pytest.raises(StartupError, match=r"node 1 has --page-size 16, node 0 has 1; all nodes need the same"):
            await cluster.node(1, page_size=16).meet()
        same = cluster.node(1, port=4000, served_model_name="x", log_level="error", cuda_graph_bs=(1, 2))
        await asyncio.gather(meeting, same.meet())

    in_a_loop(scenario, cuda_graph_bs=(1,))


def test_what_nodes_agree_on_has_no_secrets() -> None:
    args = ServerArgs(model_path=str(FIXTURE), device="cpu", api_key="sesame", admin_api_key="barley")
    common = agreed(args, ModelConfig.from_folder(FIXTURE))
    assert "sesame" not in str(common) and "barley" not in str(common)
    assert common["--tp-size"] == 1 and "--node-rank" not in common and len(common["config.json with SHA-256"]) == 64


def test_a_number_is_taken_once_and_free_again_when_its_node_left() -> None:
    async def scenario(cluster: Cluster) -> None:
        meeting = asyncio.ensure_future(cluster.node(0).meet())
        early = cluster.node(1)
        waiting = asyncio.ensure_future(early.meet())
        await asyncio.sleep(0.2)
        with pytest.raises(StartupError, match="there is a node 1 already; give each machine a --node-rank of its own"):
            await cluster.node(1).meet()
        waiting.cancel()
        early.close()
        await asyncio.sleep(0.2)
        await asyncio.gather(meeting, cluster.node(1).meet(), cluster.node(2).meet())

    in_a_loop(scenario, 3)


def test_who_does_not_come_is_named() -> None:
    async def scenario(cluster: Cluster) -> None:
        words = r"of 3 nodes, number 2 did not come to 127.0.0.1:\d+ within 1 seconds \(--dist-timeout\)"
        first, other = cluster.node(0), cluster.node(1)
        results = await asyncio.gather(first.meet(), other.meet(), return_exceptions=True)
        assert all(isinstance(result, StartupError) for result in results)
        for result in results:
            with pytest.raises(StartupError, match=words):
                raise result  # type: ignore[misc]
        assert str(results[1]).startswith("node 0: ")

    in_a_loop(scenario, 3, dist_timeout=1)


def test_nobody_at_the_address() -> None:
    async def scenario(cluster: Cluster) -> None:
        began = asyncio.get_running_loop().time()
        with pytest.raises(StartupError, match=r"can't be reached at .* within 1 seconds.*: Connect"):
            await cluster.node(1).meet()
        assert asyncio.get_running_loop().time() - began < 5

    in_a_loop(scenario, dist_timeout=1)


def test_an_address_of_nobody() -> None:
    async def scenario(cluster: Cluster) -> None:
        with pytest.raises(StartupError, match=r"--dist-init-addr"):
            await cluster.node(0, dist_init_addr="192.0.2.1:4000").meet()

    in_a_loop(scenario)


def test_something_else_at_the_address_and_strangers_who_call() -> None:
    async def speaks_something_else(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 mail.example.org ESMTP\n")

    async def scenario(cluster: Cluster) -> None:
        server = await asyncio.start_server(speaks_something_else, "127.0.0.1", 0)
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        with pytest.raises(StartupError, match="node 0 at 127.0.0.1 is gone without a word"):
            await cluster.node(1, dist_init_addr=address).meet()
        server.close()

        first = cluster.node(0)
        meeting = asyncio.ensure_future(first.meet())
        await asyncio.sleep(0.1)
        calls = [socket.create_connection((first._host, first._port)) for _ in range(3)]
        calls[0].sendall(b"GET / HTTP/1.1\r\n\r\n")
        calls[1].sendall(b'{"type":"End","error":"by a stranger"}\n{"type":"Drain"}\n')
        other = cluster.node(1)
        await asyncio.gather(meeting, other.meet())
        calls[2].sendall(b'{"type":"Hello","node_rank":1,"agreed":{}}\n')
        for call in calls:
            call.close()
        await asyncio.sleep(0.1)
        assert not (first.ended.done() or first.drain.done() or other.ended.done())

    in_a_loop(scenario)


def test_a_message_in_pieces() -> None:
    async def scenario(cluster: Cluster) -> None:
        messages: list[Any] = []
        lost: list[Peer] = []
        listener = socket.create_server(("127.0.0.1", 0))
        ours = socket.create_connection(listener.getsockname())
        accepted, _ = listener.accept()
        peer = Peer(accepted, lambda _, message: messages.append(message), lost.append)
        for piece in (b'{"type":"End",', b'"error":"x"}\n{"type":"Dr', b'ain"}\n'):
            ours.sendall(piece)
            await asyncio.sleep(0.05)
        assert [type(message).__name__ for message in messages] == ["End", "Drain"] and not lost
        ours.close()
        await asyncio.sleep(0.05)
        assert lost == [peer]
        listener.close()

    in_a_loop(scenario)


def says_why_it_ends(args: ServerArgs, port_args: PortArgs, writer: Connection, rank: int) -> None:
    writer.send({"status": "ready", "rank": rank})
    if rank == 1:
        writer.send({"status": "error", "traceback": "Traceback: the cause"})
        sys.exit(3)
    time.sleep(600)


def test_the_traceback_of_a_rank_reaches_node_0(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(cluster: Cluster) -> None:
        nodes, _ = await cluster.meet(2)
        ports = PortArgs.create()
        processes = [SchedulerProcesses(says_why_it_ends, node._args, ports, node) for node in nodes]
        reports = await asyncio.gather(*(one.ready() for one in processes), return_exceptions=True)
        assert reports[0] == {"status": "ready", "rank": 0}
        first, other = await asyncio.gather(*(one.died() for one in processes))
        assert other == "The scheduler process TP1 ended with exit status 3."
        assert first == f"node 1: {other}"
        assert "Of another node:\nTraceback: the cause" in caplog.text
        for one in processes:
            one.stop(grace=0)
        ports.remove()

    in_a_loop(scenario)


def two_nodes(stack: ExitStack, folder: Path, *arguments: str) -> list[Server]:
    """Servers with fake schedulers, one rank each."""
    common = ["--skip-server-warmup", "--tp-size", "2", "--nnodes", "2", "--dist-init-addr", f"127.0.0.1:{free_port()}"]
    servers = []
    for rank in (0, 1):
        (folder / str(rank)).mkdir()
        servers.append(stack.enter_context(running(folder / str(rank), *common, "--node-rank", str(rank), *arguments)))
    return servers


@pytest.mark.parametrize(
    ("node", "victim", "words"),
    [
        (0, "rank", "The scheduler process TP0 was killed by signal 9."),
        (1, "rank", "The scheduler process TP1 was killed by signal 9."),
        (0, "server", "node 0 at 127.0.0.1 is gone without a word"),
        (1, "server", "node 1 at 127.0.0.1 is gone without a word"),
    ],
)
def test_what_dies_on_one_node_ends_both(tmp_path: Path, node: int, victim: str, words: str) -> None:
    with ExitStack() as stack:
        servers = two_nodes(stack, tmp_path, "--random-seed", "30")
        for server in servers:
            server.wait("/health", 200)
        (pid,) = servers[node].scheduler_pids()
        pids = [pid, *servers[1 - node].scheduler_pids()]
        assert servers[1].status("/v1/models") == 404
        long = {"text": "hello", "sampling_params": {"max_new_tokens": 500, "temperature": 0}}
        if node == 1:
            thread, results = in_background(lambda: servers[0].http.post("/generate", json=long))
        if victim == "server":
            pid = servers[node].process.pid or 0
        os.kill(pid, signal.SIGKILL)
        for number, server in enumerate(servers):
            assert server.exit_status() == (-9 if victim == "server" and number == node else 1)
            if victim == "rank" or number != node:
                assert words in server.log and "Traceback" not in server.log
        if node == 1:
            thread.join()
            assert results[0].status_code == 500 and words in results[0].text
        deadline = time.monotonic() + 10
        while any(map(is_running, pids)):
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_a_rank_that_can_not_start_ends_both(tmp_path: Path) -> None:
    with ExitStack() as stack:
        servers = two_nodes(stack, tmp_path, "--random-seed", str(int(Fault.DIES_EARLY)))
        servers[1].process.join(60)  # processes start meanwhile
        assert [server.exit_status() for server in servers] == [1, 1]
        words = "The scheduler process TP1 ended with exit status 7 before it was ready."
        assert servers[0].log.splitlines()[-1].endswith(f"node 1: {words}")
        assert servers[1].log.splitlines()[-1] == f"error: {words}"


def test_a_signal_while_nodes_wait_for_each_other(tmp_path: Path) -> None:
    for rank in ("0", "1"):
        (tmp_path / rank).mkdir()
        address = ["--nnodes", "2", "--node-rank", rank, "--dist-init-addr", f"127.0.0.1:{free_port()}"]
        with running(tmp_path / rank, "--tp-size", "2", *address) as server:
            server.wait("/health", 503)
            server.signal(signal.SIGTERM)
            assert server.exit_status() == 0
            assert "Traceback" not in server.log and list(server.temporary.iterdir()) == []
