"""xgrammar: grammars compiled for a vocabulary, and the state of one that an output is following."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from sglang.srt.constrained.json_schema_validation import lengths_as_patterns, validate_xgrammar_json_schema
from sglang.srt.constrained.regex_validation import problem_of_regex

if TYPE_CHECKING:
    from sglang.srt.sampling.sampling_params import SamplingParams

# SGLang's json_schema for any JSON value.
ANY_JSON = "$$ANY$$"

# Seconds of CPU time. The scheduler compiles between two steps, and computes masks in every step: whatever takes
# longer than this is refused or, once it runs, ended.
MAX_COMPILE_SECONDS = 0.5
MAX_MASK_SECONDS = 1.0  # one mask, or all together above the following
MASK_SECONDS_PER_TOKEN = 0.02
_PROBE_STEPS = 32
_CACHE_BYTES = 256 << 20


class Vocabulary(msgspec.Struct, frozen=True):
    """What tokens stand for in an output.

    Attributes:
        tokens: bytes of every token of the model's vocabulary; empty where a token has no text: no grammar allows it.
        special_token_ids: tokens whose text is only shown where ``skip_special_tokens`` is off.
        stop_token_ids: what may come where the text may end.
    """

    tokens: list[bytes]
    special_token_ids: list[int]
    stop_token_ids: list[int]


class GrammarSource(msgspec.Struct, frozen=True):
    """A grammar as a client wrote it.

    Attributes:
        kind: the sampling parameter that ``text`` is the value of.
        special_tokens: special tokens have a text.
        any_whitespace: JSON of a ``json_schema`` may have white space between any two tokens; else one space behind
            commas and colons.
        max_whitespace_cnt: at most so much of it at one place; None for no limit.
    """

    kind: str
    text: str
    special_tokens: bool = False
    any_whitespace: bool = True
    max_whitespace_cnt: int | None = None


class GrammarCompiler:
    """Compiles for one vocabulary. What a mask needs is computed when it is first needed, so that compiling is quick.

    Raises:
        ImportError: there is no usable xgrammar.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._compilers = [self._compiler(special_tokens) for special_tokens in (False, True)]

    def _compiler(self, special_tokens: bool) -> Any:
        import xgrammar

        tokens = list(self.vocabulary.tokens)
        if not special_tokens:
            for token_id in self.vocabulary.special_token_ids:
                tokens[token_id] = b""
        info = xgrammar.TokenizerInfo(
            tokens, xgrammar.VocabType.RAW, vocab_size=len(tokens), stop_token_ids=self.vocabulary.stop_token_ids
        )
        return xgrammar.GrammarCompiler(
            info, max_threads=1, cache_limit_bytes=_CACHE_BYTES, enable_dynamic_compilation=True
        )

    def compile(self, source: GrammarSource) -> Any:
        """xgrammar's ``CompiledGrammar``.

        Raises:
            RuntimeError, ValueError: the grammar is wrong.
        """
        text, compiler = source.text, self._compilers[source.special_tokens]
        match source.kind:
            case "json_schema" if text == ANY_JSON:
                return compiler.compile_builtin_json_grammar()
            case "json_schema":
                return compiler.compile_json_schema(
                    _prepared(text),
                    any_whitespace=source.any_whitespace,
                    max_whitespace_cnt=source.max_whitespace_cnt,
                )
            case "regex":
                return compiler.compile_regex(text)
            case "ebnf":
                return compiler.compile_grammar(text)
            case "structural_tag":
                tag = _structural_tag(text)
                for form in _formats_with("json_schema", tag):
                    if form.get("style", "json") == "json" and form.get("type") == "json_schema":
                        lengths_as_patterns(form["json_schema"])
                return compiler.compile_structural_tag(json.dumps(tag))
        raise ValueError(f"unknown kind of grammar {source.kind!r}")

    def check(self, source: GrammarSource) -> None:
        """Compile a grammar and follow it for some random tokens.

        Raises:
            RuntimeError, ValueError: it is wrong, can't be followed exactly, allows no output, or costs too much.
        """
        began = time.process_time()
        compiled = self.compile(source)
        if (seconds := time.process_time() - began) > MAX_COMPILE_SECONDS:
            raise ValueError(f"compiling it takes {seconds:.1f} s, {MAX_COMPILE_SECONDS} s are accepted; simplify it")
        for schema in _schemas(source):
            validate_xgrammar_json_schema(schema)
        for pattern in _regexes(source):
            if problem := problem_of_regex(pattern):
                raise ValueError(f"pattern {pattern!r} {problem}")
        grammar = XGrammarGrammar(compiled, self.vocabulary)
        row = np.empty(grammar.mask_words, dtype=np.int32)
        draw = random.Random(0)
        for _ in range(_PROBE_STEPS):
            grammar.fill_vocab_mask(row)
            if grammar.failure is not None:
                raise ValueError(grammar.failure)
            allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
            if not grammar.accept_token(int(draw.choice(allowed))) or grammar.is_terminated():
                return


def _prepared(text: str) -> str:
    if '"minLength"' not in text and '"maxLength"' not in text:
        return text
    schema = json.loads(text)
    lengths_as_patterns(schema)
    return json.dumps(schema)


def _structural_tag(text: str) -> dict[str, Any]:
    """xgrammar's structural tag; SGLang's older form (``structures`` and ``triggers``) is rewritten."""
    tag = json.loads(text)
    if not isinstance(tag, dict) or "structures" not in tag:
        return tag
    try:
        tags = [
            {
                "begin": structure["begin"],
                "content": {"type": "json_schema", "json_schema": structure.get("schema") or {}},
                "end": structure["end"],
            }
            for structure in tag["structures"]
        ]
        form = {"type": "triggered_tags", "triggers": tag["triggers"], "tags": tags}
    except (KeyError, TypeError, AttributeError):
        raise ValueError(
            'a structural tag must be {"type": "structural_tag", "format": {...}} or {"structures": [{"begin": ..., '
            '"schema": {...}, "end": ...}], "triggers": [...]}'
        ) from None
    return {"type": "structural_tag", "format": form}


def _schemas(source: GrammarSource) -> Iterator[Any]:
    """The JSON Schemas in a grammar."""
    if source.kind == "json_schema" and source.text != ANY_JSON:
        yield json.loads(source.text)
    elif source.kind == "structural_tag":
        for form in _formats_with("json_schema", _structural_tag(source.text)):
            yield form["json_schema"]


def _regexes(source: GrammarSource) -> Iterator[str]:
    """The regular expressions in a grammar, those of its JSON Schemas aside."""
    if source.kind == "regex":
        yield source.text
    elif source.kind == "structural_tag":
        for form in _formats_with("pattern", _structural_tag(source.text)):
            if form.get("type") == "regex":
                yield form["pattern"]


def _formats_with(field: str, form: Any) -> Iterator[dict[str, Any]]:
    """The formats of a structural tag that have ``field``."""
    if isinstance(form, list):
        for each in form:
            yield from _formats_with(field, each)
    elif isinstance(form, dict):
        if field in form:
            yield form
        for name, value in form.items():
            if name != "json_schema":
                yield from _formats_with(field, value)


class XGrammarGrammar:
    """Where one output is in its grammar.

    Where the text may end, the model's stop tokens may come, and special tokens of the request's ``stop_token_ids``.
    With ``ignore_eos`` the former come only where nothing else can.

    Attributes:
        failure: why the output can't go on; None while it can.
        mask_words: int32 words of a mask.
    """

    def __init__(self, compiled: Any, vocabulary: Vocabulary, params: SamplingParams | None = None) -> None:
        import xgrammar

        self._matcher = xgrammar.GrammarMatcher(compiled)
        self.mask_words = -(-len(vocabulary.tokens) // 32)
        # xgrammar allows what comes behind the vocabulary.
        self._last_word = np.uint32(0xFFFFFFFF >> (32 * self.mask_words - len(vocabulary.tokens)))
        self.failure: str | None = None
        self._eos = vocabulary.stop_token_ids
        own = set(params.stop_token_ids) if params is not None else set()
        self._own_stops = sorted(own.intersection(vocabulary.special_token_ids).difference(self._eos))
        self._ignore_eos = params is not None and params.ignore_eos
        self._min_new_tokens = params.min_new_tokens if params is not None else 0
        self._accepted = 0
        self._stopped = False
        self._seconds = 0.0

    def is_terminated(self) -> bool:
        """The last token ended the text."""
        return self._stopped or bool(self._matcher.is_terminated())

    def accept_token(self, token_id: int) -> bool:
        """Take the token that was sampled; False if the grammar doesn't allow it."""
        began = time.thread_time()
        self._accepted += 1
        if token_id in self._own_stops and self._matcher.is_completed():
            self._stopped = True
            return True
        accepted = bool(self._matcher.accept_token(token_id))
        self._seconds += time.thread_time() - began
        return accepted

    def fill_vocab_mask(self, row: np.ndarray[Any, np.dtype[np.int32]]) -> None:
        """Write which tokens may come next into ``row`` [mask_words] int32, bit i of word w for token 32 * w + i. None
        may, and ``failure`` says why, where the output can't go on."""
        began = time.thread_time()
        self._matcher.fill_next_token_bitmask(row[np.newaxis])
        row[-1:].view(np.uint32)[:] &= self._last_word
        may_end = self._matcher.is_completed()
        for token_id in self._eos:
            _set(row, token_id, False)
        must_end = not row.any()
        if may_end:
            if must_end or not self._ignore_eos:
                for token_id in self._eos:
                    _set(row, token_id, True)
            for token_id in self._own_stops:
                _set(row, token_id, True)
        self._seconds += time.thread_time() - began
        self.failure = self._failure(must_end, may_end)
        if self.failure is not None:
            row.fill(0)

    def _failure(self, must_end: bool, may_end: bool) -> str | None:
        if must_end and not may_end:
            return "no token of the vocabulary can come next"
        if must_end and self._accepted < self._min_new_tokens:
            return f"it ends after {self._accepted} tokens, but min_new_tokens is {self._min_new_tokens}"
        if self._seconds > MAX_MASK_SECONDS + MASK_SECONDS_PER_TOKEN * self._accepted:
            return (
                f"following it took {self._seconds:.1f} s of computing time for {self._accepted} tokens, which other "
                "requests would wait for; simplify it"
            )
        return None


def _set(row: np.ndarray[Any, np.dtype[np.int32]], token_id: int, allowed: bool) -> None:
    bits = row.view(np.uint32)
    bit = np.uint32(1 << token_id % 32)
    bits[token_id // 32] = bits[token_id // 32] | bit if allowed else bits[token_id // 32] & ~bit
