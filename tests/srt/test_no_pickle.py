"""Nothing that comes from elsewhere is unpickled: bytes that are pickled can run any code."""

import ast
from collections.abc import Iterator
from pathlib import Path

import sglang

FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}


def findings(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from {alias.name.partition(".")[0] for alias in node.names} & FORBIDDEN_MODULES
        elif isinstance(node, ast.ImportFrom):
            yield from {(node.module or "").partition(".")[0]} & FORBIDDEN_MODULES
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            unsafe_load = name == "torch.load" and "weights_only=True" not in ast.unparse(node)
            if unsafe_load or name in ("eval", "exec") or name.endswith(("_pyobj", ".recv_serialized")):
                yield name


def test_no_module_of_the_package_unpickles_or_evaluates() -> None:
    files = list(Path(sglang.__file__).parent.rglob("*.py"))
    assert len(files) > 100
    found = {str(file): names for file in files if (names := sorted(findings(file.read_text())))}
    assert found == {}


def test_the_search_finds() -> None:
    source = "import pickle, os\nfrom dill import loads\ntorch.load(f)\nsocket.recv_pyobj()\n"
    source += "torch.load(f, weights_only=True)"
    assert sorted(findings(source)) == ["dill", "pickle", "socket.recv_pyobj", "torch.load"]
