"""A real server process for a test: ``python -m sglang.launch_server`` on a free port."""

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

FIXTURES = Path(__file__).parents[1] / "fixtures"


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def command(model: str | Path, *arguments: str) -> list[str]:
    device = () if "--device" in arguments else ("--device", "cpu")
    return [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), *device, *arguments]


def environment(**extra: str) -> dict[str, str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("SGLANG_")}
    path = [str(Path(__file__).parents[2] / "python"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**clean, "PYTHONPATH": os.pathsep.join(path), "HF_HUB_OFFLINE": "1", **extra}


def run_to_exit(model: str | Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """A start that must fail: its output and status."""
    return subprocess.run(
        command(model, *arguments), env=environment(**env), capture_output=True, text=True, timeout=120
    )


class Server:
    def __init__(self, process: subprocess.Popen[bytes], url: str, log: Path) -> None:
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
def launched(model: str | Path, tmp_path: Path, *arguments: str, **env: str) -> Iterator[Server]:
    """The server, ready; afterwards it must end with status 0 on SIGTERM (unless the test ended it)."""
    port = free_port()
    log = tmp_path / "server.log"
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command(model, "--port", str(port), *arguments), env=environment(**env), stdout=stream, stderr=stream
        )
    server = Server(process, f"http://127.0.0.1:{port}", log)
    try:
        deadline = time.monotonic() + 180
        while True:
            assert process.poll() is None, f"the server ended with {process.returncode}:\n{server.log}"
            assert time.monotonic() < deadline, f"not ready after 180 s:\n{server.log}"
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
        if process.poll() is None:
            process.kill()
            process.wait()
