"""The benchmark's report, from a run on a CPU."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmark" / "bench_sampling.py"


def test_every_limit_is_measured(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    command = [sys.executable, SCRIPT, "--device", "cpu", "--vocabulary", "3000", "--rows", "1", "3", "--repeats", "2"]
    subprocess.run([*command, "--output", path], check=True, capture_output=True)
    results = json.loads(path.read_text())["results"]
    assert [row["rows"] for row in results] == [1] * 4 + [3] * 4
    assert all(set(row["us"]) == {"sort", "candidates"} and min(row["us"].values()) > 0 for row in results)
