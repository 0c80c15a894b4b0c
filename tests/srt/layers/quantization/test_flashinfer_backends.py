"""FlashInfer's backends with the emulator behind them: weights, products, what they share, and what a failure says.

That they fit the real package's signatures and checks is what tests/contract is about.
"""

import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import flashinfer_emulator
import pytest
import torch
from flashinfer_emulator import (
    B200,
    NAMES,
    NAN_BYTE,
    SHARING,
    Emulator,
    assert_close,
    backend,
    exact,
    make_input,
    make_weight,
)

from sglang.srt.errors import Fp4GemmError
from sglang.srt.layers.quantization.fp4_backends import flashinfer as flashinfer_backends
from sglang.srt.layers.quantization.fp4_utils import Target, backends
from sglang.srt.layers.quantization.nvfp4 import Activation, NvFp4Linear

# ------------------------------------------------------------------------------------------------------ products
SHAPES = [([256], 256, [0.01]), ([1000], 48, [1e-3]), ([40, 24, 24], 3696, [1e-4, 1e-2, 3e-3]), ([1], 16, [1.0])]


@pytest.mark.parametrize("activation", [Activation.STATIC, Activation.DYNAMIC], ids=lambda a: a.value)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{sum(s[0])}x{s[1]}")
@pytest.mark.parametrize("name", NAMES)
def test_w4a4(name: str, shape: tuple[list[int], int, list[float]], activation: Activation, emulator: Emulator) -> None:
    parts, k, scales = shape
    weight = make_weight(parts, k, scales, activation)
    linear = NvFp4Linear(weight, backend(name))
    for m in (1, 7, 129):
        x = make_input(m, k)
        assert_close(linear(x), exact(weight, x), parts)
    assert {call[0] for call in emulator.calls} == {backend(name).flashinfer_name}


W4A16 = [  # backend, device, FlashInfer, what mm_bf16_fp4 calls the kernel
    ("cudnn", (10, 0), "0.6.14", "cudnn"),
    ("cudnn", (12, 1), "0.7.4", "cudnn"),
    ("cutedsl", (10, 3), "0.6.18", "cute-dsl"),
    ("cutedsl", (10, 7), "0.7.2", "cute-dsl"),
    ("cutedsl", (12, 0), "0.7.1", "cute-dsl-native"),
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{sum(s[0])}x{s[1]}")
@pytest.mark.parametrize(("name", "capability", "flashinfer", "kernel"), W4A16)
def test_w4a16(
    name: str,
    capability: tuple[int, int],
    flashinfer: str,
    kernel: str,
    shape: tuple[list[int], int, list[float]],
    emulator: Emulator,
    machine: Callable[[Target], None],
) -> None:
    parts, k, scales = shape
    target = replace(B200, capability=capability, flashinfer=flashinfer)
    assert backends()[name].unsupported_reason(target.for_layer(k, sum(parts), True, torch.bfloat16)) is None
    machine(target)
    weight = make_weight(parts, k, scales, Activation.NONE)
    linear = NvFp4Linear(weight, backend(name))
    for m in (1, 33):
        x = make_input(m, k)
        assert_close(linear(x), exact(weight, x), parts)
    assert {call[0] for call in emulator.calls} == {kernel}


@pytest.mark.parametrize("kernel", ["w4a4", "w4a16"])
def test_no_rows(kernel: str, emulator: Emulator, machine: Callable[[Target], None]) -> None:
    machine(B200)
    weight = make_weight([64], 64, [0.1], Activation.STATIC if kernel == "w4a4" else Activation.NONE)
    chosen = backend("cutedsl")
    y = chosen.apply(make_input(0, 64), chosen.prepare(weight), torch.ones(64).bfloat16())
    assert y.shape == (0, 64) and y.dtype == torch.bfloat16 and not emulator.calls


@pytest.mark.parametrize("activation", [Activation.STATIC, Activation.NONE], ids=lambda a: a.value)
def test_any_strides_and_addresses(
    activation: Activation, emulator: Emulator, machine: Callable[[Target], None]
) -> None:
    machine(B200)
    weight = make_weight([64], 128, [0.1], activation)
    chosen = backend("cutedsl")
    prepared = chosen.prepare(weight)
    base = make_input(3, 300)
    inputs = {
        "not contiguous": base[:, 5:133],
        "not aligned": base[0:1, 3:131],
        "one row, column-major": base[0, :128].clone()[:, None].T,
    }
    assert inputs["one row, column-major"].stride() == (1, 1) and inputs["not aligned"].data_ptr() % 32
    for x in inputs.values():
        assert_close(chosen.apply(x, prepared, None), exact(weight, x), [64])


def test_a_weight_of_one_part_of_many_is_aligned(emulator: Emulator, machine: Callable[[Target], None]) -> None:
    machine(B200)
    part = make_weight([64, 64, 64], 64, [0.1, 0.2, 0.3], Activation.NONE).segments(False)[1]
    assert part.global_scales.data_ptr() % 16  # what the kernel would refuse
    prepared = backend("cutedsl").prepare(part)
    assert_close(backend("cutedsl").apply(make_input(2, 64), prepared, None), exact(part, make_input(2, 64)), [64])


def test_padding_of_block_scales_is_never_read(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = make_weight([64], 96, [0.1])
    x = make_input(5, 96)
    scale = emulator.fp4_quantize(x, torch.ones(1))[1]
    assert int((scale == NAN_BYTE).sum()) > 0
    assert bool(NvFp4Linear(weight, backend("cutlass"))(x).isfinite().all())
    monkeypatch.setattr(backends()["cutlass"], "in_multiple", 32)  # what the kernel itself would take
    assert bool(NvFp4Linear(weight, backend("cutlass"))(x).isnan().all())


def test_alpha_is_one_float32_whatever_the_model_is(emulator: Emulator) -> None:
    for activation in (Activation.STATIC, Activation.DYNAMIC):
        weight = make_weight([64], 64, [1e-6], activation, torch.float16)
        prepared = backend("cudnn").prepare(weight)
        assert (prepared.alpha is None) == (activation is Activation.DYNAMIC)
        if prepared.alpha is not None:
            assert prepared.alpha.dtype == torch.float32 and prepared.alpha.shape == (1,)
        y = backend("cudnn").apply(make_input(3, 64, torch.float16), prepared, None)
        assert y.dtype == torch.float16
        assert_close(y, exact(weight, make_input(3, 64, torch.float16)), [64])


# -------------------------------------------------------------------------------------------------------- sharing
def test_one_prepared_weight_for_all_of_a_layout(emulator: Emulator) -> None:
    weight, x = make_weight([128], 128, [0.01]), make_input(5, 128)
    for owner in NAMES:
        prepared = backend(owner).prepare(weight)
        for name in NAMES:
            shared = prepared.shared_with(backend(name))
            if (owner in SHARING) != (name in SHARING):
                assert shared is None
                continue
            assert shared is not None and shared.packed.data_ptr() == prepared.packed.data_ptr()  # type: ignore[attr-defined]
            assert_close(backend(name).apply(x, shared, None), exact(weight, x), [128])
            if owner != name:
                with pytest.raises(ValueError, match=f"prepared for backend {owner}, not for {name}"):
                    backend(name).apply(x, prepared, None)


def test_weight_only_weights_are_not_shared(emulator: Emulator, machine: Callable[[Target], None]) -> None:
    machine(B200)
    prepared = backend("cudnn").prepare(make_weight([64], 64, [0.1], Activation.NONE))
    assert prepared.shared_with(backend("cutedsl")) is None


def test_tuning_lies_beside_our_own_measurements(emulator: Emulator, tmp_path: Path) -> None:
    with backends()["cutlass"].tuning(tmp_path / "b200.json", True):
        pass
    with backends()["cutlass"].tuning(None, False):
        pass
    assert emulator.tuned == [(True, str(tmp_path / "b200-flashinfer.json")), (False, None)]


# --------------------------------------------------------------------------------------------------------- errors
class BackendSupportedError(Exception):
    """FlashInfer's derive from Exception."""


CAUSES = [
    BackendSupportedError("mm_fp4 does not support backend 'cutlass' with capability 90"),
    ValueError("bad"),
    RuntimeError("No supported CUDA architectures found for major versions [10]."),
    AssertionError(),
    TypeError("Mismatched type"),
    ImportError("libcudnn.so.9"),
    KeyError("sm_107a"),
    NotImplementedError("sm_107"),
    subprocess.CalledProcessError(1, ["ninja"]),
]


@pytest.mark.parametrize("function", ["fp4_quantize", "mm_fp4"])
@pytest.mark.parametrize("cause", CAUSES, ids=lambda c: type(c).__name__)
def test_whatever_is_raised_becomes_one_error(
    cause: Exception, function: str, emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    linear = NvFp4Linear(make_weight([100], 80, [0.1]), backend("cutlass"))

    def fail(*args: object, **kwargs: object) -> None:
        raise cause

    monkeypatch.setattr(emulator, function, fail)
    with pytest.raises(Fp4GemmError) as info:
        linear(make_input(3, 80))
    text = str(info.value)
    assert info.value.__cause__ is cause and info.value.backend == "cutlass"
    # Sizes as the kernel saw them.
    assert text.startswith("FP4 GEMM backend cutlass failed at M=3, N=128, K=128, torch.bfloat16: ")
    assert f"{type(cause).__name__}: {cause or 'no message'}" in text
    assert "python -m sglang.verify_fp4 --backend cutlass" in text and "--fp4-gemm-backend auto" in text


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, MemoryError, KeyboardInterrupt, SystemExit])
def test_what_is_not_the_kernels_fault_keeps_its_type(
    error: type[BaseException], emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    linear = NvFp4Linear(make_weight([64], 64, [0.1]), backend("cutlass"))

    def fail(*args: object, **kwargs: object) -> None:
        raise error("enough")

    monkeypatch.setattr(emulator, "mm_fp4", fail)
    with pytest.raises(error, match="enough"):
        linear(make_input(3, 64))


def test_failures_while_a_weight_is_prepared(
    emulator: Emulator, machine: Callable[[Target], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(B200)

    def fail(*args: object, **kwargs: object) -> None:
        raise NotImplementedError("cute-dsl w4a16 GEMM only supports SM100/103/107")

    monkeypatch.setattr(emulator, "prepare_bf16_fp4_weights", fail)
    with pytest.raises(Fp4GemmError, match=r"cutedsl failed at preparing a weight, N=64, K=64.*NotImplementedError"):
        NvFp4Linear(make_weight([50], 64, [0.1], Activation.NONE), backend("cutedsl"))


def test_missing_trtllm_kernels_are_explained(
    emulator: Emulator,
    machine: Callable[[Target], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    weight = make_weight([128], 64, [0.1])
    commands = {"0.6.13": "pip install flashinfer-cubin==0.6.13", "0.7.4": "flashinfer download-cubin"}
    for version, command in commands.items():
        flashinfer_backends._warn_about_downloads.cache_clear()
        for cubin, warnings in ((version, 0), (None, 1)):
            machine(replace(B200, flashinfer=version, flashinfer_cubin=cubin))
            caplog.clear()
            for _ in range(2):  # once, not per layer
                linear = NvFp4Linear(weight, backend("trtllm"))
            assert len(caplog.records) == warnings
            assert not warnings or (command in caplog.text and "50 s" in caplog.text)
    monkeypatch.setattr(emulator, "mm_fp4", lambda *args, **kwargs: [][0])
    with pytest.raises(Fp4GemmError, match="downloaded at first use, unless flashinfer-cubin"):
        linear(make_input(1, 64))


SHORT = {
    "block scales of the weight": lambda w: replace(w, scale=w.scale[:-1]),
    "packed weight": lambda w: replace(w, packed=w.packed[:, :-8]),
}


@pytest.mark.parametrize("buffer", SHORT)
def test_short_buffers_of_the_weight_reach_no_kernel(buffer: str, emulator: Emulator) -> None:
    chosen = backend("cutlass")
    prepared = SHORT[buffer](chosen.prepare(make_weight([64], 128, [0.1])))
    with pytest.raises(Fp4GemmError, match=rf"{buffer}: expected contiguous bytes \["):
        chosen.apply(make_input(3, 128), prepared, None)
    assert not emulator.calls


def test_a_short_bf16_scale_reaches_no_kernel(emulator: Emulator, machine: Callable[[Target], None]) -> None:
    machine(B200)
    chosen = backend("cudnn")
    prepared = chosen.prepare(make_weight([64], 128, [0.1], Activation.NONE))
    with pytest.raises(Fp4GemmError, match="block scales of the weight: .* too small for K=128"):
        chosen.apply(make_input(3, 128), replace(prepared, scale=prepared.scale[:-1]), None)
    assert not emulator.calls


@pytest.mark.parametrize("buffer", ["quantised input", "block scales of the input"])
def test_short_buffers_of_the_input_reach_no_kernel(
    buffer: str, emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    linear = NvFp4Linear(make_weight([64], 128, [0.1]), backend("cutlass"))
    quantize = emulator.fp4_quantize

    def shorten(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        packed, scale = quantize(*args)
        return (packed[:-1], scale) if buffer == "quantised input" else (packed, scale[:64])

    monkeypatch.setattr(emulator, "fp4_quantize", shorten)
    with pytest.raises(Fp4GemmError, match=rf"{buffer}: expected contiguous bytes \["):
        linear(make_input(3, 128))
    assert not emulator.calls


def test_the_emulator_refuses_what_the_kernels_cannot_take(emulator: Emulator) -> None:
    prepared = backend("cutlass").prepare(make_weight([64], 64, [0.1]))
    x, scale = emulator.fp4_quantize(make_input(3, 64), torch.ones(1))
    for a, b_scale in ((x[:0], prepared.scale), (x, prepared.scale[:64])):
        with pytest.raises(AssertionError):
            emulator.mm_fp4(a, prepared.packed.T, scale, b_scale.T, torch.ones(1), torch.bfloat16, backend="cutlass")
    assert flashinfer_emulator.MULTIPLES.keys() == {backend(name).flashinfer_name for name in NAMES}
