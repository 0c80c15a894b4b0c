"""Every example runs as its docstring says."""

import subprocess
import sys
from pathlib import Path

from launched_server import FIXTURES, environment, launched

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


def test_openai_client(tmp_path: Path) -> None:
    with launched(MODEL, tmp_path) as server:
        assert run("openai_client.py", server.url + "/v1").strip()
