"""What SGLang's own NVFP4 GEMM tests need of this package, so that their files run here unchanged.

Read from sgl-project/sglang (commit: file):

    386f208d, e6da6e30: test/srt/test_nvfp4_gemm.py
    fc75f8dd, 05f70dc5: test/registered/quant/test_nvfp4_gemm.py
    83340093, 05f70dc5: test/registered/quant/test_nvfp4_gemm_sm120.py
    its manual copy: test/manual/quant/test_nvfp4_gemm_archived.py
"""

import importlib
import inspect
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang.srt.errors import ArgumentError
from sglang.srt.layers.quantization.fp4_utils import backends, normalize_backend_name
from sglang.srt.server_args import prepare_server_args
from sglang.test import few_shot_gsm8k, gsm8k, run_eval

TESTS = Path(__file__).parent
FIXTURES = TESTS / "fixtures"

# What they import, and how they call it: positional arguments and keywords.
USED: dict[tuple[str, str], list[tuple[tuple[Any, ...], dict[str, Any]]]] = {
    ("sglang.srt.utils", "get_device_sm"): [((), {})],
    ("sglang.srt.utils", "kill_process_tree"): [((1,), {})],
    ("sglang.test.ci.ci_register", "register_cuda_ci"): [
        ((), {"est_time": 360, "suite": "stage-c-test-4-gpu-b200"}),
        ((), {"est_time": 401, "stage": "base-c", "runner_config": "4-gpu-b200"}),
    ],
    ("sglang.test.few_shot_gsm8k", "run_eval"): [((object(),), {})],
    ("sglang.test.run_eval", "run_eval"): [((object(),), {})],
    ("sglang.test.test_utils", "DEFAULT_TIMEOUT_FOR_SERVER_LAUNCH"): [],
    ("sglang.test.test_utils", "DEFAULT_URL_FOR_TEST"): [],
    ("sglang.test.test_utils", "CustomTestCase"): [],
    ("sglang.test.test_utils", "try_cached_model"): [(("org/name",), {})],
    ("sglang.test.test_utils", "popen_launch_server"): [
        (("org/name", "http://127.0.0.1:21000"), {"timeout": 600, "other_args": ["--trust-remote-code"]})
    ],
}
# Fields of the namespaces that they make.
FEW_SHOT_FIELDS = ["num_shots", "data_path", "num_questions", "max_new_tokens", "parallel", "host", "port"]
RUN_EVAL_FIELDS = ["base_url", "model", "eval_name", "api", "max_tokens", "num_examples", "num_threads"]
BACKENDS = [
    "auto",
    "cutlass",
    "cudnn",
    "flashinfer_cutlass",
    "flashinfer_cudnn",
    "flashinfer_trtllm",
    "flashinfer_cutedsl",
]


@pytest.mark.parametrize(("module", "name"), USED)
def test_names_and_signatures(module: str, name: str) -> None:
    value = getattr(importlib.import_module(module), name)
    for args, kwargs in USED[module, name]:
        inspect.signature(value).bind(*args, **kwargs)


def test_fields() -> None:
    for kind, names in ((few_shot_gsm8k.Options, FEW_SHOT_FIELDS), (run_eval.Options, RUN_EVAL_FIELDS)):
        options = gsm8k.take_options(kind, SimpleNamespace(**{name: name for name in names}))
        assert all(getattr(options, name) == name for name in names)


@pytest.mark.parametrize("backend", BACKENDS)
def test_server_arguments(backend: str) -> None:
    arguments = ["--trust-remote-code", "--quantization", "modelopt_fp4", "--fp4-gemm-backend", backend]
    args = prepare_server_args(["--model-path", "m", *arguments])
    assert args.trust_remote_code and args.quantization == "modelopt_fp4"
    assert normalize_backend_name(args.fp4_gemm_runner_backend) in ("auto", *backends())


def test_no_cuda_graphs_in_prefill() -> None:
    """What the SM120 file asks for; its older version had another flag for it."""
    args = prepare_server_args(["--model-path", "m", "--cuda-graph-backend-prefill=disabled"])
    assert args.cuda_graph_backend_prefill == "disabled"
    with pytest.raises(ArgumentError, match="use --cuda-graph-backend-prefill disabled"):
        prepare_server_args(["--model-path", "m", "--disable-piecewise-cuda-graph"])


# A file of their form: a server once per class, then both of the runners that they have used over time.
FILE = """
import unittest
from types import SimpleNamespace
from urllib.parse import urlparse

from sglang.srt.utils import get_device_sm, kill_process_tree
from sglang.test.ci.ci_register import register_cuda_ci
from sglang.test.few_shot_gsm8k import run_eval as few_shot
from sglang.test.run_eval import run_eval
from sglang.test.test_utils import (
    DEFAULT_TIMEOUT_FOR_SERVER_LAUNCH,
    DEFAULT_URL_FOR_TEST,
    CustomTestCase,
    popen_launch_server,
    try_cached_model,
)

register_cuda_ci(est_time=1, suite="none")


class TestServed(CustomTestCase):
    @classmethod
    def setUpClass(cls):
        cls.model = try_cached_model("some-organisation/some-model")
        flags = ["--trust-remote-code", "--quantization", "modelopt_fp4", "--fp4-gemm-backend", "auto"]
        cls.process = popen_launch_server(
            cls.model, DEFAULT_URL_FOR_TEST, timeout=DEFAULT_TIMEOUT_FOR_SERVER_LAUNCH, other_args=flags
        )

    @classmethod
    def tearDownClass(cls):
        kill_process_tree(cls.process.pid)

    def test_generate(self):
        url = urlparse(DEFAULT_URL_FOR_TEST)
        metrics = few_shot(
            SimpleNamespace(
                num_shots=2,
                data_path=None,
                num_questions=3,
                max_new_tokens=4,
                parallel=2,
                host=f"{url.scheme}://{url.hostname}",
                port=url.port,
            )
        )
        self.assertLess(metrics["accuracy"], 1)

    def test_completions(self):
        metrics = run_eval(
            SimpleNamespace(
                base_url=DEFAULT_URL_FOR_TEST,
                model=self.model,
                eval_name="gsm8k",
                api="completion",
                max_tokens=4,
                num_examples=3,
                num_threads=2,
            )
        )
        self.assertLess(metrics["score"], 1)


@unittest.skipIf(get_device_sm() < 1000, "a GPU of the future")
class TestSkipped(CustomTestCase):
    def test_fails(self):
        self.fail()


if __name__ == "__main__":
    unittest.main()
"""


def free_gpu_number() -> str:
    """A value of CUDA_VISIBLE_DEVICES whose port of ``DEFAULT_URL_FOR_TEST`` is free."""
    for number in range(9, -1, -1):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", 21000 + 1000 * number)) != 0:
                return str(number)
    raise AssertionError("ten servers run here")


def test_a_file_of_that_form(tmp_path: Path) -> None:
    """Where the model is in ``DEFAULT_MODEL_CACHE_DIR`` and GSM8K in the cache, as ``python FILE`` runs it."""
    shutil.copytree(FIXTURES / "tiny-llama-modelopt-nvfp4", tmp_path / "models" / "some-organisation" / "some-model")
    data = tmp_path / "cache" / "gsm8k" / "test.jsonl"
    data.parent.mkdir(parents=True)
    shutil.copy(FIXTURES / "gsm8k_small.jsonl", data)
    file = tmp_path / "test_like_upstream.py"
    file.write_text(FILE)
    env = {
        **{key: value for key, value in os.environ.items() if not key.startswith("SGLANG_")},
        "PYTHONPATH": str(TESTS.parent / "python"),
        "DEFAULT_MODEL_CACHE_DIR": str(tmp_path / "models"),
        "SGLANG_CACHE_DIR": str(tmp_path / "cache"),
        "CUDA_VISIBLE_DEVICES": free_gpu_number(),
    }
    done = subprocess.run([sys.executable, str(file), "-v"], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "OK (skipped=1)" in done.stderr and "Ran 3 tests" in done.stderr
    assert "Accuracy: " in done.stdout and "Score: " in done.stdout
    assert "server_args=" in done.stderr and "FP4 GEMM backend: " in done.stderr
