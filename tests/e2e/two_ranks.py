"""Servers of several tensor-parallel ranks: on one node, and on two that share this machine."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch
from launched_server import Server, command, environment, free_port, launched

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
NEEDS_GPU = [pytest.mark.cuda, pytest.mark.skipif(not GPUS, reason="no CUDA GPU")]
DEVICES = ["cpu", pytest.param("cuda", marks=NEEDS_GPU)]


def rank_processes(*parents: int) -> list[psutil.Process]:
    """The scheduler processes below ``parents``, of each in the order of their ranks."""
    found = []
    for parent in parents:
        ours = [child for child in psutil.Process(parent).children() if "spawn_main" in " ".join(child.cmdline())]
        found += sorted(ours, key=lambda child: child.create_time())
    return found


@contextmanager
def two_ranks(model: Path, folder: Path, device: str, *arguments: str) -> Iterator[tuple[Server, list[psutil.Process]]]:
    """A server of two ranks and their processes. Where there is one GPU they share it, as two nodes."""
    if device == "cpu" or GPUS >= 2:
        with launched(model, folder, "--tp-size", "2", "--device", device, *arguments) as server:
            yield server, rank_processes(server.process.pid)
    else:
        with two_nodes(model, folder, device, 2, *arguments) as nodes:
            yield nodes[0], rank_processes(*(node.process.pid for node in nodes))


@contextmanager
def two_nodes(model: Path, folder: Path, device: str, ranks: int, *arguments: str) -> Iterator[tuple[Server, Server]]:
    """Nodes 0 and 1 with half of ``ranks`` each, ready. Unless the test has ended them,
    SIGTERM to node 0 must end both with status 0 afterwards. Two ranks may have one GPU: NCCL takes nodes with ids of
    their own for two machines."""
    own: list[dict[str, str]] = [{}, {}]
    if device == "cuda":
        gpus = [str(number % GPUS) for number in range(ranks)]
        for node, half in enumerate((gpus[: ranks // 2], gpus[ranks // 2 :])):
            own[node] = {"CUDA_VISIBLE_DEVICES": ",".join(half), "NCCL_HOSTID": f"node{node}"}
    # Bound here, though nobody listens yet, so that no server gets it for its HTTP port.
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("127.0.0.1", 0))
    address, port = f"127.0.0.1:{reserved.getsockname()[1]}", free_port()
    common = (*arguments, "--tp-size", str(ranks), "--device", device, "--nnodes", "2", "--dist-init-addr", address)
    log = folder / "node1.log"
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command(model, "--port", str(port), *common, "--node-rank", "1"),
            env=environment(**own[1]), stdout=stream, stderr=stream,
        )  # fmt: skip
    other = Server(process, f"http://127.0.0.1:{port}", log)
    try:
        with launched(model, folder, *common, "--node-rank", "0", **own[0]) as first:
            yield first, other
        assert process.wait(60) in (0, first.process.returncode), other.log
    finally:
        process.kill()
        process.wait()
        reserved.close()
