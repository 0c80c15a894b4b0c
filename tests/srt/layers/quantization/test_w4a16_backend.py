"""Backend ``w4a16``: where it runs, what it says elsewhere, and what its operator returns without data."""

import dataclasses

import pytest
import torch

from fp4_fakes import make_weight
from sglang.kernels.w4a16_layout import unpack
from sglang.srt.layers.quantization import fp4_target, fp4_utils
from sglang.srt.layers.quantization.fp4_autotune import candidates_for
from sglang.srt.layers.quantization.fp4_autotune_measure import layout_of
from sglang.srt.layers.quantization.fp4_backends import w4a16 as w4a16_module
from sglang.srt.layers.quantization.fp4_backends.w4a16 import VARIANTS, W4A16Backend
from sglang.srt.layers.quantization.fp4_utils import Target, candidates, resolve_fp4_gemm_backend
from sglang.srt.layers.quantization.nvfp4 import Activation

HOPPER = Target(device="cuda", capability=(9, 0), cuda="13.0", nvrtc="13.0")


def on(capability: tuple[int, int] | None, **changes: object) -> Target:
    return dataclasses.replace(HOPPER, capability=capability, **changes)


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 7), (8, 9), (9, 0)])
def test_first_choice_where_there_are_no_fp4_units(capability: tuple[int, int]) -> None:
    assert W4A16Backend.unsupported_reason(on(capability)) is None
    assert candidates(on(capability))[0] is W4A16Backend


@pytest.mark.parametrize("capability", [(10, 0), (12, 0)])
def test_on_blackwell_only_for_weight_only_layers(capability: tuple[int, int]) -> None:
    assert W4A16Backend not in candidates(on(capability, weight_only=False))
    names = [backend.name for backend in candidates(on(capability, weight_only=True))]
    assert names.index("w4a16") < names.index("torch")


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (Target(device="cpu"), "needs a CUDA GPU of compute capability 8.0"),
        (on((7, 5)), "needs compute capability 8.0, 8.6, 8.7, 8.9, 9.0, 10.0, "),
        (on((13, 0)), "; this device has 13.0"),
        (on((9, 0), dtype=torch.float32), "multiplies bfloat16 or float16 activations"),
        (on((9, 0), nvrtc=None), "needs NVRTC 12.0 or newer"),
        (on((12, 1), nvrtc="12.8"), "needs NVRTC 12.9 or newer for this device, 12.8 is installed"),
    ],
)
def test_reasons(target: Target, words: str) -> None:
    assert words in str(W4A16Backend.unsupported_reason(target))


@pytest.mark.parametrize(
    ("target", "command"),
    [
        (on((9, 0)), None),
        (on((9, 0), nvrtc=None), "pip install 'nvidia-cuda-nvrtc>=13.0'"),
        (on((9, 0), nvrtc=None, cuda="12.6"), "pip install 'nvidia-cuda-nvrtc-cu12>=12.0'"),
        (on((12, 1), nvrtc="12.8", cuda="12.8"), "pip install 'nvidia-cuda-nvrtc-cu12>=12.9'"),
        (on((11, 0), nvrtc="12.9", cuda="12.9"), "pip install 'nvidia-cuda-nvrtc>=13.0'"),
        (on((7, 5), nvrtc=None), None),
        (Target(device="cpu"), None),
    ],
)
def test_fix(target: Target, command: str | None) -> None:
    assert W4A16Backend.fix(target) == command


@pytest.mark.parametrize(("found", "nvrtc"), [("13.0", "13.0"), ("", None)])
def test_the_machines_nvrtc_is_asked(monkeypatch: pytest.MonkeyPatch, found: str, nvrtc: str | None) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(fp4_target.nvrtc, "version", lambda: found)
    assert Target.current("cuda").nvrtc == nvrtc


def test_variants_begin_with_the_default_and_share_prepared_weights() -> None:
    variants = W4A16Backend.variants(HOPPER)
    labels = [backend.label for backend in variants]
    assert labels[:3] == ["w4a16", "w4a16/rank2", "w4a16/rank3"]
    assert len(set(labels)) == len(labels)
    assert {layout_of(backend) for backend in variants} == {("w4a16", 64, 1, True)}


def test_w4a4_layers_compete_as_weight_only_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default of a W4A4 layer here keeps its activations: ``torch``, which quantises them, is no alternative."""
    monkeypatch.setattr(fp4_utils, "_resolution", None)
    for weight_only, others in ((False, []), (True, ["torch"])):
        target = HOPPER.for_layer(4096, 4096, weight_only, torch.bfloat16)
        default = fp4_utils.backend_for_layer(target, "a")
        assert default.label == "w4a16"
        labels = [one.label for one in candidates_for(target, default)]
        assert [label for label in labels if not label.startswith("w4a16")] == others
        assert len(labels) == VARIANTS + len(others)


def test_auto_gives_float32_models_to_torch_and_says_why() -> None:
    resolution = resolve_fp4_gemm_backend("auto", None, on((9, 0), dtype=torch.float32))
    assert resolution.name == "torch"
    assert "w4a16: multiplies bfloat16 or float16 activations, the model runs in torch.float32" in str(resolution)


def test_what_happens_to_activations_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(w4a16_module.w4a16, "prepare", lambda dtype, index: None)
    w4a16_module._log_activations.cache_clear()
    caplog.set_level("INFO")
    W4A16Backend().prepare(make_weight(activation=Activation.NONE))
    assert "activations" not in caplog.text
    for _ in range(3):
        W4A16Backend().prepare(make_weight())
    assert caplog.text.count("W4A4 layers keep their activations in 16 bits") == 1


def test_a_prepared_weight_holds_every_byte_and_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(w4a16_module.w4a16, "prepare", lambda dtype, index: None)
    weight = make_weight([40, 24], 64, [0.01, 0.3])
    prepared = W4A16Backend().prepare(weight)
    packed, scale = unpack(prepared.packed, 64, 64, weight.dtype)
    assert torch.equal(packed, weight.packed) and torch.equal(scale.view(torch.uint8), weight.scale.view(torch.uint8))
    assert torch.equal(prepared.scale, weight.column_scale())
    assert (prepared.sizes, prepared.scales) == ((40, 24), tuple(weight.global_scales.tolist()))


@pytest.mark.parametrize("m", [0, 3])
def test_the_operators_shape_is_known_without_data(m: int) -> None:
    x = torch.empty(m, 128, device="meta", dtype=torch.bfloat16)
    weight, scale = torch.empty(3, 1, 1152, device="meta", dtype=torch.uint8), torch.empty(40, device="meta")
    y = torch.ops.sglang.w4a16_gemm(x, weight, scale, None, [40], [1.0], 0)
    assert y.shape == (m, 40)
    assert y.dtype == torch.bfloat16
