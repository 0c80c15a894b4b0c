"""Which layers a checkpoint's exclusion list names: one matcher for ``exclude_modules``, ``ignore`` and their kin."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable

from sglang.srt.errors import CheckpointError


class ModulePatterns:
    """Exact names, globs and ``re:`` expressions over dotted module names.

    A name also covers the modules below it (``model.layers.0.mlp`` covers ``model.layers.0.mlp.up_proj``); it never
    covers by substring. A glob matches the whole name (``*`` crosses dots), ``re:`` is matched from the start.

    Raises:
        CheckpointError: an expression that does not compile.
    """

    def __init__(self, patterns: Iterable[str]) -> None:
        self.patterns = tuple(patterns)
        self._expressions: list[re.Pattern[str]] = []
        for pattern in self.patterns:
            try:
                self._expressions.append(re.compile(_to_expression(pattern)))
            except re.error as error:
                raise CheckpointError(f"the quantisation config's pattern {pattern!r} is not valid: {error}") from error

    def match(self, name: str) -> bool:
        return any(expression.match(name) for expression in self._expressions)


def _to_expression(pattern: str) -> str:
    if pattern.startswith("re:"):
        return pattern[3:]
    if any(char in pattern for char in "*?["):
        return fnmatch.translate(pattern)
    return re.escape(pattern) + r"(\.|$)"
