"""``python -m sglang.verify_fp4``: every kind of wrong backend is caught and named, a right one passes."""

import argparse
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console

from forked import run_module
from fp4_fakes import Stand
from sglang import verify_fp4
from sglang.srt.errors import ArgumentError, CheckpointError
from sglang.srt.layers.quantization import fp4_utils
from sglang.srt.layers.quantization.fp4_utils import Target, backends
from sglang.srt.layers.quantization.fp4_verify import Layer, random_weight
from sglang.srt.layers.quantization.fp4_verify_run import Verification
from sglang.srt.layers.quantization.nvfp4 import Activation, NvFp4Weight
from sglang.srt.layers.quantization.nvfp4_utils import dequantize_nvfp4, quantize_nvfp4
from sglang.srt.platforms import device_name

FIXTURES = Path(__file__).parent / "fixtures"
# Small, unaligned, two and three parts; the last row alone is another batch.
SMALL = ["--device", "cpu", "--shapes", "200x96", "--rows", "1,7"]


@pytest.fixture
def stand() -> Iterator[Stand]:
    backends()
    stand = Stand()
    yield stand
    for name in stand.names:
        fp4_utils._names.pop(name)


def verify(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, dict]:
    status = verify_fp4.run(["--json", *argv])
    return status, json.loads(capsys.readouterr().out)


def refuse(*_: object) -> torch.Tensor:
    raise RuntimeError("no kernel image\nis available")


def one_bit_when_called_again() -> Callable[[torch.Tensor], torch.Tensor]:
    calls = iter(range(1 << 30))

    def after(y: torch.Tensor) -> torch.Tensor:
        y = y.clone()
        if next(calls) % 2:
            y[0, 5] = torch.nextafter(y[0, 5], torch.zeros_like(y[0, 5]))
        return y

    return after


def wrong_element(y: torch.Tensor) -> torch.Tensor:
    """By too little to show in the norm."""
    y = y.clone()
    y[-1, 3] *= 1.03
    return y


def truncated(y: torch.Tensor) -> torch.Tensor:
    """Towards zero: what ``y`` was before it was rounded is not known, so half of the values go one step down."""
    lower = torch.nextafter(y, torch.zeros_like(y))
    return torch.where(torch.arange(y.numel()).view(y.shape) % 2 == 0, lower, y)


def without_subnormals(weight: NvFp4Weight) -> NvFp4Weight:
    raw = weight.scale.view(torch.uint8)
    return replace(weight, scale=torch.where(raw < 8, 0, raw).to(torch.uint8).view(torch.float8_e4m3fn))


def requantised(x: torch.Tensor) -> torch.Tensor:
    scale = x.float().abs().amax() / 2688
    return dequantize_nvfp4(*quantize_nvfp4(x, 1 / scale), scale).to(x.dtype)


FAULTS: dict[str, tuple[dict[str, object], str]] = {
    "zeros": ({"after": torch.zeros_like}, "every output is zero"),
    "scaled": ({"after": lambda y: y * 1.02}, "error 2.0e-02 exceeds"),
    "nan": ({"after": lambda y: y.index_fill(1, torch.tensor([3]), float("nan"))}, "outputs are NaN or infinite"),
    "raises": ({"after": refuse}, "RuntimeError: no kernel image is available"),
    "unprepared": ({"before": refuse}, "RuntimeError: no kernel image is available"),
    "unbiased": ({"use_bias": False}, "error"),
    "float": ({"after": torch.Tensor.float}, "the output is torch.float32 [1, 200], not torch.bfloat16"),
    "short": ({"after": lambda y: y[:, :-1]}, "RuntimeError: shape"),
    "fused": (
        {"before": lambda w: replace(w, global_scales=w.global_scales.amax().expand_as(w.global_scales))},
        "error",
    ),
    "nibbles": ({"before": lambda w: replace(w, packed=(w.packed << 4) | (w.packed >> 4))}, "error"),
    "subnormal": ({"before": without_subnormals}, "error"),
    "bf16_scale": ({"before": lambda w: replace(w, global_scales=w.global_scales.bfloat16().float())}, "error"),
    "truncated": ({"after": truncated}, "error"),
    "element": ({"after": wrong_element}, "outputs are wrong; [6, 3] is"),
    "unsteady": ({"after": one_bit_when_called_again()}, "two calls with the same input differ"),
    "alone": ({"after": lambda y: y * (1.5 if len(y) == 1 else 1)}, "the last row alone: "),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_backend_is_caught_and_named(fault: str, stand: Stand, capsys: pytest.CaptureFixture[str]) -> None:
    how, expected = FAULTS[fault]
    stand.add("right")
    stand.add(fault, **how)  # type: ignore[arg-type]
    status, report = verify(capsys, *SMALL, "--dtype", "bfloat16", "--backend", fault, "right")
    assert (status, report["ok"]) == (1, False)
    wrong = [row for row in report["rows"] if row["verdict"] != "ok"]
    assert {row["backend"] for row in wrong} == {fault}
    assert any(expected in row["verdict"] for row in wrong), [row["verdict"] for row in wrong]
    assert sum(row["backend"] == "right" for row in report["rows"]) == 4 * 2
    status = verify_fp4.run([*SMALL, "--dtype", "bfloat16", "--backend", fault, "right"])
    text = capsys.readouterr().out
    assert status == 1
    assert f"{fault}: {8 - len(wrong)} of 8 ok" in text
    assert "right: 8 of 8 ok" in text
    assert f"{len(wrong)} WRONG: 16 rows" in text


@pytest.mark.parametrize(
    ("dtype", "fault"),
    [
        ("float32", {"before": lambda w: replace(w, global_scales=w.global_scales.half().float())}),
        ("float16", {"before": lambda w: replace(w, global_scales=w.global_scales * (1 + 1e-3))}),
        ("float32", {"after": lambda y: y.bfloat16().float()}),
        ("float32", {"after": lambda y: y * (1 + 1e-5)}),
        ("float16", {"after": lambda y: y.bfloat16().half()}),
    ],
)
def test_faults_that_only_a_narrow_bound_shows(
    dtype: str, fault: dict[str, object], stand: Stand, capsys: pytest.CaptureFixture[str]
) -> None:
    stand.add("faulty", **fault)  # type: ignore[arg-type]
    status, report = verify(capsys, *SMALL, "--dtype", dtype, "--backend", "faulty")
    assert status == 1
    narrow = [row for row in report["rows"] if "any input" not in row["kind"]]
    assert all(row["verdict"].startswith("error") for row in narrow)


def test_a_quantiser_that_is_left_out_or_too_much_is_caught(stand: Stand, capsys: pytest.CaptureFixture[str]) -> None:
    stand.add("unquantised", before=lambda w: replace(w, activation=Activation.NONE, input_scale=None))
    stand.add("quantised", inside=requantised)
    _, report = verify(capsys, *SMALL, "--backend", "unquantised", "quantised")
    wrong = {(row["backend"], row["kind"]) for row in report["rows"] if row["verdict"] != "ok"}
    assert ("unquantised", "W4A4 static, bias, any input") in wrong
    assert ("quantised", "W4A16, 2 parts, bias") in wrong


def test_a_backend_that_keeps_activations_is_held_against_the_weight_only_product(
    stand: Stand, capsys: pytest.CaptureFixture[str]
) -> None:
    stand.add("keeper", before=lambda w: replace(w, activation=Activation.NONE), keeps_activations=True)
    stand.add("quantiser", keeps_activations=True)
    status, report = verify(capsys, *SMALL, "--dtype", "bfloat16", "--backend", "keeper", "quantiser", "torch")
    assert status == 1
    kinds = {name: [row["kind"] for row in report["rows"] if row["backend"] == name][::2] for name in stand.names}
    assert kinds["keeper"] == [
        "W4A4 static, activations kept, 3 parts",
        "W4A4 dynamic, activations kept, bias",
        "W4A4 static, activations kept, bias, any input",
        "W4A16, 2 parts, bias",
    ]
    assert all(row["verdict"] == "ok" for row in report["rows"] if row["backend"] != "quantiser"), report["rows"]
    assert all(row["bound"] < 6e-3 for row in report["rows"] if row["backend"] == "keeper")
    wrong = [row["kind"] for row in report["rows"] if row["verdict"] != "ok"]
    assert "W4A4 static, activations kept, bias, any input" in wrong and "W4A16, 2 parts, bias" not in wrong
    assert {row["kind"] for row in report["rows"] if row["backend"] == "torch"} == {
        kind.replace(", activations kept", "") for kind in kinds["keeper"]
    }


def test_a_quantiser_with_approximate_reciprocals_passes(stand: Stand, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows on the grid must not depend on it, the others allow for it."""
    stand.add("approximate", inside=lambda x: (x.double() * (1 + 2e-3)).to(x.dtype))
    argv = [*SMALL, "--backend", "approximate", "--dtype", "float32"]
    _, report = verify(capsys, *argv)
    w4a4 = [row for row in report["rows"] if row["kind"].startswith("W4A4 static")]
    assert len(w4a4) == 4
    assert all(row["verdict"] == "ok" for row in w4a4), w4a4
    on_grid = [row for row in w4a4 if "any input" not in row["kind"]]
    assert all(row["error"] < row["bound"] < 1e-5 for row in on_grid)


def test_every_variant_is_verified(stand: Stand, capsys: pytest.CaptureFixture[str]) -> None:
    prepared = []
    stand.add("tuned", variants=("", "split2"), before=lambda weight: prepared.append(1) or weight)
    status, report = verify(capsys, *SMALL, "--dtype", "float32", "--backend", "tuned")
    assert status == 0
    assert {row["backend"] for row in report["rows"]} == {"tuned", "tuned/split2"}
    assert len(report["rows"]) == 16
    assert len(prepared) == 4  # one weight for both


def test_right_backends_pass_and_the_report_is_complete(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--device", "cpu", "--dtype", "all", "--shapes", "1000x48,1x16", "--rows", "0,1,7,16"]
    status, report = verify(capsys, *argv, "--backend", "torch")
    assert (status, report["ok"], report["device_lost"]) == (0, True, None)
    assert len(report["rows"]) == 3 * 2 * 4 * 4
    assert (report["target"], report["device"]) == ("cpu", device_name(torch.device("cpu")))
    assert {"torch", "sglang-nvfp4", "flashinfer-python"} <= set(report["versions"])
    assert set(report["unsupported"]) >= {"cutlass", "cudnn", "cutedsl", "trtllm"}
    assert all(entry["reason"] for entry in report["unsupported"].values())
    assert report["skipped"] == {}
    numbers = ("error", "bound", "max_abs", "microseconds", "tflops", "gb_per_s", "speedup")
    for row in report["rows"]:
        assert row["backend"] == "torch" and row["verdict"] == "ok"
        assert row["kind"].split(",")[0] in ("W4A4 static", "W4A4 dynamic", "W4A16")
        if row["m"] == 0:
            assert all(row[key] is None for key in numbers)
            continue
        assert all(row[key] >= 0 for key in numbers)
        assert row["error"] <= row["bound"]
        # Tight enough to be worth something: the rounding of the output, and of sums in float32.
        narrow = {"bfloat16": 6e-3, "float16": 1e-3, "float32": 2e-6}[row["dtype"]]
        assert row["n"] == 1 or "any input" in row["kind"] or row["bound"] < narrow
        seconds = row["microseconds"] * 1e-6
        assert row["tflops"] == pytest.approx(2 * row["m"] * row["n"] * row["k"] / seconds / 1e12)
        assert row["gb_per_s"] == pytest.approx(row["n"] * row["k"] * 0.5625 / seconds / 1e9)


def test_same_seed_same_numbers_other_seed_others(capsys: pytest.CaptureFixture[str]) -> None:
    errors = []
    for seed in ("3", "3", "4"):
        _, report = verify(capsys, *SMALL, "--backend", "torch", "--seed", seed)
        errors.append([row["error"] for row in report["rows"]])
    assert errors[0] == errors[1] != errors[2]


def test_default_rows_are_bounded() -> None:
    options = argparse.Namespace(rows=None)

    def sizes(n: int, k: int, device: str) -> list[int]:
        weight = random_weight((1,), 16, Activation.NONE, torch.float32, torch.Generator())
        weight = replace(weight, scale=weight.scale.expand(n, k // 16))
        return verify_fp4._batch_sizes(options, torch.device(device), Layer("", weight, None, on_grid=False))

    assert sizes(1000, 48, "cpu") == [0, 1, 7, 16, 129, 1000]
    assert sizes(4096, 4096, "cpu") == [0, 1, 7, 16]
    assert sizes(4096, 4096, "cuda") == [0, 1, 7, 16, 129, 1000]
    assert sizes(128256, 8192, "cuda") == [0, 1, 7, 16, 129]


def test_what_a_backend_does_not_take_is_counted(stand: Stand, capsys: pytest.CaptureFixture[str]) -> None:
    def reason(target: Target) -> str | None:
        if target.dtype is not torch.bfloat16:
            return "writes bfloat16"
        return "multiplies FP4 with FP4" if target.weight_only else None

    stand.add("narrow", reason=reason)
    status = verify_fp4.run([*SMALL, "--backend", "narrow", "--dtype", "all"])
    text = capsys.readouterr().out
    assert status == 0
    assert "narrow: 6 of 6 ok; 2 not taken: multiplies FP4 with FP4; 16 not taken: writes bfloat16" in text
    with pytest.raises(ArgumentError, match="--backend narrow can't run here: writes bfloat16"):
        verify_fp4.run([*SMALL, "--backend", "narrow", "--dtype", "float32"])


def test_reason_and_fix_of_a_backend_that_cannot_run(stand: Stand, capsys: pytest.CaptureFixture[str]) -> None:
    stand.add("absent", reason=lambda target: "needs libabsent", fix="pip install 'absent[all]'")
    with pytest.raises(ArgumentError) as caught:
        verify_fp4.run([*SMALL, "--backend", "absent"])
    assert caught.value.exit_code == 2
    assert str(caught.value) == (
        "--backend absent can't run here: needs libabsent; to change that: pip install 'absent[all]'"
    )
    status, report = verify(capsys, *SMALL, "--rows", "1")
    assert status == 0
    assert report["unsupported"]["absent"] == {"reason": "needs libabsent", "fix": "pip install 'absent[all]'"}
    output = StringIO()
    verify_fp4.print_report(report, Console(file=output, width=200))
    assert "absent: can't run here: needs libabsent; to change that: pip install 'absent[all]'" in output.getvalue()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--backend", "no_such"], "--backend 'no_such' is not an FP4 GEMM backend"),
        (["--backend", "auto"], "--backend auto: name backends"),
        (["--backend", "cutlass"], "--backend cutlass can't run here: needs a CUDA GPU"),
        (["--shapes", "96"], "--shapes 96: expected NxK"),
        (["--shapes", "96x100"], "K a multiple of 16"),
        (["--shapes", "0x16"], "--shapes 0x16"),
        (["--rows", "1,-2"], "--rows 1,-2"),
        (["--rows", "many"], "--rows many"),
        (["--dtype", "int8"], "--dtype"),
        (["--shapes", "32x32", "--model-path", "m"], "--shapes and --model-path: give one of them"),
        (["--device", "tpu"], "--device tpu"),
    ],
)
def test_bad_arguments(argv: list[str], message: str) -> None:
    device = [] if "--device" in argv else ["--device", "cpu"]
    with pytest.raises(ArgumentError) as caught:
        verify_fp4.run([*device, *argv])
    assert message in str(caught.value)


# --------------------------------------------------------------------------------------------------------- models
@pytest.mark.parametrize(
    ("checkpoint", "kinds"),
    [
        ("modelopt-nvfp4", {"qkv_proj": "static", "o_proj": "static", "gate_up_proj": "static", "down_proj": "static"}),
        ("ct-nvfp4a16", {"qkv_proj": "none", "o_proj": "none", "gate_up_proj": "none", "down_proj": "none"}),
    ],
)
def test_layers_of_a_model(checkpoint: str, kinds: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(FIXTURES / f"tiny-llama-{checkpoint}")
    status, report = verify(capsys, "--device", "cpu", "--model-path", folder, "--backend", "torch", "--rows", "1,7")
    assert status == 0
    assert {row["layer"].rpartition(".")[2] for row in report["rows"]} == set(kinds)
    assert {row["dtype"] for row in report["rows"]} == {"float32"}  # what a server would run it in
    sizes = {row["layer"].rpartition(".")[2]: (row["n"], row["k"]) for row in report["rows"]}
    assert sizes == {"qkv_proj": (512, 256), "o_proj": (256, 256), "gate_up_proj": (1024, 256), "down_proj": (256, 512)}
    both = "static" in kinds.values()  # inputs on the grid, and any
    assert len(report["rows"]) == 4 * 2 * (2 if both else 1)


def test_a_wrong_backend_on_a_model(stand: Stand, capsys: pytest.CaptureFixture[str]) -> None:
    stand.add("scaled", after=lambda y: y * 1.02)
    argv = ["--device", "cpu", "--rows", "7", "--dtype", "bfloat16", "--backend", "scaled"]
    status, report = verify(capsys, *argv, "--model-path", str(FIXTURES / "tiny-llama-modelopt-mixed"))
    assert status == 1
    wrong = {(row["layer"], row["kind"]) for row in report["rows"] if row["verdict"] != "ok"}
    assert wrong == {
        ("model.layers.0.mlp.gate_up_proj", "W4A4 static, 2 parts"),
        ("model.layers.0.mlp.down_proj", "W4A4 static"),
        ("model.layers.1.self_attn.o_proj", "W4A4 static"),
        ("model.layers.1.mlp.down_proj", "W4A16"),
    }
    assert {row["dtype"] for row in report["rows"]} == {"bfloat16"}


def test_a_named_backend_that_takes_none_of_the_models_layers(stand: Stand) -> None:
    stand.add("w4a4", reason=lambda target: "multiplies FP4 with FP4" if target.weight_only else None)
    argv = ["--device", "cpu", "--rows", "1", "--model-path", str(FIXTURES / "tiny-llama-modelopt-w4a16")]
    with pytest.raises(ArgumentError, match="--backend w4a4 takes none of these layers: multiplies FP4 with FP4"):
        verify_fp4.run([*argv, "--backend", "w4a4"])


def test_a_model_without_nvfp4_layers() -> None:
    with pytest.raises(CheckpointError, match="the checkpoint has no NVFP4 layer"):
        verify_fp4.run(["--device", "cpu", "--model-path", str(FIXTURES / "tiny-llama-bf16")])


# ----------------------------------------------------------------------------------------------------- the process
def test_a_lost_device_ends_the_run(
    stand: Stand, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After an illegal access every CUDA call fails: rows that can't run must not look like other backends' faults."""
    stand.add("killer", after=refuse)
    stand.add("later")
    monkeypatch.setattr(Verification, "_device_failure", lambda self: "CUDA error: an illegal memory access")
    status, report = verify(capsys, *SMALL, "--backend", "killer", "later")
    assert status == 1
    assert [row["backend"] for row in report["rows"]] == ["killer"]
    assert "illegal memory access" in report["device_lost"]
    output = StringIO()
    verify_fp4.print_report(report, Console(file=output, width=200))
    assert "the device failed: CUDA error: an illegal memory access" in output.getvalue()


def test_exit_statuses_of_the_command(tmp_path: Path) -> None:
    """A wrong backend of another package, found by its entry point."""
    (tmp_path / "wrong_fp4.py").write_text(
        "from sglang.srt.layers.quantization.fp4_backends.torch_reference import TorchBackend\n"
        "class Wrong(TorchBackend):\n"
        "    name = 'wrong'\n"
        "    def apply(self, x, weight, bias):\n"
        "        return super().apply(x, weight, bias) * 1.02\n"
    )
    info = tmp_path / "wrong_fp4-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: wrong-fp4\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[sglang.fp4_gemm_backends]\nwrong = wrong_fp4\n")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    common = ["--device", "cpu", "--shapes", "32x32", "--rows", "3"]
    for arguments, status, text in (
        (["--backend", "torch"], 0, "torch: 8 of 8 ok"),
        (["--backend", "wrong"], 1, "6 WRONG: 8 rows"),
        (["--backend", "cutlass"], 2, "error: --backend cutlass can't run here: needs a CUDA GPU"),
    ):
        done = run_module("sglang.verify_fp4", [*common, *arguments], {**os.environ, "PYTHONPATH": path})
        assert done.returncode == status, done.stdout + done.stderr
        assert text in done.stdout + done.stderr
        assert "Traceback" not in done.stderr
