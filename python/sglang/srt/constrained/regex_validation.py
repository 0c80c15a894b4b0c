"""Regular expressions that xgrammar follows exactly; all others are refused.

xgrammar takes a pattern for the whole text and drops its anchors and (in a JSON Schema) its lookaheads. An anchor at an
end of the pattern holds for a whole text anyway; outputs would break any other.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

# Escapes and classes are one token, since what is in them is no syntax. An anchor or a group has its repetition with
# it, except ?, which repeats nothing.
_TOKEN = re.compile(
    r"\\.|\[\^?(?:\\.|[^\]\\])*\]|\(\?<?[=!]|\(\?[a-z]+\)|\((?:\?(?::|P?<\w+>))?|\)\?*[*+{]?|[\^$][?*+{]?|.", re.DOTALL
)
_LOOKAROUND = frozenset({"(?=", "(?!", "(?<=", "(?<!"})
_OTHER_ANCHORS = frozenset({r"\A", r"\Z", r"\z"})


def problem_of_pattern(pattern: str) -> str | None:
    """What xgrammar would not follow in ``pattern``, which it compiles; None if it follows all of it."""
    syntax: list[str] = []
    opened: list[int] = []
    for token in _TOKEN.findall(pattern):
        if token in _LOOKAROUND:
            return "has a lookahead or lookbehind, which would not be followed"
        if token in _OTHER_ANCHORS:
            return f"has {token}, which would be taken for a letter: use ^ and $"
        match token[0]:
            case "^" | "$" if len(token) > 1:
                return f"has {token}, a repetition that would not be followed"
            case "^" | "$" | "|":
                syntax.append(token)
            case "(" if token[-1] != ")":
                opened.append(len(syntax))
                syntax.append("(")
            case ")":
                syntax.append(")")
                start = opened.pop() if opened else 0
                if token[-1] in "*+{":  # the group comes before and behind itself
                    syntax.append("x")
                    syntax.insert(start, "x")
            case "(" | "?":
                pass
            case _:
                syntax.append("x")
    if _anchor_inside(syntax, "^", "(", ")"):
        return "has ^ elsewhere than at its beginning, where it would not be followed"
    if _anchor_inside(reversed(syntax), "$", ")", "("):
        return "has $ elsewhere than at its end, where it would not be followed"
    return None


def problem_of_regex(pattern: str) -> str | None:
    """As :func:`problem_of_pattern`, for what is no part of a JSON Schema: xgrammar reads that differently."""
    if any(token.startswith(r"[\^") for token in _TOKEN.findall(pattern)):
        return (
            r"has a class that begins with \^, which would be taken for [^: write \^ alone, or another character first"
        )
    return problem_of_pattern(pattern)


def _anchor_inside(syntax: Iterable[str], anchor: str, opening: str, closing: str) -> bool:
    """Whether an ``anchor`` comes behind anything but anchors; alternatives come behind the same."""
    at_start, groups = True, [True]
    for token in syntax:
        if token == opening:
            groups.append(at_start)
        elif token == "|":
            at_start = groups[-1]
        elif token == anchor:
            if not at_start:
                return True
        elif token == closing:
            at_start = False
            if len(groups) > 1:
                groups.pop()
        elif token == "x":
            at_start = False
    return False
