import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from sglang.srt.errors import CheckpointError
from sglang.srt.managers.detokenizer import IncrementalDetokenizer, StopMatcher, TokenDecoder

FIXTURE = Path(__file__).parents[2] / "fixtures" / "tiny-llama-bf16"


def _sentencepiece_tokenizer(strip: bool) -> Any:
    """As llama 2 and mistral have it: ▁ for spaces, byte tokens, one leading space stripped."""
    words = ["▁Hello", "▁world", "lo", "▁", "é", "日", "本", "▁日本", ".", "\n"]
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for token in [*(f"<0x{byte:02X}>" for byte in range(256)), *words]:
        vocab[token] = len(vocab)
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<unk>", "<s>", "</s>")])
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def _byte_level_with_added_tokens() -> Any:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    backend.decoder = decoders.Sequence([decoders.ByteLevel()])
    backend.add_tokens([AddedToken("  "), AddedToken("<think>"), AddedToken("日本")])
    backend.add_special_tokens([AddedToken("<▁end▁of▁text▁>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=backend)


BYTE_LEVEL = AutoTokenizer.from_pretrained(FIXTURE)
BYTE_LEVEL_ADDED = _byte_level_with_added_tokens()
SENTENCEPIECE = _sentencepiece_tokenizer(strip=False)
DECODERS = {id(t): TokenDecoder(t) for t in (BYTE_LEVEL, BYTE_LEVEL_ADDED, SENTENCEPIECE)}


def _stream(tokenizer: Any, ids: Sequence[int], cuts: Sequence[int], **options: Any) -> tuple[str, list[str], int]:
    """All text, its pieces, and the number of tokens used, when ``ids`` arrive in chunks ending at ``cuts``."""
    detokenizer = IncrementalDetokenizer(DECODERS[id(tokenizer)], options.pop("prompt", ()), **options)
    pieces, used, start = [], 0, 0
    for end in [*sorted(set(cuts)), len(ids)]:
        text, n = detokenizer.feed(ids[start:end])
        pieces.append(text)
        used += n
        if detokenizer.matched is not None:
            return "".join(pieces), pieces, used
        start = end
    pieces.append(detokenizer.finish())
    return "".join(pieces), pieces, used


def _cuts(n: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, n), max_size=8)


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_LEVEL_ADDED], ids=["fixture", "added-tokens"])
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_random_tokens_equal_full_decode(tokenizer: Any, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=40))
    cuts = data.draw(_cuts(len(ids)))
    skip = data.draw(st.booleans())
    text, _, used = _stream(tokenizer, ids, cuts, skip_special_tokens=skip)
    expected = tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
    assert text == expected
    assert used == len(ids)
    assert DECODERS[id(tokenizer)].decode(ids, skip_special_tokens=skip) == expected


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=20), data=st.data())
def test_whole_characters_only(text: str, data: st.DataObject) -> None:
    """However a text is cut, no piece before the last ends in half a character, and nothing waits without need."""
    ids = BYTE_LEVEL.backend_tokenizer.encode(text, add_special_tokens=False).ids
    streamed, pieces, _ = _stream(BYTE_LEVEL, ids, data.draw(_cuts(len(ids))), skip_special_tokens=False)
    assert streamed == BYTE_LEVEL.decode(ids, clean_up_tokenization_spaces=False)
    if "\ufffd" not in streamed:
        assert all("\ufffd" not in piece for piece in pieces)
        assert pieces[-1] == ""


@settings(max_examples=200, deadline=None)
@given(text=st.text(alphabet="Hello world.\né日本語🙂▁", min_size=1, max_size=20), data=st.data())
def test_sentencepiece_equals_full_decode(text: str, data: st.DataObject) -> None:
    """Valid byte runs only: of an invalid one the full decode makes one U+FFFD a byte, in hindsight."""
    vocab = SENTENCEPIECE.get_vocab()
    ids: list[int] = []
    for char in text.replace(" ", "▁"):
        ids += [vocab[char]] if char in vocab else [vocab[f"<0x{byte:02X}>"] for byte in char.encode()]
    streamed, _, _ = _stream(SENTENCEPIECE, ids, data.draw(_cuts(len(ids))))
    assert streamed == SENTENCEPIECE.decode(ids, clean_up_tokenization_spaces=False)


def test_sentencepiece_keeps_the_space_after_the_prompt() -> None:
    tokenizer = _sentencepiece_tokenizer(strip=True)
    vocab = tokenizer.get_vocab()
    prompt, output = [vocab["▁Hello"]], [vocab["▁world"], vocab["."]]
    detokenizer = IncrementalDetokenizer(TokenDecoder(tokenizer), prompt)
    text = detokenizer.feed(output)[0] + detokenizer.finish()
    assert text == " world."
    assert tokenizer.decode(prompt + output) == tokenizer.decode(prompt) + text


def test_character_begun_by_the_prompt() -> None:
    ids = [BYTE_LEVEL.convert_tokens_to_ids(token) for token in ("Ã", "©")]  # the bytes of é
    text, _, _ = _stream(BYTE_LEVEL, ids[1:], [], prompt=[0, 300, 301, *ids[:1]])
    assert text == "é"


def test_incomplete_character_at_the_end() -> None:
    first = BYTE_LEVEL.convert_tokens_to_ids("Ã")
    detokenizer = IncrementalDetokenizer(DECODERS[id(BYTE_LEVEL)], [0])
    assert detokenizer.feed([first]) == ("", 1)
    assert detokenizer.finish() == "\ufffd"


def test_ids_without_a_token_have_no_text() -> None:
    assert _stream(BYTE_LEVEL, [5000], [], skip_special_tokens=False)[0] == ""


def test_unknown_decoder_is_refused() -> None:
    backend = Tokenizer(models.WordPiece({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(CheckpointError, match="WordPiece"):
        TokenDecoder(PreTrainedTokenizerFast(tokenizer_object=backend))
    backend.decoder = None
    with pytest.raises(CheckpointError, match="no decoder"):
        TokenDecoder(PreTrainedTokenizerFast(tokenizer_object=backend))
    with pytest.raises(CheckpointError, match="stop"):
        backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Strip(" ", 1, 1)])
        TokenDecoder(PreTrainedTokenizerFast(tokenizer_object=backend))
    assert json.loads(backend.decoder.__getstate__())["type"] == "Sequence"


def _first_match(text: str, stop: Sequence[str]) -> tuple[str, str | None]:
    """The definition: the match that is complete first, the longest of several."""
    for end in range(1, len(text) + 1):
        complete = [s for s in stop if text[:end].endswith(s)]
        if complete:
            matched = max(complete, key=len)
            return text[: end - len(matched)], matched
    return text, None


SMALL = st.text(alphabet="ab", min_size=1, max_size=4)


@settings(max_examples=500, deadline=None)
@given(text=st.text(alphabet="abc", max_size=30), stop=st.lists(SMALL, min_size=1, max_size=3), data=st.data())
def test_stop_strings_do_not_depend_on_the_cuts(text: str, stop: list[str], data: st.DataObject) -> None:
    matcher = StopMatcher(stop)
    shown, start = "", 0
    expected, matched = _first_match(text, stop)
    for end in [*sorted(set(data.draw(_cuts(len(text))))), len(text)]:
        shown += matcher.feed(text[start:end])
        start = end
        assert expected.startswith(shown)  # nothing of a stop string is ever shown
        if matcher.matched is None:
            # and nothing is held back that can't become one
            held = text[len(shown) : end]
            assert held == "" or any(s.startswith(held) for s in stop)
    assert matcher.matched == matched
    assert shown + matcher.flush() == expected


def test_stop_string_over_token_borders() -> None:
    ids = BYTE_LEVEL.backend_tokenizer.encode("one two three", add_special_tokens=False).ids
    for cuts in ([], range(len(ids))):
        text, pieces, used = _stream(BYTE_LEVEL, ids, list(cuts), stop=["o th", "zzz"])
        assert text == "one tw"
        assert BYTE_LEVEL.decode(ids[:used]).startswith("one two th")
        assert not BYTE_LEVEL.decode(ids[: used - 1]).startswith("one two th")
        assert "o t" not in "".join(pieces)


def test_held_back_text_comes_at_the_end() -> None:
    ids = BYTE_LEVEL.backend_tokenizer.encode("abc sto", add_special_tokens=False).ids
    text, pieces, _ = _stream(BYTE_LEVEL, ids, list(range(len(ids))), stop=["stop"])
    assert text == "abc sto"
    assert pieces[-1] == "sto"
