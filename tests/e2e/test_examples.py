"""Every example runs as its docstring says."""

import json
import re
import subprocess
import sys
from pathlib import Path

from launched_server import FIXTURES, Server, environment

EXAMPLES = Path(__file__).parents[2] / "examples"
MODEL = FIXTURES / "tiny-llama-modelopt-nvfp4"


def run(name: str, *arguments: str) -> str:
    result = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_nvfp4_linear() -> None:
    output = run("nvfp4_linear.py")
    assert "FP4 GEMM backend: " in output and "y [8, 1000] torch.bfloat16" in output


def test_offline_engine() -> None:
    output = run("offline_engine.py", str(MODEL))
    assert output.count("(16 tokens)") + output.count(" tokens)") >= 2 and "'Water boils at' -> " in output


def test_openai_client(tiny_server: Server) -> None:
    assert run("openai_client.py", tiny_server.url + "/v1").strip()


def test_tool_calls(tiny_server: Server) -> None:
    arguments, call = run("tool_calls.py", tiny_server.url + "/v1").split("add(")
    a, b = json.loads(arguments).values()
    assert call.startswith(f"{a}, {b}) = {a + b}\n")


def test_structured_outputs(tiny_server: Server) -> None:
    city, month = run("structured_outputs.py", tiny_server.url).splitlines()
    assert re.fullmatch(r"City\(name=.{2,}, continent='[A-Z][a-z]+', inhabitants=\d{1,8}\)", city)
    assert re.fullmatch(r"(19|20)\d\d-(0[1-9]|1[0-2])", month)
