"""Thoughts and answers told apart. That pieces make no difference is in ``function_call/test_detectors.py``."""

from itertools import accumulate

import pytest

from sglang.srt.parser.reasoning_parser import REASONING_PARSERS, ReasoningParser, ReasoningTokenCounter


def parse(text: str, name: str = "qwen3", force: bool = False) -> tuple[str, str]:
    parser = ReasoningParser(REASONING_PARSERS[name], force_reasoning=force)
    result, end = parser.parse_streaming_increment(text), parser.finish()
    return result.reasoning_text + end.reasoning_text, result.normal_text + end.normal_text


@pytest.mark.parametrize(
    ("text", "force", "expected"),
    [
        ("<think>\nhm, 4?\n</think>\n\nFour.\n", False, ("hm, 4?", "Four.\n")),
        ("\n<think>a</think>b", False, ("a", "b")),
        ("hm</think>b", True, ("hm", "b")),
        ("<think>hm</think>b", True, ("hm", "b")),
        ("<think>\n\n</think>\n\nb", False, ("", "b")),
        # Cut off.
        ("<think>so", False, ("so", "")),
        ("so", True, ("so", "")),
        ("so</thi", True, ("so</thi", "")),
        # No thoughts: nothing is changed.
        (" Four. ", False, ("", " Four. ")),
        ("Say <think> and </think>.", False, ("", "Say <think> and </think>.")),
        ("<thin", False, ("", "<thin")),
        # The second mark is text.
        ("<think>a</think>b</think>c", False, ("a", "b</think>c")),
        # A tool call ends thoughts that were left open.
        ("<think>a\n<tool_call>{}", False, ("a", "<tool_call>{}")),
    ],
)
def test_qwen3(text: str, force: bool, expected: tuple[str, str]) -> None:
    assert parse(text, force=force) == expected


def test_deepseek_keeps_what_looks_like_a_call() -> None:
    assert parse("a <tool_call> b</think>c", "deepseek-r1", force=True) == ("a <tool_call> b", "c")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[THINK]a <think> b[/THINK] c", ("a <think> b", "c")),
        ("[THINK]a[TOOL_CALLS]b", ("a[TOOL_CALLS]b", "")),
        ("[/THINK] a", ("", "[/THINK] a")),
    ],
)
def test_mistral(text: str, expected: tuple[str, str]) -> None:
    assert parse(text, "mistral") == expected


@pytest.mark.parametrize("stream", [True, False])
def test_thoughts_are_streamed_or_kept(stream: bool) -> None:
    parser = ReasoningParser(REASONING_PARSERS["qwen3"], force_reasoning=False, stream_reasoning=stream)
    pieces = [parser.parse_streaming_increment(text) for text in ("<think>a", "b", "c</think>", "d")]
    assert [piece.reasoning_text for piece in pieces] == (["a", "b", "c", ""] if stream else ["", "", "abc", ""])
    assert "".join(piece.normal_text for piece in pieces) + parser.finish().normal_text == "d"


COUNTED = [
    # Tokens of an output, and how many of them are thoughts.
    (["<think>", "\n", "hm", "</think>", "\n\n", "Four", "."], False, 4),
    (
        ["<", "think", ">hm</", "think", ">\n\nFour", "."],
        False,
        5,
    ),  # the last of them ends thoughts and begins the answer
    (["\n", "<think>", "a", "</think>"], False, 4),
    (["<think>", "</think>", "b", "</think>"], False, 2),
    (["hm", "</think>", "b"], True, 2),
    (["<think>", "hm", "</think>", "b"], True, 3),
    (["Four", ".", "</think>"], False, 0),
    (["<thi", "n"], False, 0),
    (["<think>", "so"], False, 2),
    (["so", "</thi"], True, 2),
    ([], True, 0),
    # A tool call is no thought, nor is the token that begins with it.
    (["<think>", "a", "\n", "<tool_call>", "{}"], False, 3),
    (["<tool_call>", "{}", "</tool_call>"], True, 0),
    # Half characters, and bytes that are none.
    (["<think>", b"\xc3", b"\xa9", b"\xf0\x9f", "</think>", b"\xc3", b"\xa9"], False, 5),
]


@pytest.mark.parametrize(("pieces", "force", "count"), COUNTED)
def test_tokens_of_thoughts_are_counted(pieces: list[str | bytes], force: bool, count: int) -> None:
    table = {i: piece.encode() if isinstance(piece, str) else piece for i, piece in enumerate(pieces)}
    whole = ReasoningTokenCounter(REASONING_PARSERS["qwen3"], table, force_reasoning=force)
    assert whole.count(range(len(pieces))) == whole.count(range(len(pieces))) == count
    cut = ReasoningTokenCounter(REASONING_PARSERS["qwen3"], table, force_reasoning=force)
    counts = [cut.count(range(end)) for end in accumulate([1] * len(pieces))]
    assert counts == sorted(counts) and (counts[-1:] or [0]) == [count]
