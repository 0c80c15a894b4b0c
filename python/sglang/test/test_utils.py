"""A server for a test, by SGLang's names."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
import unittest
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, TextIO
from urllib.parse import urlsplit

import sglang
from sglang.srt.utils import kill_process_tree as kill_process_tree  # importers take it from here too
from sglang.test.client import answers

# A server that dies is noticed at once; this is for one that downloads its model and compiles its kernels.
DEFAULT_TIMEOUT_FOR_SERVER_LAUNCH = 1800

TAIL_LINES = 60


def _first_gpu() -> int:
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "")[:1]
    return int(first) if first.isdigit() else 0


# Tests on different GPUs of one machine use different ports, SGLang's.
DEFAULT_URL_FOR_TEST = f"http://127.0.0.1:{21000 + 1000 * _first_gpu()}"


class CustomTestCase(unittest.TestCase):
    """SGLang's base class of tests, without its retries: a test that failed once has failed."""


def try_cached_model(model_repo: str) -> str:
    """The folder ``model_repo`` ("organisation/name") below ``DEFAULT_MODEL_CACHE_DIR`` if there is one, else the hub
    id as it is."""
    cache = os.environ.get("DEFAULT_MODEL_CACHE_DIR")
    folder = Path(cache, model_repo).absolute() if cache else None
    return str(folder) if folder is not None and folder.is_dir() else model_repo


def popen_launch_server(
    model: str,
    base_url: str,
    timeout: float,
    api_key: str | None = None,
    other_args: Sequence[object] | None = None,
    env: Mapping[str, str] | None = None,
    return_stdout_stderr: tuple[TextIO, TextIO] | None = None,
    device: str = "auto",
) -> subprocess.Popen[bytes]:
    """``python -m sglang.launch_server``, of the package that the caller runs, ready to answer requests.

    Args:
        model: folder or hub id.
        base_url: "http://HOST:PORT", where the server shall listen.
        timeout: seconds until it must have answered ``/health_generate``.
        api_key: the server's ``--api-key``.
        other_args: further arguments; numbers are converted.
        env: the server's environment. None: this process's.
        return_stdout_stderr: two text files that also get what the server writes.
        device: "cpu", "cuda", or "auto" for the server's own choice.

    Returns:
        The process; :func:`kill_process_tree` ends it.

    Raises:
        ValueError: a ``base_url`` without a port, or one where something listens already.
        RuntimeError: the server ended; the text has its status and last lines.
        TimeoutError: it is not ready in time, and was killed; the text has its last lines.
    """
    host, port = urlsplit(base_url).hostname, urlsplit(base_url).port
    if host is None or port is None:
        raise ValueError(f"popen_launch_server: base_url must be like http://127.0.0.1:21000, not {base_url!r}")
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=5):
        raise ValueError(f"popen_launch_server: something listens at {base_url} already; it would be tested instead")

    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", model, "--host", host, "--port", str(port)]
    command += [] if device == "auto" else ["--device", device]
    command += [] if api_key is None else ["--api-key", api_key]
    command += [str(argument) for argument in other_args or ()]
    child_env = dict(os.environ if env is None else env)
    package = str(Path(sglang.__file__).parents[1])
    child_env["PYTHONPATH"] = os.pathsep.join(filter(None, [package, child_env.get("PYTHONPATH")]))
    process = subprocess.Popen(command, env=child_env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    tail: deque[str] = deque(maxlen=TAIL_LINES)
    out, err = return_stdout_stderr or (None, None)
    readers = [_follow(process.stdout, 1, out, tail), _follow(process.stderr, 2, err, tail)]

    deadline = time.monotonic() + timeout
    try:
        while not answers(f"{base_url}/health_generate", api_key=api_key):
            if process.poll() is not None:
                for reader in readers:
                    reader.join(5)
                raise RuntimeError(f"the server ended with status {process.returncode}; its last lines:\n{_text(tail)}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"the server is not ready after {timeout:g} s; its last lines:\n{_text(tail)}")
            time.sleep(0.1)
    except BaseException:
        kill_process_tree(process.pid)
        process.wait()
        raise
    return process


def _follow(stream: IO[bytes], descriptor: int, copy: TextIO | None, tail: deque[str]) -> threading.Thread:
    """Pass on what the server writes until it closes ``stream``."""

    def run() -> None:
        with stream:
            for line in stream:
                text = line.decode(errors="replace")
                tail.append(text)
                # A reader that ended because a test closed its file would block the server on a full pipe.
                with contextlib.suppress(OSError):
                    os.write(descriptor, line)
                with contextlib.suppress(OSError, ValueError):
                    if copy is not None:
                        copy.write(text)
                        copy.flush()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def _text(tail: deque[str]) -> str:
    return "".join(list(tail))
