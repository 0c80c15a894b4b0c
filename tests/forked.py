"""Commands in processes that are forked from one with the slow imports behind it: else what ``python -m`` would run, in
a fraction of the time."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import huggingface_hub.constants

CONTEXT = multiprocessing.get_context("forkserver")
# The process from which they are forked imports these, once for a test run, and does nothing else.
_IMPORTED = (
    "sglang.srt.entrypoints.http_server",
    # What transformers imports when the first config and the first tokenizer are read.
    "transformers.models.auto.tokenization_auto",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.configuration_llama",
    "forked",
)
CONTEXT.set_forkserver_preload([*_IMPORTED])
_TRUE = huggingface_hub.constants.ENV_VARS_TRUE_VALUES


def _run(module: str, arguments: Sequence[str], environment: Mapping[str, str], stdout: str, stderr: str) -> None:
    for path, stream in ((stdout, sys.stdout), (stderr, sys.stderr)):
        stream.flush()
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, 1 if stream is sys.stdout else 2)
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    added = [folder for folder in environment.get("PYTHONPATH", "").split(os.pathsep) if folder]
    sys.path[:] = [*added, *(folder for folder in sys.path if folder not in added)]
    importlib.invalidate_caches()
    # The one variable of ours that a library reads while it is imported.
    huggingface_hub.constants.HF_HUB_OFFLINE = environment.get("HF_HUB_OFFLINE", "").upper() in _TRUE
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


class ForkedProcess:
    """``python -m module arguments``, with the methods of :class:`subprocess.Popen` that tests need.

    Args:
        environment: all of it.
        stdout, stderr: files, which may be the same.
    """

    def __init__(
        self, module: str, arguments: Sequence[str], environment: Mapping[str, str], stdout: Path, stderr: Path
    ) -> None:
        work = module, list(arguments), dict(environment), str(stdout), str(stderr)
        self._process = CONTEXT.Process(target=_run, args=work)
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(str(self._process), timeout or 0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run_module(
    module: str, arguments: Sequence[str], environment: Mapping[str, str], timeout: float = 120
) -> subprocess.CompletedProcess[str]:
    """Such a process from its beginning to its end, with what it wrote."""
    with tempfile.TemporaryDirectory() as folder:
        files = Path(folder) / "stdout", Path(folder) / "stderr"
        process = ForkedProcess(module, arguments, environment, *files)
        try:
            status = process.wait(timeout)
        finally:
            process.kill()
        return subprocess.CompletedProcess([module, *arguments], status, *(file.read_text() for file in files))
