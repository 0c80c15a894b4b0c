"""The life of a server process: faults at the start, drain, death of the scheduler."""

import contextlib
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import trustme

from fake_scheduler import MAX_REQ_INPUT_LEN, Fault, run_fake_scheduler
from forked import CONTEXT
from http_server_thread import FIXTURE
from sglang.srt.entrypoints.http_server import launch_server
from sglang.srt.server_args import prepare_server_args
from sglang.srt.utils.cli import run_main

TESTS = Path(__file__).parents[2]
LONG: dict[str, Any] = {"text": "hello", "sampling_params": {"max_new_tokens": 50, "temperature": 0}}
SHORT: dict[str, Any] = {"text": "hello", "sampling_params": {"max_new_tokens": 1}}
READY = "The server is fired up and ready to roll!"


def run_server(log_file: Path, temporary: Path, arguments: list[str]) -> None:
    """Body of a server process: the command line with a fake scheduler."""
    log = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    tempfile.tempdir = str(temporary)
    run_main(lambda: sys.exit(launch_server(prepare_server_args(arguments), run_fake_scheduler)))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


class Server:
    def __init__(self, folder: Path, *arguments: str) -> None:
        self.port = free_port()
        self.log_file = folder / "log"
        self.temporary = Path(tempfile.mkdtemp(prefix="server-"))  # sockets have short paths
        command = ["--model-path", str(FIXTURE), "--device", "cpu", "--port", str(self.port), *arguments]
        self.process = CONTEXT.Process(target=run_server, args=(self.log_file, self.temporary, command))
        self.process.start()
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=30)

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    def status(self, path: str) -> int | None:
        try:
            return self.http.get(path).status_code
        except httpx.TransportError:
            return None

    def wait(self, path: str, status: int) -> None:
        deadline = time.monotonic() + 60
        while self.status(path) != status:
            assert self.process.is_alive() and time.monotonic() < deadline, self.log
            time.sleep(0.02)

    def exit_status(self) -> int:
        self.process.join(20)
        assert self.process.exitcode is not None
        return self.process.exitcode

    def scheduler_pids(self) -> list[int]:
        """The processes of the ranks, in their order."""
        children = psutil.Process(self.process.pid).children()
        ours = [child for child in children if "spawn_main" in " ".join(child.cmdline())]
        return [child.pid for child in sorted(ours, key=lambda child: child.create_time())]

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)


@contextlib.contextmanager
def running(folder: Path, *arguments: str) -> Iterator[Server]:
    server = Server(folder, *arguments)
    try:
        yield server
    finally:
        server.process.kill()
        server.process.join()
        server.http.close()
        shutil.rmtree(server.temporary)


def in_background(call: Any) -> tuple[threading.Thread, list[Any]]:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(call()))
    thread.start()
    return thread, results


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("ranks", [1, 2])
def test_start_and_drain(tmp_path: Path, ranks: int) -> None:
    # A step takes 30 ms: the warm-up of 8 tokens can be watched, and a long request takes 1.5 s.
    with running(tmp_path, "--random-seed", "30", "--tp-size", str(ranks)) as server:
        server.wait("/health", 503)
        assert server.http.post("/generate", json=SHORT).status_code == 503
        # Clients wait for the model by asking for these.
        for path in ("/v1/models", "/get_model_info"):
            assert server.http.get(path).status_code == 503
        assert server.http.get("/metrics").status_code == 404
        assert READY not in server.log
        server.wait("/health", 200)
        assert READY in server.log
        info = server.http.get("/server_info").json()
        assert info["tp_size"] == ranks and info["max_req_input_len"] == MAX_REQ_INPUT_LEN
        pids = server.scheduler_pids()
        assert len(list(server.temporary.iterdir())) == 1
        assert next(server.temporary.iterdir()).stat().st_mode & 0o077 == 0

        thread, results = in_background(lambda: server.http.post("/generate", json=LONG))
        with server.http.stream("POST", "/generate", json={**LONG, "stream": True}) as response:
            lines = response.iter_lines()
            next(lines)
            server.signal(signal.SIGTERM)
            server.wait("/health", 503)
            refused = server.http.post("/generate", json=SHORT)
            assert refused.status_code == 503
            assert set(refused.json()["error"]) == {"message", "type", "param", "code"}
            assert list(lines)[-2:] == ["data: [DONE]", ""]
        thread.join()
        assert results[0].json()["meta_info"]["completion_tokens"] == 50
        assert server.exit_status() == 0
        assert not any(map(is_running, pids))
        assert list(server.temporary.iterdir()) == []
        assert "Traceback" not in server.log


def test_tls_and_secrets_in_a_log_of_everything(tmp_path: Path) -> None:
    authority = trustme.CA()
    pair = authority.issue_cert("127.0.0.1")
    pair.private_key_pem.write_to_path(tmp_path / "key.pem")
    pair.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    arguments = ["--ssl-keyfile", str(tmp_path / "key.pem"), "--ssl-certfile", str(tmp_path / "cert.pem")]
    arguments += ["--ssl-keyfile-password", "buckwheat", "--api-key", "sesame", "--admin-api-key", "barley"]
    arguments += [
        "--log-level",
        "debug",
        "--log-requests",
        "--log-requests-level",
        "3",
        "--skip-server-warmup",
        "--random-seed",
        "5",
    ]
    with running(tmp_path, *arguments) as server:
        context = ssl.create_default_context()
        authority.configure_trust(context)
        plain, server.http = (
            server.http,
            httpx.Client(base_url=f"https://127.0.0.1:{server.port}", timeout=30, verify=context),
        )
        server.wait("/health", 200)
        headers = {"authorization": "Bearer sesame"}
        assert server.http.post("/generate", json=SHORT, headers=headers).status_code == 200
        assert server.http.post("/generate", json=SHORT, headers={"authorization": "Bearer oats"}).status_code == 401
        assert server.http.get("/server_info", headers={**headers, "x-junk": "\x7f" * 3000}).status_code in (200, 400)
        with pytest.raises(httpx.TransportError):
            plain.get("/health")
        plain.close()
        server.signal(signal.SIGTERM)
        assert server.exit_status() == 0
        assert "server_args=ServerArgs(" in server.log and "Receive: obj=" in server.log
        assert f"https://127.0.0.1:{server.port}" in server.log
        assert not [secret for secret in ("sesame", "barley", "buckwheat", "oats") if secret in server.log]


def test_second_signal_ends_at_once(tmp_path: Path) -> None:
    with running(tmp_path, "--random-seed", "30", "--skip-server-warmup") as server:
        server.wait("/health", 200)
        thread, results = in_background(lambda: server.http.post("/generate", json=LONG))
        with server.http.stream("POST", "/generate", json={**LONG, "stream": True}) as response:
            lines = response.iter_lines()
            next(lines)
            server.signal(signal.SIGINT)
            server.wait("/health", 503)
            server.signal(signal.SIGINT)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert '"error"' in rest[-2] and "shutting down" in rest[-2]
        thread.join()
        assert results[0].status_code == 503
        assert server.exit_status() == 0


@pytest.mark.parametrize(
    ("ranks", "victim", "name"),
    [(1, 0, "scheduler process"), (2, 0, "scheduler process TP0"), (2, 1, "scheduler process TP1")],
)
def test_killed_scheduler_ends_the_server(tmp_path: Path, ranks: int, victim: int, name: str) -> None:
    with running(tmp_path, "--random-seed", "30", "--skip-server-warmup", "--tp-size", str(ranks)) as server:
        server.wait("/health", 200)
        pids = server.scheduler_pids()
        assert len(pids) == ranks
        assert pids[0] == server.http.get("/server_info").json()["internal_states"][0]["pid"]
        thread, results = in_background(lambda: server.http.post("/generate", json=LONG))
        openai = {"prompt": "hello", "max_tokens": 50, "stream": True}
        with server.http.stream("POST", "/v1/completions", json=openai) as response:
            lines = response.iter_lines()
            next(lines)
            os.kill(pids[victim], signal.SIGKILL)
            rest = [line for line in lines if line]
        killed = time.monotonic()
        assert rest[-1] == "data: [DONE]"
        assert '"error"' in rest[-2] and f"The {name} was killed by signal 9." in rest[-2]
        thread.join()
        assert results[0].status_code == 500
        assert "killed by signal 9" in results[0].json()["error"]["message"]
        assert server.exit_status() == 1
        assert time.monotonic() - killed < 10
        assert not any(map(is_running, pids))
        assert list(server.temporary.iterdir()) == []


@pytest.mark.parametrize("ranks", [1, 2])
def test_killed_server_takes_the_scheduler_along(tmp_path: Path, ranks: int) -> None:
    with running(tmp_path, "--skip-server-warmup", "--tp-size", str(ranks)) as server:
        server.wait("/health", 200)
        pids = server.scheduler_pids()
        server.process.kill()
        deadline = time.monotonic() + 10
        while any(map(is_running, pids)):
            assert time.monotonic() < deadline
            time.sleep(0.02)


@pytest.mark.parametrize(
    ("fault", "ranks", "status", "message"),
    [
        (Fault.REPORTS_AN_ERROR, 1, 2, "The fake scheduler refuses to start."),
        (Fault.REPORTS_AN_ERROR, 2, 2, "The fake scheduler refuses to start."),
        (Fault.DIES_EARLY, 1, 1, "The scheduler process ended with exit status 7 before it was ready."),
        (Fault.DIES_EARLY, 2, 1, "The scheduler process TP1 ended with exit status 7 before it was ready."),
        (
            Fault.DIES_OF_A_REQUEST,
            1,
            1,
            "The warm-up request failed: The scheduler process ended with exit status 8.",
        ),
    ],
)
def test_scheduler_that_does_not_start(tmp_path: Path, fault: Fault, ranks: int, status: int, message: str) -> None:
    with running(tmp_path, "--random-seed", str(int(fault)), "--tp-size", str(ranks)) as server:
        assert server.exit_status() == status
        assert server.log.splitlines()[-1] == f"error: {message}"
        assert "Traceback" not in server.log
        assert list(server.temporary.iterdir()) == []


@pytest.mark.parametrize("ranks", [1, 2])
def test_signal_while_starting(tmp_path: Path, ranks: int) -> None:
    with running(tmp_path, "--random-seed", str(int(Fault.IS_NEVER_READY)), "--tp-size", str(ranks)) as server:
        server.wait("/health", 503)
        server.signal(signal.SIGTERM)
        assert server.exit_status() == 0
        assert "Traceback" not in server.log
        assert list(server.temporary.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["--model-path", str(FIXTURE), "--no-such-flag"], 2, "--no-such-flag"),
        (["--model-path", "/no/such/folder"], 1, "/no/such/folder"),
    ],
)
def test_command_line_faults(arguments: list[str], status: int, words: str) -> None:
    command = [sys.executable, "-m", "sglang.launch_server", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(TESTS.parent / "python"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == status
    assert words in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
