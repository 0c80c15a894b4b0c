"""The package beside another distribution that provides the same name."""

import os
import subprocess
import sys
from pathlib import Path

PYTHON = Path(__file__).parents[1] / "python"


def test_upstream_beside_us_is_refused(tmp_path: Path) -> None:
    info = tmp_path / "sglang-0.5.23.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.23\n")
    path = os.pathsep.join([str(PYTHON), str(tmp_path)])
    result = subprocess.run(
        [sys.executable, "-c", "import sglang"], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert result.returncode != 0
    assert "ImportError: the distribution 'sglang' 0.5.23 is installed beside 'sglang-nvfp4'" in result.stderr
    assert "pip uninstall" in result.stderr
