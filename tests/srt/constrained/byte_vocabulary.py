"""A vocabulary whose tokens are the 256 bytes, and random outputs that follow a grammar."""

from __future__ import annotations

import random

import numpy as np

from sglang.srt.constrained.xgrammar_backend import GrammarCompiler, GrammarSource, Vocabulary, XGrammarGrammar

EOS, OTHER_EOS, SPECIAL, WITHOUT_TEXT = 256, 257, 258, 259
VOCABULARY = Vocabulary(
    tokens=[bytes([i]) for i in range(256)] + [b"<eos>", b"<end>", b"<special>"] + [b""] * 30,
    special_token_ids=[EOS, OTHER_EOS, SPECIAL],
    stop_token_ids=[EOS, OTHER_EOS],
)
COMPILER = GrammarCompiler(VOCABULARY)
# What brings an output to its end.
_CLOSING = [EOS, *b'"}]']


def allowed(grammar: XGrammarGrammar) -> list[int]:
    """Tokens that may come next."""
    row = np.empty(grammar.mask_words, dtype=np.int32)
    grammar.fill_vocab_mask(row)
    return [int(i) for i in np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))]


def start(kind: str, text: str, special_tokens: bool = False, **params: object) -> XGrammarGrammar:
    from sglang.srt.sampling.sampling_params import parse_sampling_params

    compiled = COMPILER.compile(GrammarSource(kind, text, special_tokens))
    return XGrammarGrammar(compiled, VOCABULARY, parse_sampling_params({"max_new_tokens": 10_000, **params}))


def random_output(kind: str, text: str, seed: int, limit: int = 600) -> str | None:
    """A text that the grammar allows; None if it has more than ``limit`` bytes."""
    draw = random.Random(seed)
    grammar = start(kind, text)
    output: list[int] = []
    while len(output) < limit:
        choices = allowed(grammar)
        assert choices, grammar.failure
        closing = [i for i in _CLOSING if i in choices]
        token = draw.choice(closing if closing and draw.random() < 0.5 else choices)
        assert grammar.accept_token(token)
        if grammar.is_terminated():
            return bytes(output).decode("utf-8", "replace")  # as the detokenizer does
        output.append(token)
    return None
