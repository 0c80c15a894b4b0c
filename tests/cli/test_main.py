"""``sglang serve`` and ``sglang version``."""

import subprocess
import sys

import pytest

import sglang
from sglang.cli import main as cli
from sglang.srt.errors import ArgumentError


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ("org/model --port 1", "--model-path org/model --port 1"),
        ("--model-path org/model", "--model-path org/model"),
        ("--model-type llm org/model --tp 2", "--model-path org/model --tp 2"),
        ("--model-type=auto --help", "--help"),
    ],
)
def test_serve_is_launch_server(argv: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    got = []
    monkeypatch.setattr("sglang.launch_server.main", lambda argv: got.append(argv) or sys.exit(7))
    monkeypatch.setattr(sys, "argv", ["sglang", "serve", *argv.split()])
    with pytest.raises(SystemExit, match="7"):
        cli.main()
    assert got == [expected.split()]


def test_diffusion_is_refused() -> None:
    with pytest.raises(ArgumentError, match="--model-type must be auto or llm, not diffusion"):
        cli.serve_argv(["--model-type", "diffusion", "m"])


def run(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "sglang.cli.main", *argv], capture_output=True, text=True, timeout=60)


def test_the_command() -> None:
    version = run("version")
    assert (version.returncode, version.stdout.splitlines()[0]) == (0, f"sglang version: {sglang.__version__}")
    for argv, message in (
        (["generate"], "sglang generate is known from SGLang but not supported"),
        (["srve"], "invalid choice: 'srve'"),
        (["serve", "m", "--no-such-flag"], "unknown argument --no-such-flag"),
    ):
        result = run(*argv)
        assert result.returncode == 2 and message in result.stderr and "Traceback" not in result.stderr
