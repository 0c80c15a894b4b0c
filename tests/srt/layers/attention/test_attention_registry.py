"""Which attention backend is chosen, and what is said of those that aren't."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from sglang.kernels import cpu_extension
from sglang.srt.errors import ArgumentError, StartupError
from sglang.srt.layers.attention import flashinfer_obstacles
from sglang.srt.layers.attention.attention_registry import attention_backends, create_attention_backend
from sglang.srt.layers.attention.base_attn_backend import AttentionTarget, registry
from sglang.srt.layers.attention.flashinfer_backend import FlashInferAttnBackend
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.quantization.fp4_target import Target

BF16, FP16, FP8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
ON_CPU = AttentionTarget(torch.device("cpu"), BF16, BF16, num_heads=8, num_kv_heads=2, head_dim=64)
ON_GPU = replace(ON_CPU, device=torch.device("cuda"))
H200 = Target("cuda", (9, 0), "13.0", "0.6.13", nvcc="13.0")


@pytest.fixture
def fresh_names() -> Iterator[None]:
    before = dict(registry.names)
    yield
    registry.names.clear()
    registry.names.update(before)


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine on which FlashInfer can compile."""
    on_machine(monkeypatch, H200)
    monkeypatch.setattr(flashinfer_obstacles.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(flashinfer_obstacles.shutil, "which", lambda tool: f"/usr/bin/{tool}")
    return monkeypatch


def on_machine(monkeypatch: pytest.MonkeyPatch, machine: Target) -> None:
    monkeypatch.setattr(Target, "current", lambda device, dtype: replace(machine, dtype=dtype))


def test_auto_takes_the_first_that_can_run(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    caplog.set_level("INFO", logger="sglang")
    monkeypatch.setattr(cpu_extension, "unavailable", lambda: None)
    assert list(attention_backends()) == ["cpu", "flashinfer", "torch_native"]
    assert create_attention_backend("auto", ON_CPU).name == "cpu"
    assert create_attention_backend("auto", replace(ON_CPU, dtype=FP16)).name == "torch_native"
    on_machine(monkeypatch, replace(H200, capability=(7, 5)))
    assert create_attention_backend("auto", ON_GPU).name == "torch_native"
    assert [record.getMessage() for record in caplog.records if "backend: " in record.getMessage()] == [
        "Attention backend: cpu (requested: auto). Not here: flashinfer: needs a CUDA GPU; this device is cpu",
        "Attention backend: torch_native (requested: auto). Not here: cpu: takes float32 and bfloat16, not float16; "
        "flashinfer: needs a CUDA GPU; this device is cpu",
        "Attention backend: torch_native (requested: auto). Not here: cpu: needs a CPU; this device is cuda; "
        "flashinfer: needs compute capability 8.0 or newer; this device has 7.5",
    ]


def test_a_named_backend(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="sglang")
    assert isinstance(create_attention_backend("torch_native", ON_CPU), TorchNativeAttnBackend)
    assert "Attention backend: torch_native (requested: torch_native, from --attention-backend)" in caplog.text
    with pytest.raises(ArgumentError, match="'fa9' is not an attention backend; valid: auto, cpu, flashinfer, torch_n"):
        create_attention_backend("fa9", ON_CPU)


def test_a_refusal_lists_every_backend_with_its_reason() -> None:
    with pytest.raises(ArgumentError) as refusal:
        create_attention_backend("flashinfer", replace(ON_CPU, dtype=FP16, kv_cache_dtype=FP16))
    assert str(refusal.value).splitlines() == [
        "--attention-backend flashinfer can't run on cpu in float16 with a KV cache in float16, head size 64. "
        "Attention backends:",
        "  cpu: takes float32 and bfloat16, not float16",
        "  flashinfer: needs a CUDA GPU; this device is cpu",
        "  torch_native: can run here",
    ]


def test_a_backend_that_does_not_start(fresh_names: None, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(TorchNativeAttnBackend):
        name = "broken"
        priority = 99

        def __init__(self, target: AttentionTarget) -> None:
            raise StartupError("attention backend broken: no compiler")

    caplog.set_level("INFO", logger="sglang")
    with pytest.raises(StartupError, match="broken: no compiler"):
        create_attention_backend("broken", ON_CPU)
    assert create_attention_backend("auto", replace(ON_CPU, dtype=FP16)).name == "torch_native"
    warning = next(record for record in caplog.records if record.levelname == "WARNING")
    assert warning.getMessage() == "attention backend broken: no compiler"
    assert caplog.text.rstrip().endswith("this device is cpu; broken: does not start, see above")


def test_names(fresh_names: None) -> None:
    with pytest.raises(TypeError, match="Attention backend name 'cpu' of .* is taken by .*CpuAttnBackend"):
        type("Copy", (TorchNativeAttnBackend,), {"name": "cpu"})
    type("Variation", (TorchNativeAttnBackend,), {})
    assert list(attention_backends()) == ["cpu", "flashinfer", "torch_native"]
    never = type("Never", (TorchNativeAttnBackend,), {"name": "never", "priority": -1})
    assert list(attention_backends()) == ["cpu", "flashinfer", "torch_native", "never"]
    assert type(create_attention_backend("never", ON_CPU)) is never
    registry.names.pop("torch_native")
    with pytest.raises(StartupError, match="no attention backend runs on cpu in float16"):
        create_attention_backend("auto", replace(ON_CPU, dtype=FP16))


def test_flashinfer_runs(h200: pytest.MonkeyPatch) -> None:
    for target in (ON_GPU, replace(ON_GPU, dtype=FP16, kv_cache_dtype=FP8), replace(ON_GPU, head_dim=256)):
        assert FlashInferAttnBackend.unsupported_reason(target) is None
    for machine in (replace(H200, capability=(8, 0)), replace(H200, capability=(12, 0)), replace(H200, nvcc="12.6")):
        on_machine(h200, machine)
        assert FlashInferAttnBackend.unsupported_reason(ON_GPU) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": torch.float32}, "takes float16 and bfloat16, not float32 (--dtype bfloat16)"),
        (
            {"dtype": FP16},
            "reads a KV cache in the model's float16 or in float8_e4m3fn, not in bfloat16 (--kv-cache-dtype auto)",
        ),
        ({"head_dim": 80}, "has kernels for heads of 64, 128, 256 values, not of 80"),
    ],
)
def test_flashinfer_refuses_models(h200: pytest.MonkeyPatch, changes: dict[str, object], reason: str) -> None:
    assert FlashInferAttnBackend.unsupported_reason(replace(ON_GPU, **changes)) == reason  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"capability": (7, 5)}, "needs compute capability 8.0 or newer; this device has 7.5"),
        (
            {"flashinfer": None},
            "needs FlashInfer, which is not installed (pip install 'sglang-nvfp4[cuda13]')",
        ),
        (
            {"flashinfer": "0.6.12"},
            "needs FlashInfer 0.6.13 or newer, 0.6.12 is installed (pip install 'flashinfer-python>=0.6.13,<0.8')",
        ),
        (
            {"nvcc": None},
            "needs kernels that FlashInfer compiles at first use, and there is no nvcc (apt-get install "
            "cuda-toolkit-13-0)",
        ),
        (
            {"nvcc": "12.4"},
            "needs CUDA 12.6 or newer, the nvcc that FlashInfer calls is 12.4 (apt-get install cuda-toolkit-13-0)",
        ),
        (
            {"nvcc": "12.8", "capability": (12, 0)},
            "needs CUDA 12.9 or newer, the nvcc that FlashInfer calls is 12.8 (apt-get install cuda-toolkit-13-0)",
        ),
    ],
)
def test_flashinfer_refuses_machines(h200: pytest.MonkeyPatch, changes: dict[str, object], reason: str) -> None:
    on_machine(h200, replace(H200, **changes))  # type: ignore[arg-type]
    assert FlashInferAttnBackend.unsupported_reason(ON_GPU) == reason
    # What compiles FP4 kernels, or did before, says nothing here; a package that brings these does.
    h200.setattr(flashinfer_obstacles.importlib.util, "find_spec", lambda name: name == "flashinfer_jit_cache")
    assert FlashInferAttnBackend.unsupported_reason(ON_GPU) == (None if "nvcc" in changes else reason)


@pytest.mark.parametrize(("tool", "fix"), [("ninja", "pip install ninja"), ("c++", "apt-get install g++")])
def test_flashinfer_needs_tools(h200: pytest.MonkeyPatch, tool: str, fix: str) -> None:
    h200.delenv("CXX", raising=False)
    h200.setattr(flashinfer_obstacles.shutil, "which", lambda name: None if name == tool else name)
    reason = f"needs kernels that FlashInfer compiles at first use, and {tool} is not on PATH ({fix})"
    assert FlashInferAttnBackend.unsupported_reason(ON_GPU) == reason
