"""Thoughts and answers told apart. That pieces make no difference is in ``function_call/test_detectors.py``."""

import pytest

from sglang.srt.parser.reasoning_parser import REASONING_PARSERS, ReasoningParser


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


@pytest.mark.parametrize("stream", [True, False])
def test_thoughts_are_streamed_or_kept(stream: bool) -> None:
    parser = ReasoningParser(REASONING_PARSERS["qwen3"], force_reasoning=False, stream_reasoning=stream)
    pieces = [parser.parse_streaming_increment(text) for text in ("<think>a", "b", "c</think>", "d")]
    assert [piece.reasoning_text for piece in pieces] == (["a", "b", "c", ""] if stream else ["", "", "abc", ""])
    assert "".join(piece.normal_text for piece in pieces) + parser.finish().normal_text == "d"
