"""The scheduler's grammars. Every tensor-parallel rank compiles the same ones at the same turn."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from sglang.srt.constrained.xgrammar_backend import GrammarCompiler, XGrammarGrammar

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import LoadGrammarReq, LoadVocabularyReq
    from sglang.srt.sampling.sampling_params import SamplingParams

logger = logging.getLogger(__name__)


class GrammarBackend:
    """What the HTTP process has tried and sent, by number."""

    def __init__(self) -> None:
        self._compiler: GrammarCompiler | None = None
        self._compiled: dict[int, Any] = {}

    def load_vocabulary(self, recv: LoadVocabularyReq) -> None:
        self._compiler = GrammarCompiler(recv.vocabulary)

    def load(self, recv: LoadGrammarReq) -> None:
        """Compile one; what fails although it was tried is missing afterwards."""
        for number in recv.forget:
            self._compiled.pop(number, None)
        try:
            assert self._compiler is not None, "the vocabulary comes first"
            self._compiled[recv.number] = self._compiler.compile(recv.source)
        except Exception:
            logger.exception("A grammar that was tried can't be compiled: %s", recv.source)

    def start(self, number: int, params: SamplingParams) -> XGrammarGrammar | None:
        """The grammar at its beginning, for one output; None if there is no such grammar."""
        if self._compiler is None or number not in self._compiled:
            return None
        return XGrammarGrammar(self._compiled[number], self._compiler.vocabulary, params)
