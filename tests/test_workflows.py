"""The workflow of the Blackwell runner, which no one here can run: that what it calls is there."""

import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PYPROJECT = (ROOT / "pyproject.toml").read_text()


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def commands(path: Path) -> list[str]:
    """Every line that a step of ``path`` runs, up to a pipe or a redirection."""
    steps = [step for job in load(path)["jobs"].values() for step in job["steps"]]
    lines = [line.strip() for step in steps for line in step.get("run", "").splitlines()]
    return [re.split(r" [|>] ", line)[0] for line in lines if line]


@cache
def help_of(module: str) -> str:
    command = [sys.executable, "-m", *module.split(), "--help"]
    env = {"PYTHONPATH": str(ROOT / "python"), "PATH": "/usr/bin:/bin"}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_form(path: Path) -> None:
    workflow = load(path)
    assert workflow["name"] == path.stem
    assert workflow[True]  # YAML 1.1 reads "on" as a boolean
    for job in workflow["jobs"].values():
        assert job["runs-on"] and job["timeout-minutes"]
        assert all(("run" in step) != ("uses" in step) for step in job["steps"])


@pytest.mark.parametrize(
    ("path", "command"), [pytest.param(path, line, id=line) for path in FILES for line in commands(path)]
)
def test_what_is_called_exists(path: Path, command: str, pytestconfig: pytest.Config) -> None:
    words = shlex.split(command)
    if words[0] == "make":
        subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, capture_output=True, check=True)
        return
    if words[0] == "mkdir":
        return
    assert words[:2] == [".venv/bin/python", "-m"], "an unknown kind of command"
    module, arguments = words[2], words[3:]
    for word in arguments:
        if word.startswith(".["):
            for extra in word.partition("[")[2].rstrip("]").split(","):
                assert re.search(rf"^{extra} = \[", PYPROJECT, re.MULTILINE)
        elif "/" in word or word.endswith(".txt"):
            assert (ROOT / word).exists()
        elif word.startswith("--"):
            assert re.search(rf"{word}\b", help_of("pip install" if module == "pip" else module))
    if module == "pytest" and "-m" in arguments:
        markers = {line.partition(":")[0] for line in pytestconfig.getini("markers")}
        assert arguments[arguments.index("-m") + 1] in markers


def test_the_variables_of_the_test_are_set() -> None:
    (job,) = load(ROOT / ".github" / "workflows" / "blackwell.yml")["jobs"].values()
    read = set(re.findall(r'environ\.get\("(FP4_\w+)"\)', (ROOT / "tests" / "e2e" / "test_fp4_gemm.py").read_text()))
    assert {name for name in job["env"] if name.startswith("FP4_")} <= read
