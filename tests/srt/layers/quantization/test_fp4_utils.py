"""Selection: every cell of the precedence table, every device, without any of that hardware."""

import subprocess
import sys
from dataclasses import dataclass, replace

import pytest
import torch

from sglang.srt.errors import ArgumentError
from sglang.srt.layers.quantization import fp4_utils
from sglang.srt.layers.quantization.fp4_utils import (
    Fp4GemmBackend,
    Fp4GemmRunnerBackend,
    Target,
    backends,
    candidates,
    normalize_backend_name,
    resolve_fp4_gemm_backend,
)

VARIABLE = "SGLANG_FLASHINFER_FP4_GEMM_BACKEND"
B200 = Target("cuda", (10, 0), "13.0", "0.6.13", "9.15.0", "1.15", "4.5.0")
NEWEST = Target("cuda", (10, 0), "13.0", "0.7.4", "9.23.1", "1.32.0", "4.8.0", nvrtc="13.5")
CPU = Target("cpu")


# --------------------------------------------------------------------------------------------------- precedence
# (flag, variable) -> (requested, source, number of warnings), on a machine where every backend named here runs.
PRECEDENCE = [
    ("auto", None, "auto", "default", 0),
    ("auto", "", "auto", "default", 0),
    ("auto", "  ", "auto", "default", 0),
    ("auto", "cudnn", "cudnn", VARIABLE, 1),
    ("auto", "flashinfer_cudnn", "cudnn", VARIABLE, 1),
    ("auto", "CUDNN", "cudnn", VARIABLE, 1),
    ("auto", "FlashInfer_CuDNN", "cudnn", VARIABLE, 1),
    ("auto", "auto", "auto", VARIABLE, 1),
    ("cutlass", None, "cutlass", "--fp4-gemm-backend", 0),
    ("cutlass", "", "cutlass", "--fp4-gemm-backend", 0),
    ("cutlass", "cudnn", "cutlass", "--fp4-gemm-backend", 1),
    ("cutlass", "flashinfer_cudnn", "cutlass", "--fp4-gemm-backend", 1),
    ("cutlass", "CUDNN", "cutlass", "--fp4-gemm-backend", 1),
    ("cutlass", "auto", "cutlass", "--fp4-gemm-backend", 0),
    ("cutlass", "cutlass", "cutlass", "--fp4-gemm-backend", 0),
    ("cutlass", "flashinfer_CUTLASS", "cutlass", "--fp4-gemm-backend", 0),
    ("flashinfer_cutlass", "cutlass", "cutlass", "--fp4-gemm-backend", 0),
    ("Cute-DSL", None, "cutedsl", "--fp4-gemm-backend", 0),
    ("flashinfer_trtllm", None, "trtllm", "--fp4-gemm-backend", 0),
]


@pytest.mark.parametrize(("flag", "variable", "requested", "source", "warnings"), PRECEDENCE)
def test_precedence(flag: str, variable: str | None, requested: str, source: str, warnings: int) -> None:
    resolution = resolve_fp4_gemm_backend(flag, variable, B200)
    assert (resolution.requested, resolution.source, len(resolution.warnings)) == (requested, source, warnings)
    assert resolution.name == (requested if requested != "auto" else "cutedsl")
    if warnings and source == VARIABLE:
        assert "deprecated" in resolution.warnings[0] and "--fp4-gemm-backend" in resolution.warnings[0]
    elif warnings:
        assert "ignored" in resolution.warnings[0]


@pytest.mark.parametrize(("flag", "variable"), [("fastest", None), ("auto", "fastest"), ("cutlass", "fastest")])
def test_unknown_value_from_either_lists_the_valid_names(flag: str, variable: str | None) -> None:
    source = "--fp4-gemm-backend" if variable is None else VARIABLE
    with pytest.raises(ArgumentError, match=f"{source} 'fastest' .*valid: auto, .*cutlass") as info:
        resolve_fp4_gemm_backend(flag, variable, B200)
    assert info.value.exit_code == 2


def test_prefix_on_a_name_that_has_none_is_explained() -> None:
    with pytest.raises(ArgumentError, match="did you mean torch"):
        normalize_backend_name("flashinfer_torch")
    with pytest.raises(ArgumentError, match="did you mean w4a16"):
        normalize_backend_name("flashinfer_w4a16")


# ------------------------------------------------------------------------------------------------------ devices
def test_named_backend_that_cannot_run_lists_every_reason() -> None:
    with pytest.raises(ArgumentError) as info:
        resolve_fp4_gemm_backend("cutlass", None, CPU)
    lines = str(info.value).splitlines()
    assert "can't run on cpu" in lines[0]
    assert len(lines) == 1 + len(backends())
    can_run = {line.strip() for line in lines if "can run here" in line}
    assert can_run == {"torch: can run here", "cpu: can run here"}
    assert all("needs a CUDA GPU" in line for line in lines[1:] if line.strip() not in can_run)


ON_ALL = {  # capability -> (what auto takes with everything installed, backends that can run)
    None: ("cpu", {"torch", "cpu"}),
    (7, 5): ("torch", {"torch"}),
    (8, 0): ("w4a16", {"torch", "w4a16"}),
    (8, 6): ("w4a16", {"torch", "w4a16"}),
    (8, 9): ("w4a16", {"torch", "w4a16"}),
    (9, 0): ("w4a16", {"torch", "w4a16"}),
    (10, 0): ("cutedsl", {"torch", "w4a16", "cudnn", "cutlass", "cutedsl", "trtllm"}),
    (10, 3): ("cutedsl", {"torch", "w4a16", "cudnn", "cutlass", "cutedsl", "trtllm"}),
    (10, 7): ("cudnn", {"torch", "w4a16", "cudnn", "cutlass", "cutedsl", "trtllm"}),
    (11, 0): ("cutlass", {"torch", "w4a16", "cudnn", "cutlass"}),
    (12, 0): ("b12x", {"torch", "w4a16", "cudnn", "cutlass", "cutedsl", "b12x"}),
    (12, 1): ("cutlass", {"torch", "w4a16", "cudnn", "cutlass", "cutedsl", "b12x"}),
    (13, 0): ("torch", {"torch"}),
}


@pytest.mark.parametrize("capability", list(ON_ALL), ids=str)
def test_devices(capability: tuple[int, int] | None) -> None:
    target = replace(NEWEST, capability=capability) if capability else CPU
    chosen, runnable = ON_ALL[capability]
    resolution = resolve_fp4_gemm_backend("auto", None, target)
    assert resolution.name == chosen
    assert set(backends()) - set(resolution.reasons) == runnable
    if capability and capability < (10, 0):  # the reason names what it needs and what there is
        assert f"this device has {capability[0]}.{capability[1]}" in resolution.reasons["cutlass"]
    assert "trtllm" not in {backend.name for backend in candidates(target)}  # never unasked


@pytest.mark.parametrize(
    ("change", "backend", "words", "auto"),
    [
        ({"flashinfer": None}, "cutlass", "needs FlashInfer, which is not installed", "torch"),
        ({"flashinfer": "0.5.3"}, "cutlass", "0.6.13 or newer, 0.5.3 is installed", "torch"),
        ({"flashinfer": "0.6.17"}, "cutlass", None, "cutedsl"),
        ({"flashinfer": "nightly"}, "cutlass", "nightly is installed", "torch"),
        ({"cudnn": "9.7.1"}, "cudnn", "cuDNN 9.10.2 or newer, 9.7.1 is loaded", "cutedsl"),
        ({"cudnn": None}, "cudnn", "none is loaded", "cutedsl"),
        ({"cudnn_frontend": None}, "cudnn", "nvidia-cudnn-frontend", "cutedsl"),
        ({"cutlass_dsl": None}, "cutedsl", "nvidia-cutlass-dsl", "cutlass"),
        ({"cuda": "12.6"}, "cutlass", "CUDA 12.8 or newer, this one has 12.6", "torch"),
        ({"cuda": "12.8"}, "cutlass", None, "cutedsl"),
        ({"dtype": torch.float16}, "trtllm", "writes torch.bfloat16", "cutedsl"),
        ({"dtype": torch.float32}, "cutlass", "the model runs in torch.float32", "torch"),
        ({"weight_only": True}, "cutlass", "weight-only", "torch"),
    ],
)
def test_reasons(change: dict[str, object], backend: str, words: str | None, auto: str) -> None:
    target = replace(B200, **change)  # type: ignore[arg-type]
    resolution = resolve_fp4_gemm_backend("auto", None, target)
    assert resolution.name == auto
    if words is None:
        assert backend not in resolution.reasons
    else:
        assert words in resolution.reasons[backend]
        with pytest.raises(ArgumentError, match=f"{backend} can't run on cuda with compute capability 10.0"):
            resolve_fp4_gemm_backend(backend, None, target)


def test_cuda_version_per_device() -> None:
    for capability, minimum in (((10, 3), "12.9"), ((11, 0), "13.0"), ((12, 0), "12.9"), ((12, 1), "12.9")):
        target = replace(B200, capability=capability, cuda="12.8")
        assert f"CUDA {minimum} or newer" in resolve_fp4_gemm_backend("auto", None, target).reasons["cutlass"]


def test_resolution_reads_as_one_line() -> None:
    text = str(resolve_fp4_gemm_backend("auto", None, CPU))
    assert text.startswith("FP4 GEMM backend: cpu (requested: auto). Not here: ")
    assert "\n" not in text and "cudnn, cutlass, cutedsl, trtllm, b12x: needs a CUDA GPU" in text


# ------------------------------------------------------------------------------------------------ public names
@dataclass
class Arguments:
    fp4_gemm_runner_backend: str = "auto"
    device: str = "cpu"
    dtype: str = "auto"


def test_public_names(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(fp4_utils, "_resolution", None)
    monkeypatch.delenv(VARIABLE, raising=False)
    assert fp4_utils.get_fp4_gemm_runner_backend() is Fp4GemmRunnerBackend.AUTO
    assert fp4_utils.get_fp4_gemm_runner_backend().is_auto()
    caplog.set_level("INFO")
    monkeypatch.setenv(VARIABLE, "torch")
    fp4_utils.initialize_fp4_gemm_config(Arguments())  # type: ignore[arg-type]
    assert fp4_utils.get_fp4_gemm_runner_backend() is Fp4GemmRunnerBackend.TORCH
    assert caplog.text.count("deprecated") == 1
    assert "FP4 GEMM backend: torch (requested: torch, from " + VARIABLE in caplog.text
    caplog.clear()
    fp4_utils.initialize_fp4_gemm_config(Arguments(), quiet=True)  # type: ignore[arg-type]
    assert not caplog.records
    with pytest.raises(ArgumentError):
        fp4_utils.initialize_fp4_gemm_config(Arguments("cutlass"))  # type: ignore[arg-type]


def test_every_backend_of_this_version_has_a_member() -> None:
    assert set(backends()) <= {member.value for member in Fp4GemmRunnerBackend}
    assert Fp4GemmRunnerBackend.CUDNN.is_flashinfer_cudnn() and Fp4GemmRunnerBackend.CUDNN.is_flashinfer()
    assert not Fp4GemmRunnerBackend.TORCH.is_flashinfer()


@pytest.mark.parametrize("first", ["flashinfer", "w4a16", "torch_reference"])
def test_the_order_does_not_depend_on_what_was_imported_first(first: str) -> None:
    code = (
        f"import sglang.srt.layers.quantization.fp4_backends.{first}\n"
        "from sglang.srt.layers.quantization.fp4_utils import backends; print(*backends())"
    )
    result = subprocess.run([sys.executable, "-c", code], check=True, timeout=120, capture_output=True, text=True)
    assert result.stdout.split() == ["cudnn", "cutlass", "cutedsl", "trtllm", "b12x", "w4a16", "cpu", "torch"]


def test_a_taken_name_is_an_error_and_a_new_one_registers() -> None:
    with pytest.raises(TypeError, match=r"'cutlass' .*is taken"):
        type("Copy", (Fp4GemmBackend,), {"name": "cutlass"})
    with pytest.raises(TypeError, match=r"'auto' .*is taken"):
        type("Auto", (Fp4GemmBackend,), {"name": "fresh", "aliases": ("auto",)})
    try:
        external = type(
            "External",
            (Fp4GemmBackend,),
            {
                "name": "external_kernel",
                "priority": classmethod(lambda cls, target: 99),
                "unsupported_reason": classmethod(lambda cls, target: None),
            },
        )
        assert backends()["external_kernel"] is external
        assert resolve_fp4_gemm_backend("auto", None, CPU).name == "external_kernel"
    finally:
        fp4_utils._names.pop("external_kernel", None)
    assert "fresh" not in backends()


def test_import_needs_neither_cuda_nor_flashinfer() -> None:
    code = (
        "import sys; sys.modules['flashinfer'] = None\n"
        "from sglang.srt.layers.quantization import fp4_utils as f\n"
        "assert f.resolve_fp4_gemm_backend('auto', None, f.Target('cpu')).name == 'cpu'\n"
        "import torch; assert not torch.cuda.is_initialized()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_importing_the_package_imports_no_torch() -> None:
    code = "import sys, sglang; assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_flags_help_names_every_backend() -> None:
    from sglang.srt.server_args import ServerArgs, field_specs

    text = next(spec.flag.help for spec in field_specs() if spec.name == "fp4_gemm_runner_backend")
    assert all(name in text for name in backends()), text
    assert ServerArgs.from_kwargs(model_path="m").fp4_gemm_runner_backend == "auto"
