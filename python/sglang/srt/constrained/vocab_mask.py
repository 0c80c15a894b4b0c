"""The rows of a batch that follow a grammar, and what it leaves of their logits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from sglang.srt.constrained.xgrammar_backend import XGrammarGrammar
from sglang.srt.platforms import to_device


class ConstrainedRequest(Protocol):
    """What is needed of a request."""

    grammar: XGrammarGrammar | None


@dataclass(frozen=True)
class VocabMask:
    """Tokens that a request's grammar doesn't allow are impossible.

    ``grammars`` are those of rows of the batch, by their index.
    """

    grammars: dict[int, XGrammarGrammar]

    @classmethod
    def from_reqs(cls, reqs: Sequence[ConstrainedRequest]) -> VocabMask | None:
        """None where no request has a grammar."""
        grammars = {row: req.grammar for row, req in enumerate(reqs) if req.grammar is not None}
        return cls(grammars) if grammars else None

    def apply(self, logits: torch.Tensor) -> None:
        """Computes the masks on the CPU, meanwhile a GPU is still busy with ``logits`` [B, vocabulary]. A row whose
        output can't go on becomes -inf everywhere."""
        words = np.empty((len(self.grammars), -(-logits.shape[1] // 32)), dtype=np.int32)
        for grammar, own in zip(self.grammars.values(), words, strict=True):
            grammar.fill_vocab_mask(own)
        bits = np.unpackbits(~words.view(np.uint8), axis=1, count=logits.shape[1], bitorder="little")
        forbidden = to_device(torch.from_numpy(bits.view(np.bool_)), torch.bool, logits.device)
        for row, mask in zip(self.grammars, forbidden, strict=True):
            logits[row].masked_fill_(mask, -math.inf)

    def count(self, token_ids: torch.Tensor) -> None:
        """Tokens are taken by the scheduler, which skips those of an unfinished prompt."""
