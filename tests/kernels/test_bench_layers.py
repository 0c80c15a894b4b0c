"""The benchmark's report, from a run on a CPU."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmark" / "bench_layers.py"
NAMES = ["embedding", "cos_sin", "rms_norm", "add_rms_norm", "norm_heads", "silu_and_mul"]
NAMES += ["rotate_and_store", "greedy", "layer"]


def test_every_operator_is_measured(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    command = [sys.executable, SCRIPT, "--device", "cpu", "--models", "tiny", "--rows", "1,3", "--repeats", "2"]
    subprocess.run([*command, "--products", "torch", "--output", path], check=True, capture_output=True)
    report = json.loads(path.read_text())
    found = [(row["rows"], row["operator"], row["implementation"]) for row in report["rows"]]
    assert found == [(rows, name, who) for rows in (1, 3) for name in NAMES for who in ("ours", "torch")]
    assert all(row["us"] > 0 and row["host_us"] > 0 for row in report["rows"])
