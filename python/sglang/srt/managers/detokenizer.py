"""Token ids to text, one step at a time: no half characters, no part of a stop string, O(new tokens) per step."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from sglang.srt.errors import CheckpointError
from sglang.srt.sampling.stop_regex import StopRegexMatcher

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# A UTF-8 character has at most this many bytes, so this many tokens before a position determine it.
_LONGEST_CHARACTER = 4
_new_utf8_decoder = codecs.getincrementaldecoder("utf-8")


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for every byte value."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    hidden = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


class _Pieces(dict[int, bytes]):
    """Token id -> bytes, filled on first use."""

    def __init__(self, compute: Callable[[int], bytes]) -> None:
        self._compute = compute

    def __missing__(self, token_id: int) -> bytes:
        piece = self[token_id] = self._compute(token_id)
        return piece


class TokenDecoder:
    """The bytes each token of a tokenizer stands for, read off its ``decoder``.

    Byte-level BPE and SentencePiece-style vocabularies (with or without byte fallback) are concatenations of such
    bytes; only the strip of one leading space at the very start of a text is not, and it does not apply here because
    an output always follows a prompt. The bytes are those of the tokens: no clean-up of spaces before punctuation.

    Raises:
        CheckpointError: the tokenizer decodes in another way.
    """

    def __init__(self, tokenizer: Any) -> None:
        backend = tokenizer.backend_tokenizer
        self._id_to_token: Callable[[int], str | None] = backend.id_to_token
        added = tokenizer.added_tokens_decoder
        self._added = {token_id: token.content for token_id, token in added.items()}
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._replacements: list[tuple[str, str]] = []
        self._byte_level: dict[str, int] | None = None
        self._byte_fallback = False
        for step in _decoder_steps(backend):
            self._read_step(step)
        self.pieces = _Pieces(self._piece)
        self.visible_pieces = _Pieces(lambda i: b"" if i in self.special_ids else self.pieces[i])

    def _read_step(self, step: dict[str, Any]) -> None:
        match step:
            case {"type": "ByteLevel"}:
                self._byte_level = _byte_level_alphabet()
            case {"type": "ByteFallback"}:
                self._byte_fallback = True
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                self._replacements.append((old, new))
            case {"type": "Metaspace", "replacement": str(old)}:
                self._replacements.append((old, " "))
            case {"type": "Fuse"} | {"type": "Strip", "content": " ", "stop": 0}:
                pass
            case _:
                raise CheckpointError(
                    f"The tokenizer's decoder step {json.dumps(step)} is not supported; supported are ByteLevel, and "
                    "Replace/Metaspace with ByteFallback, Fuse and Strip. Name another tokenizer with --tokenizer-path."
                )

    def _piece(self, token_id: int) -> bytes:
        token = self._id_to_token(token_id)
        if token is None:  # a padded vocabulary has ids without a token
            return b""
        if token_id in self._added:
            return str(self._added[token_id]).encode()
        if self._byte_level is not None:
            try:
                return bytes([self._byte_level[char] for char in token])
            except KeyError:
                return token.encode()
        if self._byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        for old, new in self._replacements:
            token = token.replace(old, new)
        return token.encode()

    def text(self, token_id: int) -> str:
        """One token alone; bytes that are no whole character become U+FFFD."""
        return self.pieces[token_id].decode("utf-8", "replace")

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of a whole sequence."""
        pieces = self.visible_pieces if skip_special_tokens else self.pieces
        return b"".join([pieces[i] for i in token_ids]).decode("utf-8", "replace")


def _decoder_steps(backend: Any) -> Iterator[dict[str, Any]]:
    """The elementary steps of a ``tokenizers`` decoder, in order."""
    if backend.decoder is None:
        raise CheckpointError("The tokenizer has no decoder, so its tokens can't be turned into text.")
    pending = [json.loads(backend.decoder.__getstate__())]
    while pending:
        step = pending.pop(0)
        if step["type"] == "Sequence":
            pending[:0] = step["decoders"]
        else:
            yield step


class StopMatcher:
    """Finds the first stop string to be completed in a text that arrives in pieces of any size.

    One Knuth-Morris-Pratt state per string: constant work per character, and the longest state is exactly how many
    characters could still become part of a match and must be held back. Of strings completed by the same character
    the longest wins. ``keep``: the string that was found is part of what may be shown.
    """

    def __init__(self, stop: Sequence[str], keep: bool = False) -> None:
        self._keep = keep
        self._stop = [(text, _failure_table(text)) for text in stop]
        self._states = [0] * len(stop)
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """What of the text so far may be shown now; after a match everything up to it, then nothing."""
        if self.matched is not None:
            return ""
        text = self._held + text
        for position in range(len(self._held), len(text)):
            char = text[position]
            for index, (stop, failure) in enumerate(self._stop):
                state = self._states[index]
                while state and stop[state] != char:
                    state = failure[state - 1]
                if stop[state] == char:
                    state += 1
                self._states[index] = state
                if state == len(stop) and len(stop) > len(self.matched or ""):
                    self.matched = stop
            if self.matched is not None:
                self._held = ""
                return text[: position + 1 - (0 if self._keep else len(self.matched))]
        shown = len(text) - max(self._states, default=0)
        self._held = text[shown:]
        return text[:shown]

    def flush(self) -> str:
        """The end of the text came: what was held back."""
        held, self._held = self._held, ""
        return held


def _failure_table(text: str) -> list[int]:
    table = [0] * len(text)
    state = 0
    for i in range(1, len(text)):
        while state and text[i] != text[state]:
            state = table[state - 1]
        if text[i] == text[state]:
            state += 1
        table[i] = state
    return table


class IncrementalDetokenizer:
    """The output text of one request.

    Args:
        decoder: shared by all requests.
        prompt_ids: a character that the prompt's last token leaves open is completed by the output.
        stop: strings that end the output; none of them is ever part of the text, unless ``no_stop_trim``.
        skip_special_tokens: leave special tokens out of the text.
        stop_regex: patterns that end the output behind the token that completes a match, which stays in the text.
    """

    def __init__(
        self,
        decoder: TokenDecoder,
        prompt_ids: Sequence[int],
        stop: Sequence[str] = (),
        skip_special_tokens: bool = True,
        stop_regex: Sequence[str] = (),
        no_stop_trim: bool = False,
    ) -> None:
        self._pieces = decoder.visible_pieces if skip_special_tokens else decoder.pieces
        self._decode = _new_utf8_decoder("replace").decode
        self._decode(b"".join([self._pieces[i] for i in prompt_ids[-_LONGEST_CHARACTER:]]))
        self._matcher = StopMatcher(stop, no_stop_trim) if stop or stop_regex else None
        self._regex = StopRegexMatcher(stop_regex)

    @property
    def matched(self) -> str | None:
        """The stop string or pattern that ended the text."""
        return (self._matcher.matched or self._regex.matched) if self._matcher else None

    def feed(self, token_ids: Sequence[int]) -> tuple[str, int]:
        """New text, and how many of ``token_ids`` belong to the output: not all if a stop string was completed."""
        pieces, decode = self._pieces, self._decode
        if self._matcher is None:
            return decode(b"".join([pieces[i] for i in token_ids])), len(token_ids)
        text = ""
        for used, token_id in enumerate(token_ids, start=1):
            text += self._watch(self._matcher, decode(pieces[token_id]))
            if self.matched is not None:
                return text, used
        return text, len(token_ids)

    def finish(self) -> str:
        """The rest of the text: what was held back, and U+FFFD for a character that stayed incomplete."""
        rest = self._decode(b"", True)
        if self._matcher is None:
            return rest
        text = self._watch(self._matcher, rest)
        return text if self.matched is not None else text + self._matcher.flush()

    def _watch(self, matcher: StopMatcher, text: str) -> str:
        """What may be shown now that ``text`` came. Strings go before patterns, as in SGLang."""
        shown = matcher.feed(text)
        if matcher.matched is None:
            self._regex.feed(text)
            if self._regex.matched is not None:
                shown += matcher.flush()
        return shown
