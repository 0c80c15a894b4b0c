"""``--fp4-gemm-autotune`` of a real server, with a backend from another package beside ours."""

import json
from pathlib import Path
from typing import Any

import pytest
from launched_server import FIXTURES, Server, launched

MODEL = FIXTURES / "tiny-llama-modelopt-nvfp4"
ARGUMENTS = ("--dtype", "float32", "--chunked-prefill-size", "32", "--max-running-requests", "4")
PROMPT = list(range(40, 60))  # more rows than the plug-in is quick for

# Computes with torch, and is far too slow for more than 8 rows; auto prefers it.
PLUGIN = """
import time
from sglang.srt.layers.quantization.fp4_utils import backends
from sglang.srt.layers.quantization.fp4_backends.torch_reference import TorchBackend

class Plugin(TorchBackend):
    name = "plugin"
    layout = "torch"

    @classmethod
    def priority(cls, target):
        return 50

    def apply(self, x, weight, bias):
        if len(x) > 8:
            time.sleep(0.05)
        return super().apply(x, weight, bias)
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """An installed package that registers a backend, a cache folder of its own, and no C++ compiler, so that ``torch``
    is the only other backend."""
    site = tmp_path / "site"
    metadata = site / "plugin-1.0.dist-info"
    metadata.mkdir(parents=True)
    (site / "fp4_plugin.py").write_text(PLUGIN)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[sglang.fp4_gemm_backends]\nplugin = fp4_plugin\n")
    python = str(Path(__file__).parents[2] / "python")
    settings = {"SGLANG_CACHE_DIR": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1", "CXX": "no-such-compiler"}
    return {"PYTHONPATH": f"{site}:{python}", **settings}


def outputs(server: Server) -> Any:
    params = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
    return server.generate(input_ids=PROMPT, sampling_params=params)["output_ids"]


def choices(server: Server) -> dict[str, dict[str, str]]:
    state = server.get("/get_server_info").json()["internal_states"][0]
    assert state["fp4_gemm_backend"]["resolved"] == "plugin"
    return state["fp4_gemm_choices"]  # type: ignore[no-any-return]


def start(tmp_path: Path, environment: dict[str, str], name: str, *arguments: str) -> tuple[Any, Any, str]:
    folder = tmp_path / name
    folder.mkdir()
    with launched(MODEL, folder, *ARGUMENTS, *arguments, **environment) as server:
        return outputs(server), choices(server), server.log


def test_measured_once_and_used_from_then_on(tmp_path: Path, environment: dict[str, str]) -> None:
    tuned, measured, log = start(tmp_path, environment, "measured", "--fp4-gemm-autotune")
    assert len(measured) == 4 and "4 products measured in" in log
    for by_rows in measured.values():
        *_, (rows, label) = by_rows.items()
        assert label == "torch" and int(rows.removesuffix("-")) <= 9

    (file,) = (tmp_path / "cache" / "fp4_autotune").glob("*.json")
    content = json.loads(file.read_text())
    assert content["products"].keys() == measured.keys() and content["stamp"]["candidates"] == "auto: torch, plugin"

    again, cached, log = start(tmp_path, environment, "cached")
    assert f"FP4 GEMM autotune: 4 products as measured before ({file})" in log
    assert cached == measured and json.loads(file.read_text()) == content

    off, unused, log = start(tmp_path, environment, "off", "--fp4-gemm-autotune", "off")
    assert set(map(str, unused.values())) == {"{'1-': 'plugin'}"} and "FP4 GEMM autotune" not in log
    assert tuned == again == off


def test_tensor_parallel_ranks_measure_once(tmp_path: Path, environment: dict[str, str]) -> None:
    _, measured, log = start(tmp_path, environment, "ranks", "--tp-size", "2", "--fp4-gemm-autotune")
    assert log.count("products measured in") == 1
    assert set(measured) == {f"N={n} K={k} static float32" for n, k in ((256, 256), (256, 128), (512, 256))}
    assert all("torch" in by_rows.values() for by_rows in measured.values())
