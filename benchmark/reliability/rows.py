"""What a check says: a figure, the bound that it has to keep, and whether it does."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """``figure`` must be at most ``bound`` (at least, if ``at_least``), both in ``unit``; ``what`` says in a sentence
    what was counted."""

    check: str
    figure: float
    bound: float
    unit: str
    what: str
    at_least: bool = False

    @property
    def ok(self) -> bool:
        return self.figure >= self.bound if self.at_least else self.figure <= self.bound

    def as_dict(self) -> dict[str, object]:
        return {
            "check": self.check,
            "what": self.what,
            "figure": round(self.figure, 4),
            "bound": self.bound,
            "sense": "at least" if self.at_least else "at most",
            "unit": self.unit,
            "ok": self.ok,
        }


def none_of(check: str, wrong: list[str], what: str) -> Row:
    """A row about things that must not happen; the first three that did are in the sentence."""
    examples = f" Seen: {'; '.join(text[:300] for text in wrong[:3])}" if wrong else ""
    return Row(check, len(wrong), 0, "cases", what + examples)
