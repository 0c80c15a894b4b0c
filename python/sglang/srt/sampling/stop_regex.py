"""Regular expressions that end an output (SGLang's ``stop_regex``), searched in linear time."""

from collections.abc import Sequence
from typing import Any

import re2

from sglang.srt.errors import RequestError

MAX_PATTERNS = 16
# A match has to lie within this many characters; bounds the work per token.
WINDOW = 4096
# Bytes of the compiled program and of the automaton that is built while searching; beyond it RE2 refuses a pattern,
# or falls back to its slower linear search.
_MAX_MEM = 1 << 20

_OPTIONS = re2.Options()
_OPTIONS.max_mem = _MAX_MEM
_OPTIONS.log_errors = False


def compile_stop_regex(pattern: str) -> Any:
    """``pattern`` in RE2's syntax: Python's without look-around and back-references.

    Raises:
        RequestError: it is no such pattern, or too large a one.
    """
    try:
        return re2.compile(pattern, _OPTIONS)
    except re2.error as error:
        reason = error.args[0].decode("utf-8", "replace") if error.args else "not a pattern"
    except UnicodeEncodeError:
        reason = "it has an unpaired surrogate"
    raise RequestError(f"stop_regex {pattern[:100]!r} is not supported: {reason} (RE2's syntax).", "stop_regex")


class StopRegexMatcher:
    """Finds the first token behind which one of ``patterns`` matches somewhere in the last ``WINDOW`` characters."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self._patterns = [(pattern, compile_stop_regex(pattern)) for pattern in patterns]
        self._tail = ""
        self.matched: str | None = None

    def feed(self, text: str) -> None:
        """Take the text of one token; a match sets ``matched`` to its pattern."""
        if not text or self.matched is not None:
            return
        # One character more: what is cut off still tells ^ and \\b that the text does not begin here.
        self._tail = (self._tail + text)[-WINDOW - 1 :]
        begin = max(len(self._tail) - WINDOW, 0)
        for pattern, compiled in self._patterns:
            if compiled.search(self._tail, begin) is not None:
                self.matched = pattern
                return
