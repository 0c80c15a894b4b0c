"""One server per FP4 GEMM backend, held to log-probabilities, a multiple-choice set and few-shot GSM8K.

The demo model runs wherever a backend does; a backend that can't run here is skipped with its own reason. A large
model needs a GPU and is asked for by environment variables (docs/testing.md):

    FP4_MODEL             folder or hub id, such as nvidia/Llama-3.1-8B-Instruct-NVFP4
    FP4_GSM8K_DATA        GSM8K's test split as JSON lines; unset: fetched from the hub
    FP4_GSM8K_QUESTIONS   how many of its 1319 problems are asked, all by default
    FP4_GSM8K_ACCURACY    what must be exceeded, 0.64 by default
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from fp4_checks import (
    BACKENDS,
    ON_GPU,
    SCHEMES,
    SMALL_CACHE,
    Scheme,
    check_resolution,
    fixture_logprob_rms,
    greedy_texts,
    gsm8k,
    hub_environment,
    make_w4a4_demo_model,
    mean_nll,
    right_choices,
    served,
    skip_unless_it_runs,
)
from launched_server import FIXTURES, Server

from sglang.srt.platforms import resolve_device

# The first server of a backend may have to compile its kernels.
pytestmark = pytest.mark.timeout(1800)

W4A4_FIXTURE = FIXTURES / "tiny-llama-modelopt-nvfp4"
# Correct runs of that fixture are 0.24 (float16) to 0.29 (bfloat16) off; a scale that is 5 % off makes 0.40 to 0.46.
FIXTURE_RMS = 0.36
# Problems that are solved by repeating a number; the demo model solves 4 of 4.
EASY_PROBLEMS = FIXTURES / "gsm8k_small.jsonl"
EASY_ACCURACY = 0.75


def few_shot(server: Server) -> dict[str, float]:
    return gsm8k(server, data_path=str(EASY_PROBLEMS), num_shots=3, num_questions=4, max_new_tokens=16)


@pytest.fixture(scope="module")
def texts() -> dict[tuple[str, bool], list[str]]:
    """What the demo model said with a backend, weight-only or not."""
    return {}


@pytest.fixture(scope="module")
def w4a4_model_dir(demo_bf16_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("w4a4") / "model"
    make_w4a4_demo_model(folder, demo_bf16_dir)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_demo_model(
    scheme: Scheme,
    backend: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    texts: dict[tuple[str, bool], list[str]],
) -> None:
    skip_unless_it_runs(backend, scheme.weight_only)
    # Only now is the model made.
    model = request.getfixturevalue("demo_model_dir" if scheme.weight_only else "w4a4_model_dir")
    with served(model, tmp_path, "--fp4-gemm-backend", backend, *SMALL_CACHE) as server:
        check_resolution(server, backend)
        assert mean_nll(server) == pytest.approx(scheme.nll, rel=scheme.tolerance)
        assert right_choices(server) >= scheme.right
        metrics = few_shot(server)
        assert metrics["accuracy"] >= EASY_ACCURACY and metrics["invalid"] <= 1 - EASY_ACCURACY
        assert 0 < metrics["output_throughput"] * metrics["latency"] <= 4 * 16
        texts[backend, scheme.weight_only] = greedy_texts(server)


@pytest.mark.parametrize("weight_only", [True, False], ids=["w4a16", "w4a4"])
def test_the_cpu_kernel_says_what_torch_says(weight_only: bool, texts: dict[tuple[str, bool], list[str]]) -> None:
    """Their W4A4 products are equal to the last bit, their weight-only ones within float32 noise."""
    said = [texts[name, weight_only] for name in ("cpu", "torch") if (name, weight_only) in texts]
    if len(said) < 2:
        pytest.skip("needs test_demo_model with cpu and torch in the same run, on a CPU")
    assert said[0] == said[1]


@pytest.mark.parametrize("backend", BACKENDS)
def test_fixture(backend: str, tmp_path: Path) -> None:
    skip_unless_it_runs(backend, weight_only=False)
    arguments = ("--fp4-gemm-backend", backend, "--dtype", "bfloat16", *SMALL_CACHE)
    with served(W4A4_FIXTURE, tmp_path, *arguments) as server:
        check_resolution(server, backend)
        assert fixture_logprob_rms(server) < FIXTURE_RMS


@pytest.mark.skipif(resolve_device().type == "cpu", reason="test_openai_client.py has it on a CPU")
def test_auto(tmp_path: Path) -> None:
    with served(W4A4_FIXTURE, tmp_path, *SMALL_CACHE) as server:
        check_resolution(server, "auto")


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("backend", ON_GPU)
def test_large_model(backend: str, tmp_path: Path) -> None:
    weight_only = backend == "w4a16"
    # auto's choice is to be one of the FlashInfer backends.
    skip_unless_it_runs("cutlass" if backend == "auto" else backend, weight_only)
    model = os.environ.get("FP4_MODEL")
    if not model:
        pytest.skip("no model: set FP4_MODEL to a folder or to nvidia/Llama-3.1-8B-Instruct-NVFP4 (6 GB, from the hub)")
    arguments = ["--fp4-gemm-backend", backend, *(("--quantization", "w4a16_nvfp4") if weight_only else ())]
    with served(model, tmp_path, *arguments, env=hub_environment()) as server:
        check_resolution(server, backend)
        assert right_choices(server) >= SCHEMES["w4a16"].right  # what a model of 135 million parameters reaches
        metrics = gsm8k(
            server,
            data_path=os.environ.get("FP4_GSM8K_DATA") or None,
            num_questions=int(os.environ.get("FP4_GSM8K_QUESTIONS") or 1319),
            parallel=200,
        )
        assert metrics["accuracy"] > float(os.environ.get("FP4_GSM8K_ACCURACY") or 0.64)


# ------------------------------------------------------------------------------------------------ do the checks notice?
@pytest.fixture(scope="module")
def fault_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ``faulty_backend.py`` reads its fault from, beside the metadata of a package with its entry point."""
    site = tmp_path_factory.mktemp("site")
    metadata = site / "faulty-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: faulty\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[sglang.fp4_gemm_backends]\nfaulty = faulty_backend\n")
    file = site / "fault"
    file.write_text("")
    return file


def faulty_server(model: Path, fault_file: Path, folder: Path, *arguments: str) -> Iterator[Server]:
    path = os.pathsep.join([str(fault_file.parent), str(Path(__file__).parent)])
    # The prefix cache must not keep what was computed before a fault.
    arguments = ("--fp4-gemm-backend", "faulty", "--disable-radix-cache", *arguments, *SMALL_CACHE)
    with served(model, folder, *arguments, env={"PYTHONPATH": path, "FAULT_FILE": str(fault_file)}) as running:
        yield running


@pytest.fixture(scope="module")
def faulty_demo(demo_model_dir: Path, fault_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    yield from faulty_server(demo_model_dir, fault_file, tmp_path_factory.mktemp("faulty"))


@pytest.fixture(scope="module")
def faulty_fixture(fault_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("faulty")
    yield from faulty_server(W4A4_FIXTURE, fault_file, folder, "--dtype", "bfloat16")


def test_faults_of_the_demo_model_are_noticed(faulty_demo: Server, fault_file: Path) -> None:
    scheme = SCHEMES["w4a16"]
    right = pytest.approx(scheme.nll, rel=scheme.tolerance)
    fault_file.write_text("")
    assert mean_nll(faulty_demo) == right
    fault_file.write_text("scale 0.98")
    assert mean_nll(faulty_demo) != right
    fault_file.write_text("rows in trtllm's order")
    assert right_choices(faulty_demo) < SCHEMES["w4a4"].right
    assert few_shot(faulty_demo)["accuracy"] < EASY_ACCURACY


@pytest.mark.parametrize("fault", ["scale 1.05", "scale 0.95", "zeros", "nibbles swapped", "rows in trtllm's order"])
def test_faults_of_the_fixture_are_noticed(faulty_fixture: Server, fault_file: Path, fault: str) -> None:
    fault_file.write_text("")
    assert fixture_logprob_rms(faulty_fixture) < FIXTURE_RMS
    fault_file.write_text(fault)
    assert fixture_logprob_rms(faulty_fixture) > FIXTURE_RMS
