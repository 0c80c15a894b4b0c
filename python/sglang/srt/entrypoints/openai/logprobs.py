"""Log-probabilities in OpenAI's two shapes, from SGLang's triples."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from sglang.srt.managers.detokenizer import TokenDecoder
from sglang.srt.managers.request_state import LogprobTriple

Tops = Sequence[list[LogprobTriple] | None]


def chat_logprobs(decoder: TokenDecoder, tokens: Sequence[LogprobTriple], tops: Tops) -> dict[str, Any]:
    """``choices[].logprobs`` of a chat completion. ``tops`` is empty where none were asked for."""
    content = []
    for i, triple in enumerate(tokens):
        best = tops[i] if i < len(tops) else None
        content.append({**_chat_token(decoder, triple), "top_logprobs": [_chat_token(decoder, t) for t in best or ()]})
    return {"content": content, "refusal": None}


def _chat_token(decoder: TokenDecoder, triple: LogprobTriple) -> dict[str, Any]:
    logprob, token_id, _ = triple
    return {"token": decoder.text(token_id), "logprob": logprob, "bytes": list(decoder.pieces[token_id])}


class CompletionLogprobs:
    """``choices[].logprobs`` of a text completion, for one choice, in one piece or in several.

    ``text_offset`` counts characters from the beginning of the choice's text.
    """

    def __init__(self, decoder: TokenDecoder, *, skip_special_tokens: bool) -> None:
        self._decoder = decoder
        self._visible = decoder.visible_pieces if skip_special_tokens else decoder.pieces
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def format(self, tokens: Sequence[LogprobTriple], tops: Tops) -> dict[str, Any]:
        offsets = []
        for _, token_id, _ in tokens:
            offsets.append(self._offset)
            self._offset += len(self._utf8.decode(self._visible[token_id]))
        return {
            "tokens": [self._decoder.text(token_id) for _, token_id, _ in tokens],
            "token_logprobs": [logprob for logprob, _, _ in tokens],
            "top_logprobs": [self._by_text(best) for best in tops] if tops else None,
            "text_offset": offsets,
        }

    def _by_text(self, best: list[LogprobTriple] | None) -> dict[str, float | None] | None:
        if best is None:
            return None
        by_text: dict[str, float | None] = {}
        for logprob, token_id, _ in best:  # best first; of two tokens with one text the better one stays
            by_text.setdefault(self._decoder.text(token_id), logprob)
        return by_text
