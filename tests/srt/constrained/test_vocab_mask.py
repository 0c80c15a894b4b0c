"""A batch's masks against xgrammar's own."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import xgrammar
from byte_vocabulary import VOCABULARY, start

from sglang.srt.constrained.vocab_mask import VocabMask

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


@pytest.mark.parametrize("device", DEVICES)
def test_rows_with_a_grammar_are_masked_as_xgrammar_does(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    size = len(VOCABULARY.tokens)
    assert size % 32, "the last word is not full"
    grammars = [None, start("regex", "[a-z]+"), None, start("json_schema", "{}")]
    mask = VocabMask.from_reqs([SimpleNamespace(grammar=each) for each in grammars])
    assert mask is not None
    logits = torch.randn(4, size, device=device)
    want = logits.clone()
    words = xgrammar.allocate_token_bitmask(4, size)
    for row, grammar in enumerate(grammars):
        if grammar is not None:
            grammar._matcher.fill_next_token_bitmask(words, row)
    xgrammar.apply_token_bitmask_inplace(want, words.to(device), vocab_size=size)
    mask.apply(logits)
    assert torch.equal(logits, want)
    assert logits.isinf().any(dim=1).tolist() == [False, True, False, True]
    assert torch.equal(logits[1].isfinite().nonzero().flatten().cpu(), torch.arange(ord("a"), ord("z") + 1))


def test_no_mask_where_nobody_asks() -> None:
    assert VocabMask.from_reqs([SimpleNamespace(grammar=None)] * 3) is None


def test_a_row_that_can_not_go_on_is_left_without_a_token() -> None:
    grammar = start("regex", r"a[^\s\S]")
    assert grammar.accept_token(ord("a"))
    mask = VocabMask.from_reqs([SimpleNamespace(grammar=None), SimpleNamespace(grammar=grammar)])
    assert mask is not None
    logits = torch.randn(2, len(VOCABULARY.tokens))
    mask.apply(logits)
    assert logits[0].isfinite().all() and logits[1].isneginf().all() and grammar.failure is not None
