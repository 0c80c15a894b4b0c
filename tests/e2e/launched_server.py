"""A real server process for a test: what ``python -m sglang.launch_server`` runs, on a free port."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from forked import ForkedProcess, run_module

FIXTURES = Path(__file__).parents[1] / "fixtures"
MODULE = "sglang.launch_server"
# A server that ends is noticed at once; one that downloads its model or compiles its kernels takes its time.
READY_SECONDS = 1800.0


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def arguments_of(model: str | Path, *arguments: str) -> list[str]:
    device = () if "--device" in arguments else ("--device", "cpu")
    return ["--model-path", str(model), *device, *arguments]


def command(model: str | Path, *arguments: str) -> list[str]:
    """One that begins with an interpreter of its own."""
    return [sys.executable, "-m", MODULE, *arguments_of(model, *arguments)]


def environment(**extra: str) -> dict[str, str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("SGLANG_")}
    path = [str(Path(__file__).parents[2] / "python"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**clean, "PYTHONPATH": os.pathsep.join(path), "HF_HUB_OFFLINE": "1", **extra}


def run_to_exit(model: str | Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """A start that must fail: its output and status."""
    return run_module(MODULE, arguments_of(model, *arguments), environment(**env))


class Server:
    def __init__(self, process: ForkedProcess | subprocess.Popen[bytes], url: str, log: Path) -> None:
        self.process, self.url, self._log = process, url, log

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def post(self, path: str, **body: object) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=300)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=60)

    def generate(self, **body: object) -> dict[str, object]:
        response = self.post("/generate", **body)
        assert response.status_code == 200, response.text
        return response.json()  # type: ignore[no-any-return]


@contextmanager
def launched(model: str | Path, folder: Path, *arguments: str, **env: str) -> Iterator[Server]:
    """The server, ready; afterwards it must end with status 0 on SIGTERM (unless the test ended it)."""
    port = free_port()
    log = folder / "server.log"
    log.write_bytes(b"")
    process = ForkedProcess(MODULE, arguments_of(model, "--port", str(port), *arguments), environment(**env), log, log)
    server = Server(process, f"http://127.0.0.1:{port}", log)
    try:
        deadline = time.monotonic() + READY_SECONDS
        while True:
            assert process.poll() is None, f"the server ended with {process.returncode}:\n{server.log}"
            assert time.monotonic() < deadline, f"not ready after {READY_SECONDS:g} s:\n{server.log}"
            try:
                if server.get("/health").status_code == 200:
                    break
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        yield server
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0, server.log
    finally:
        process.kill()
        process.wait()
