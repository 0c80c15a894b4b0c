"""Real starts over damaged checkpoints: no server, one message that names the culprit, exit status 1, no traceback."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from checkpoints import base
from oracle import import_file

DOWN = "model.layers.0.mlp.down_proj"


def c1_missing_scale(folder: Path) -> None:
    checkpoint = base()
    del checkpoint.tensors[DOWN + ".weight_scale_2"]
    checkpoint.write(folder, tokenizer=True)


def c9_nan_scale(folder: Path) -> None:
    checkpoint = base()
    checkpoint.scale_bytes(DOWN)[200, 3] = 0x7F
    checkpoint.write(folder, tokenizer=True)


def c13_truncated(folder: Path) -> None:
    file = base().write(folder, tokenizer=True) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4096])


def b2_unmatched_pattern(folder: Path) -> None:
    checkpoint = base()
    checkpoint.section["exclude_modules"] = ["lm_head", "model.layers.language_model.layers.0.mlp*"]
    checkpoint.write(folder, tokenizer=True)


CASES: dict[Callable[[Path], None], tuple[str, ...]] = {
    c1_missing_scale: (f"the checkpoint lacks {DOWN}.weight_scale_2",),
    c9_nan_scale: (f"tensor {DOWN}.weight_scale", "[200, 3] is 0x7F, which is NaN"),
    c13_truncated: ("model.safetensors can't be read", "is it complete?"),
    b2_unmatched_pattern: ("'model.layers.language_model.layers.0.mlp*'", "matches no layer"),
}


@pytest.fixture(scope="module")
def starts(tmp_path_factory: pytest.TempPathFactory) -> dict[Callable[[Path], None], CompletedProcess[str]]:
    """All starts at once: most of their time is importing."""
    server = import_file(Path(__file__).parents[1] / "e2e" / "launched_server.py")

    def start(damage: Callable[[Path], None]) -> CompletedProcess[str]:
        folder = tmp_path_factory.mktemp(damage.__name__)
        damage(folder)
        result: CompletedProcess[str] = server.run_to_exit(folder, "--port", str(server.free_port()))
        return result

    with ThreadPoolExecutor(len(CASES)) as threads:
        return dict(zip(CASES, threads.map(start, CASES), strict=True))


@pytest.mark.parametrize("damage", CASES, ids=lambda damage: damage.__name__)
def test_no_server_over_a_damaged_checkpoint(
    damage: Callable[[Path], None], starts: dict[Callable[[Path], None], CompletedProcess[str]]
) -> None:
    result = starts[damage]
    text = result.stdout + result.stderr
    assert result.returncode == 1, text
    assert "Traceback" not in text, text
    for words in CASES[damage]:
        assert words in text, text
