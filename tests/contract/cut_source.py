"""Pieces of FlashInfer modules that can't be imported without nvidia-cutlass-dsl, cut out of their source.

What is cut is plain Python and torch; annotations, which name types of that package, are dropped.
"""

import ast
import inspect
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import flashinfer
import torch

_PACKAGE = Path(flashinfer.__file__).parent


class _Type:
    def __init__(self, width: int) -> None:
        self.width = width


_WIDTHS = {"Float4E2M1FN": 4, "Float8E4M3FN": 8, "Float8E5M2": 8, "Float8E8M0FNU": 8, "Float16": 16, "BFloat16": 16}
CUTLASS = SimpleNamespace(**{name: _Type(width) for name, width in _WIDTHS.items()}, Float32=_Type(32))


def _is_literal(value: ast.expr) -> bool:
    try:
        ast.literal_eval(value)
    except ValueError:
        return False
    return True


def _names(decorators: list[ast.expr]) -> list[str]:
    return [decorator.id for decorator in decorators if isinstance(decorator, ast.Name)]


def _cut(file: str, wanted: Callable[[ast.stmt], ast.stmt | None]) -> dict[str, Any]:
    """Run the module's literals and what ``wanted`` makes of its other statements; the names that they define."""
    path = _PACKAGE / file
    source = ast.parse(path.read_text()).body
    body = [n if isinstance(n, ast.Assign) and _is_literal(n.value) else wanted(n) for n in source]
    module = ast.Module(body=[statement for statement in body if statement is not None], type_ignores=[])
    for function in ast.walk(module):
        if isinstance(function, ast.FunctionDef):
            function.returns = None
            for argument in [*function.args.args, *function.args.kwonlyargs]:
                argument.annotation = None
    scope: dict[str, Any] = {"cutlass": CUTLASS, "torch": torch}
    scope["utils"] = SimpleNamespace(get_smem_capacity_in_bytes=lambda architecture: 101376)
    scope["ceil_div"] = lambda a, b: -(-a // b)
    exec(compile(ast.fix_missing_locations(module), str(path), "exec"), scope)
    return scope


@cache
def function(file: str, name: str) -> Callable[..., Any]:
    scope = _cut(file, lambda n: n if isinstance(n, ast.FunctionDef) and n.name == name else None)
    return scope[name]  # type: ignore[no-any-return]


# ------------------------------------------------------------------------------------- what a kernel can implement
_KERNELS = {
    "cutedsl": "gemm/kernels/dense_blockscaled_gemm_sm100.py",
    "b12x": "gemm/kernels/dense_blockscaled_gemm_sm120_b12x.py",
}


def _rules_of_kernel(node: ast.stmt) -> ast.stmt | None:
    """Of the class that has ``can_implement``, the static and class methods; nothing of others."""
    if not isinstance(node, ast.ClassDef) or not any(getattr(n, "name", "") == "can_implement" for n in node.body):
        return None
    plain = {"staticmethod", "classmethod"}
    body = [n for n in node.body if isinstance(n, ast.FunctionDef) and plain & set(_names(n.decorator_list))]
    return ast.ClassDef(name="Kernel", bases=[], keywords=[], body=list(body), decorator_list=[])


@cache
def _rule(name: str) -> Callable[..., bool]:
    return _cut(_KERNELS[name], _rules_of_kernel)["Kernel"].can_implement  # type: ignore[no-any-return]


def can_implement(name: str, n: int, k: int, out_dtype: str) -> bool:
    """Whether the CuTe-DSL kernel says that it takes W4A4 of these sizes with a tile that fits any N."""
    rule = _rule(name)
    dtypes = {
        "ab_dtype": CUTLASS.Float4E2M1FN,
        "sf_dtype": CUTLASS.Float8E4M3FN,
        "c_dtype": getattr(CUTLASS, out_dtype),
    }
    tiles = {"sf_vec_size": 16, "mma_tiler_mn": (128, 128), "cluster_shape_mn": (1, 1)}
    majors = {"a_major": "k", "b_major": "k", "c_major": "n"}
    sizes = {"n": n, "k": k, "l": 1} | ({"m": 1} if "m" in inspect.signature(rule).parameters else {})
    return rule(**dtypes, **tiles, **majors, **sizes)


# ------------------------------------------------------------------------------------- checks that look for a GPU
def without_device_check(module: ModuleType, name: str, condition: str, **replaced: Any) -> Callable[..., Any]:
    """The module's function, less the ``condition`` that would send CPU tensors away."""
    source = inspect.getsource(getattr(module, name))
    assert source.count(condition) == 1, f"{module.__name__}.{name} no longer says {condition!r}"
    scope = vars(module) | replaced
    exec(source.replace(condition, ""), scope)
    return scope[name]  # type: ignore[no-any-return]
