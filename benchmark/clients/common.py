"""What the client scripts share: a server, a client in a virtual environment of its own, the file of results."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from sglang.srt.utils import kill_process_tree
from sglang.test.test_utils import popen_launch_server

ROOT = Path(__file__).parents[2]
FIXTURE = ROOT / "tests" / "fixtures" / "tiny-llama-bf16"
RESULTS = ROOT / "benchmark" / "results" / "clients.txt"


def arguments(description: str, default_model: Path = FIXTURE) -> argparse.ArgumentParser:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # a stopped script stops its servers too
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="python of the virtual environment that has the client")
    parser.add_argument("--model-path", type=Path, default=default_model)
    parser.add_argument("--record", action="store_true", help=f"write the result into {RESULTS.relative_to(ROOT)}")
    return parser


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def start_server(model: Path, port: int, *flags: str, log: Path | None = None) -> subprocess.Popen[bytes]:
    """A server on the CPU in float32, ready; what it writes goes to ``log``."""
    quiet = (log or Path(os.devnull)).open("a")
    return popen_launch_server(
        str(model), f"http://127.0.0.1:{port}", 300, device="cpu",
        other_args=["--dtype", "float32", "--max-running-requests", 32, *flags], return_stdout_stderr=(quiet, quiet),
    )  # fmt: skip


@contextlib.contextmanager
def server(model: Path, *flags: str) -> Iterator[str]:
    """The URL of such a server."""
    port = free_port()
    process = start_server(model, port, *flags)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        kill_process_tree(process.pid)


def run_client(command: Sequence[object], **environment: str) -> str:
    """What a client prints; offline as far as hubs are concerned. Raises CalledProcessError if it fails."""
    words = [str(word) for word in command]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "PYTHONPATH": "", "COLUMNS": "160"}
    begin = time.monotonic()
    done = subprocess.run(
        words, env={**os.environ, **offline, **environment}, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    print(
        f"# {Path(words[0]).name} ... took {time.monotonic() - begin:.0f} s, status {done.returncode}", file=sys.stderr
    )
    if done.returncode:
        print(done.stdout, file=sys.stderr)
    done.check_returncode()
    return done.stdout


def version(python: str, distribution: str) -> str:
    code = f"from importlib.metadata import version; print(version({distribution!r}))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def report(name: str, lines: Sequence[str], record: bool) -> None:
    """Print a client's result and, if wanted, put it in place of its last one in the results file."""
    text = f"== {name}\n" + "\n".join(lines) + "\n"
    print(text)
    if record:
        old = RESULTS.read_text() if RESULTS.exists() else ""
        sections = {part.split("\n", 1)[0]: part for part in re.split(r"(?m)^(?=== )", old) if part.startswith("== ")}
        key = f"== {name}".split(" ", 2)[1]
        kept = {head: part for head, part in sections.items() if head.split(" ", 2)[1] != key}
        parts = [*(part.rstrip() + "\n" for part in kept.values()), text]
        RESULTS.write_text("\n".join(sorted(parts)))
