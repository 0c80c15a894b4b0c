"""Which layers an entry of ``targets`` or ``ignore`` names, and how specifically."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sglang.srt.layers.quantization.patterns import ModulePatterns, spellings

# The class of every layer that is asked about.
LINEAR = "Linear"

Rank = tuple[int, int]
_CLASS, _PATTERN, _ABOVE, _NAME = range(4)


class Target:
    """A class name ("Linear"), a module's name (it covers the modules below too), a ``re:`` expression or a glob.

    Raises:
        CheckpointError: an expression that does not compile.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self._patterns = ModulePatterns([text])

    def rank(self, name: str, packed: Mapping[str, Sequence[str]]) -> Rank | None:
        """How specifically this names the layer ``name``, comparable; None: not at all.

        The layer's own name is more specific than that of a module above it (the nearer, the more), that more than an
        expression or glob, and that more than a class.

        Args:
            packed: fused layer to its parts. The name of a fused layer counts as one above its parts, unless the entry
                names a part by itself: ``re:.*v_proj`` is v_proj, though it matches qkv_proj.
        """
        rank = self._rank(name)
        parent, _, leaf = name.rpartition(".")
        above = f"{parent}." if parent else ""
        for fused, parts in packed.items():
            if rank is None and leaf in parts and all(self._rank(above + part) is None for part in parts):
                rank = self._rank(above + fused)
                return rank and min(rank, (_ABOVE, self.text.count(".")))
        return rank

    def _rank(self, name: str) -> Rank | None:
        if self.text == LINEAR:
            return _CLASS, 0
        if not self._patterns.match(name):
            return None
        if self.text.startswith("re:") or any(char in self.text for char in "*?["):
            return _PATTERN, 0
        if self.text in spellings(name):
            return _NAME, 0
        return _ABOVE, self.text.count(".")
