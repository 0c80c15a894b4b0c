"""Launching a server for a test, and ending it."""

import io
import os
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest

from sglang.srt.utils import common as utils
from sglang.srt.utils import get_device_sm, kill_process_tree
from sglang.test import test_utils
from sglang.test.test_utils import popen_launch_server, try_cached_model

MODEL = str(Path(__file__).parents[1] / "fixtures" / "tiny-llama-modelopt-nvfp4")


def free_url() -> str:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


def test_a_server_and_its_end(capfd: pytest.CaptureFixture[str]) -> None:
    url = free_url()
    out, err = io.StringIO(), io.StringIO()
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    process = popen_launch_server(
        MODEL, url, 120, "a-key", ("--max-total-tokens", 1024), env, return_stdout_stderr=(out, err), device="cpu"
    )
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    try:
        assert len(family) > 1
        # It runs the package that is tested, whatever is installed.
        assert family[0].environ()["PYTHONPATH"] == str(Path(test_utils.__file__).parents[2])
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(f"{url}/get_server_info")
        request = urllib.request.Request(f"{url}/get_server_info", headers={"Authorization": "Bearer a-key"})
        with urllib.request.urlopen(request) as reply:
            assert b'"device":"cpu"' in reply.read().replace(b" ", b"")
        # Both the caller's files and this process's own streams have the log.
        assert "The server is fired up and ready to roll!" in err.getvalue()
        assert "The server is fired up and ready to roll!" in capfd.readouterr().err
        with pytest.raises(ValueError, match="something listens at .* already"):
            popen_launch_server(MODEL, url, 120)
    finally:
        kill_process_tree(process.pid)
    assert process.wait(0) == -9
    assert not any(member.is_running() and member.status() != psutil.STATUS_ZOMBIE for member in family)
    with socket.create_server(("127.0.0.1", int(url.rpartition(":")[2]))):
        pass  # the port is free at once
    kill_process_tree(process.pid)  # of a process that is gone: nothing


def test_a_server_that_ends_is_told_at_once() -> None:
    with pytest.raises(RuntimeError, match="the server ended with status 2; its last lines:") as caught:
        popen_launch_server(MODEL, free_url(), 3600, other_args=["--fp4-gemm-backend", "cutlas"])
    assert "error: --fp4-gemm-backend 'cutlas' is not an FP4 GEMM backend" in str(caught.value)


def test_a_server_that_takes_too_long_is_killed() -> None:
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(TimeoutError, match="not ready after 0 s; its last lines:"):
        popen_launch_server(MODEL, free_url(), 0)
    assert set(psutil.Process().children(recursive=True)) <= before


def test_what_is_not_supported_is_refused() -> None:
    with pytest.raises(ValueError, match="base_url must be like"):
        popen_launch_server(MODEL, "http://127.0.0.1", 1)
    with pytest.raises(TypeError, match="pd_separated"):
        popen_launch_server(MODEL, free_url(), 1, pd_separated=True)  # type: ignore[call-arg]


CHILDREN = """
import subprocess, sys, time
child = [sys.executable, "-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"]
subprocess.Popen(child)
print("started", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("include_parent", [True, False])
def test_kill_process_tree(include_parent: bool) -> None:
    with subprocess.Popen([sys.executable, "-c", CHILDREN], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        (child,) = psutil.Process(process.pid).children()
        kill_process_tree(process.pid, include_parent)
        assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
        assert process.poll() == (-9 if include_parent else None)
        process.kill()


def test_a_process_that_does_not_die_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(utils, "KILL_TIMEOUT", 0.2)
    with subprocess.Popen([sys.executable, "-c", CHILDREN], stdout=subprocess.PIPE) as process:
        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match=rf"\[{process.pid}.* still run 0.2 s"):
            patch.setattr(psutil.Process, "kill", lambda self: None)
            kill_process_tree(process.pid)
        kill_process_tree(process.pid)


def test_device_sm(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for capability, sm in (((9, 0), 90), ((10, 3), 103), ((12, 0), 120)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, value=capability: value)
        assert get_device_sm() == sm
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert get_device_sm() == 0


def test_cached_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DEFAULT_MODEL_CACHE_DIR", raising=False)
    assert try_cached_model("org/name") == "org/name"
    monkeypatch.setenv("DEFAULT_MODEL_CACHE_DIR", str(tmp_path))
    assert try_cached_model("org/name") == "org/name"
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert try_cached_model("org/name") == str(tmp_path / "org" / "name")


@pytest.mark.parametrize(("visible", "port"), [("", 21000), ("0,1", 21000), ("3", 24000), ("GPU-1234", 21000)])
def test_url_depends_on_the_gpu(visible: str, port: int) -> None:
    code = "from sglang.test.test_utils import DEFAULT_URL_FOR_TEST; print(DEFAULT_URL_FOR_TEST)"
    path = str(Path(test_utils.__file__).parents[2])
    env = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": visible}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"http://127.0.0.1:{port}"


def test_importing_the_helpers_imports_no_torch() -> None:
    """A file whose tests are all skipped costs little, and the launched server's own imports are its own."""
    modules = "sglang.test.test_utils, sglang.test.run_eval, sglang.test.few_shot_gsm8k"
    code = f"import sys, {modules}; print('torch' in sys.modules)"
    env = {**os.environ, "PYTHONPATH": str(Path(test_utils.__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
