"""Which layers a checkpoint's exclusion list names: one matcher for ``exclude_modules``, ``ignore`` and their kin."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Collection, Iterable, Iterator, Sequence

from sglang.srt.errors import CheckpointError

# What exporters list as a matter of course, or for parts of a larger model that a text model does not have.
_MAY_BE_ABSENT = ("lm_head", "embed_tokens", "vision", "visual", "image", "audio", "multi_modal", "mtp")

# Component under which a vision-language model keeps its text model.
TEXT_MODEL = "language_model."


def may_be_absent(pattern: str) -> bool:
    """Whether a name or pattern may match no layer without being a mistake."""
    return any(part in pattern for part in _MAY_BE_ABSENT)


def spellings(name: str) -> Iterator[str]:
    """A module's name, and how it is called where the model is the text part of a larger one."""
    yield name
    yield TEXT_MODEL + name
    if name.startswith("model."):
        yield "model." + TEXT_MODEL + name.removeprefix("model.")


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
        return any(_matches(expression, name) for expression in self._expressions)

    def match_parts(self, fused: str, parts: Sequence[str]) -> set[str]:
        """Which of a fused layer's ``parts`` are named, each by its own name or all by that of the ``fused`` layer.

        The fused name counts only for a pattern that matches no part by itself: ``*v_proj`` is v_proj, though it
        matches ``qkv_proj`` too.
        """
        named: set[str] = set()
        for expression in self._expressions:
            own = {part for part in parts if _matches(expression, part)}
            named |= own or (set(parts) if _matches(expression, fused) else set())
        return named

    def check_names(self, names: Collection[str]) -> None:
        """Raises:
        CheckpointError: a pattern matches none of ``names``: what it was meant for would be treated wrongly.
        """
        for pattern, expression in zip(self.patterns, self._expressions, strict=True):
            if not may_be_absent(pattern) and not any(_matches(expression, name) for name in names):
                raise CheckpointError(
                    f"the quantisation config excludes {pattern!r}, which matches no layer of this model; correct or "
                    "remove the pattern"
                )


def _matches(expression: re.Pattern[str], name: str) -> bool:
    return any(expression.match(spelling) for spelling in spellings(name))


def _to_expression(pattern: str) -> str:
    if pattern.startswith("re:"):
        return pattern[3:]
    if any(char in pattern for char in "*?["):
        return fnmatch.translate(pattern)
    return re.escape(pattern) + r"(\.|$)"
