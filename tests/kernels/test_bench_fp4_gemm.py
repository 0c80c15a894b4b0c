"""The benchmark's report, from a run on a CPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

NAMES = ("torch", "cpu", "cpu:w4a4", "bf16")
SCRIPT = Path(__file__).parents[2] / "benchmark" / "bench_fp4_gemm.py"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, str]:
    """What was written and what was printed."""
    path = tmp_path_factory.mktemp("bench") / "report.json"
    command = [
        sys.executable,
        SCRIPT,
        "--device",
        "cpu",
        "--backends",
        "torch,cpu,cpu:w4a4,bf16,humming,llama.cpp,nosuch",
    ]
    command += ["--shapes", "96x64,32x128", "--m", "1,3", "--repeats", "1", "--flush-mib", "1", "--output", path]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(path.read_text()), done.stdout


def test_rows_are_complete_and_right(run: tuple[dict, str]) -> None:
    report, _ = run
    assert [(row["backend"], row["n"], row["k"], row["m"]) for row in report["rows"]] == [
        (name, n, k, m) for n, k in ((96, 64), (32, 128)) for m in (1, 3) for name in NAMES
    ]
    for row in report["rows"]:
        assert set(row) == {"backend", "n", "k", "m", "us", "tflops", "gbps", "rel_err"}
        assert row["us"] > 0
        weight_bytes = row["n"] * row["k"] * (1 / 2 + 1 / 16)
        assert row["gbps"] == pytest.approx(weight_bytes / row["us"] / 1e3, abs=0.06)
    errors = {name: max(r["rel_err"] for r in report["rows"] if r["backend"] == name) for name in NAMES}
    assert 5e-4 < errors["torch"] < 2.5e-3  # rounding of the result
    assert errors["torch"] == errors["cpu"] < errors["bf16"] < 5e-3  # and of the weights
    assert 0.05 < errors["cpu:w4a4"] < 0.15  # and of the input, to four bits
    assert report["machine"]["versions"]["torch"]


def test_absent_backends_are_named(run: tuple[dict, str]) -> None:
    _, printed = run
    assert "llama.cpp 96x64: ModuleNotFoundError: No module named 'llama_cpp'" in printed
    assert "humming 96x64: ModuleNotFoundError" in printed
    assert (
        "nosuch 96x64: ValueError: not a backend; there are w4a16, bf16, fp32, humming, gemlite, llama.cpp" in printed
    )
