"""Server processes to be maltreated: start, memory of the whole tree, how the scheduler is doing, end."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

ROOT = Path(__file__).parents[2]
START_SECONDS = 600.0
# A bound of the answer to anything that costs no computing; generous, since machines differ.
ANSWER_SECONDS = 60.0


@dataclass(frozen=True)
class Setup:
    """What the checks are run on."""

    model: Path
    device: str
    minutes: float
    requests: int
    flags: tuple[str, ...] = field(default=())


class Server:
    """One running server; ``log`` is what it has written so far."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log_file: Path, sockets: Path) -> None:
        self.process = process
        self.url = f"http://127.0.0.1:{port}"
        self.port = port
        self.sockets = sockets
        self._log_file = log_file

    @property
    def log(self) -> str:
        return self._log_file.read_text(errors="replace")

    def processes(self) -> list[psutil.Process]:
        """The HTTP process and all below it."""
        parent = psutil.Process(self.process.pid)
        return [parent, *parent.children(recursive=True)]

    def schedulers(self) -> list[psutil.Process]:
        """The scheduler of every rank, before the first grammar has started a compiler beside them."""
        children = psutil.Process(self.process.pid).children()
        return [child for child in children if "spawn_main" in " ".join(child.cmdline())]

    def rss_mb(self) -> float:
        """Resident memory of all processes together; pages that they share count in each."""
        total = 0
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                total += process.memory_info().rss
        return total / 1e6

    def get(self, path: str, **options: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=ANSWER_SECONDS, **options)

    def post(self, path: str, body: object, timeout: float | None = 600.0, **options: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=timeout, **options)

    def load(self) -> dict[str, float]:
        """Running and waiting requests, and the KV slots that they hold, as the scheduler says itself."""
        state = self.get("/server_info").json()["internal_states"][0]
        used = self.get("/v1/loads").json()["loads"][0]["num_used_tokens"]
        return {"running": state["#running"], "waiting": state["#waiting"], "used tokens": used}

    def left_behind(self, seconds: float = ANSWER_SECONDS) -> list[str]:
        """What is not back to zero after that time: requests, KV slots, or the server itself.

        An idle scheduler checks that every KV slot and row is free or cached, and ends the server if not.
        """
        deadline = time.monotonic() + seconds
        while any(load := self.load().values()):
            if time.monotonic() > deadline:
                return [f"after {seconds:g} s: {load}"]
            time.sleep(0.2)
        wrong = [] if self.post("/flush_cache?timeout=5", {}).status_code == 200 else ["the cache can't be flushed"]
        if self.process.poll() is not None:
            wrong.append(f"the server ended with status {self.process.returncode}")
        return wrong

    def faults_in_log(self) -> list[str]:
        """Lines that only a fault of the server writes."""
        signs = ("Traceback", "Unexpected error", "Task exception", "never retrieved", "hit an exception")
        return [line for line in self.log.splitlines() if any(sign in line for sign in signs)]

    def terminate(self) -> int:
        """SIGTERM; the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(120)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def launch(setup: Setup, *flags: str, **environment: str) -> Server:
    """Start a server and don't wait; the caller must end it."""
    folder = Path(tempfile.mkdtemp(prefix="reliability-"))
    (folder / "sockets").mkdir()
    port = free_port()
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(setup.model), "--port", str(port)]
    command += ["--device", setup.device, *setup.flags, *flags]
    path = os.pathsep.join([str(ROOT / "python"), *filter(None, [os.environ.get("PYTHONPATH")])])
    offline = {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "TMPDIR": str(folder / "sockets")}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command, env={**os.environ, **offline, **environment}, stdout=log, stderr=log, start_new_session=True
        )
    return Server(process, port, folder / "log", folder / "sockets")


def wait_ready(server: Server) -> None:
    """Raises RuntimeError, with the log's end, if the server ends or takes too long."""
    deadline = time.monotonic() + START_SECONDS
    while True:
        if server.process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the server did not start:\n{server.log[-3000:]}")
        with contextlib.suppress(httpx.TransportError):
            if server.get("/health").status_code == 200:
                return
        time.sleep(0.2)


@contextlib.contextmanager
def running(setup: Setup, *flags: str, **environment: str) -> Iterator[Server]:
    """A server that is ready; afterwards nothing of it is left."""
    server = launch(setup, *flags, **environment)
    try:
        wait_ready(server)
        yield server
    finally:
        end(server)


def end(server: Server) -> None:
    """Kill what is left of a server."""
    if server.process.poll() is None:
        tree = server.processes()
        for process in tree:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        server.process.wait()
