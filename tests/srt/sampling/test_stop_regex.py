import re

import pytest

from sglang.srt.managers.detokenizer import IncrementalDetokenizer
from sglang.srt.sampling.stop_regex import WINDOW, StopRegexMatcher


class Characters:
    """A decoder whose token ids are characters."""

    def __init__(self) -> None:
        self.pieces = self.visible_pieces = {i: chr(i).encode() for i in range(1, 300)}


def ended(text: str, patterns: list[str], size: int = 1) -> tuple[int | None, str | None]:
    """After how many characters a text that comes in pieces of ``size`` ends, and the pattern."""
    matcher = StopRegexMatcher(patterns)
    for end in range(size, len(text) + size, size):
        matcher.feed(text[end - size : end])
        if matcher.matched is not None:
            return end, matcher.matched
    return None, None


@pytest.mark.parametrize("pattern", ["c", "b+c", "^ab", r"\d{2}", "a.c|x", "c$", "é.", r"\bz", "never"])
@pytest.mark.parametrize("text", ["abbc 12 é!", "xxabc", "12\nabc z", "z"])
def test_as_pythons_search_of_every_prefix(pattern: str, text: str) -> None:
    first = next((end for end in range(1, len(text) + 1) if re.search(pattern, text[:end])), None)
    assert ended(text, [pattern]) == (first, pattern if first else None)


def test_first_pattern_in_the_list_wins() -> None:
    assert ended("abc", ["c", "b"]) == (2, "b")
    assert ended("abc", ["bc", "c"]) == (3, "bc")


def test_only_the_window_is_searched_and_it_is_not_the_beginning() -> None:
    filler = "x" * WINDOW
    assert ended(filler + "ab", ["^x", "ab"], size=len(filler) + 2)[1] == "ab"
    assert ended(filler + "ab", ["^x"]) == (1, "^x")
    matcher = StopRegexMatcher(["^xa", r"\bx", "yx+z"])
    for part in ("y", "x" * (WINDOW - 2), "z"):
        matcher.feed(part)
    assert matcher.matched == "yx+z"  # exactly as long as the window
    matcher = StopRegexMatcher(["yx+z", "^x", r"\bx"])
    for part in ("y", "x" * (WINDOW - 1), "z"):
        matcher.feed(part)
    assert matcher.matched is None


def test_a_pathological_pattern_is_linear() -> None:
    """Python's own engine takes exponential time for these: this test would run into its time limit."""
    for pattern in ("(a+)+$b", "(x+x+)+y", "(a|a|aa)+c", "(.*)*=(.*)*;"):
        assert ended("ax" * 50 + "a" * 3000, [pattern], size=100) == (None, None)


@pytest.mark.parametrize("size", [1, 3])
def test_output_keeps_the_match_and_what_a_stop_string_held_back(size: int) -> None:
    detokenizer = IncrementalDetokenizer(Characters(), [], ["bcdX"], True, ["cd"])  # type: ignore[arg-type]
    text, total = "", 0
    ids = [ord(char) for char in "abcdef"]
    for begin in range(0, len(ids), size):
        shown, used = detokenizer.feed(ids[begin : begin + size])
        text, total = text + shown, total + used
        if detokenizer.matched is not None:
            break
    assert (text, total, detokenizer.matched) == ("abcd", 4, "cd")


def test_a_stop_string_goes_before_a_pattern() -> None:
    for trim, text in ((False, "ab"), (True, "abcd")):
        detokenizer = IncrementalDetokenizer(Characters(), [], ["cd"], True, ["d"], trim)  # type: ignore[arg-type]
        assert detokenizer.feed([ord(char) for char in "abcdef"]) == (text, 4)
        assert detokenizer.matched == "cd"
