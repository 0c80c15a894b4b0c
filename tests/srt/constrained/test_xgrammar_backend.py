"""What may come next in an output that follows a grammar, and when it ends."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest
from byte_vocabulary import COMPILER, EOS, OTHER_EOS, SPECIAL, WITHOUT_TEXT, allowed, random_output, start

from sglang.srt.constrained import xgrammar_backend
from sglang.srt.constrained.xgrammar_backend import ANY_JSON, GrammarSource, XGrammarGrammar


def accept(grammar: XGrammarGrammar, text: str) -> None:
    assert all(grammar.accept_token(byte) for byte in text.encode())


def test_stop_tokens_come_exactly_where_the_text_may_end() -> None:
    grammar = start("regex", "ab*")
    assert allowed(grammar) == [ord("a")]
    accept(grammar, "a")
    assert allowed(grammar) == [ord("b"), EOS, OTHER_EOS]
    accept(grammar, "b")
    assert not grammar.is_terminated() and grammar.accept_token(OTHER_EOS) and grammar.is_terminated()


def test_a_token_that_is_not_allowed_is_refused() -> None:
    for token in (ord("b"), EOS, SPECIAL, WITHOUT_TEXT):
        assert not start("regex", "ab").accept_token(token)


def test_ignore_eos_ends_only_what_can_not_go_on() -> None:
    grammar = start("regex", "ab?", ignore_eos=True)
    accept(grammar, "a")
    assert allowed(grammar) == [ord("b")]
    accept(grammar, "b")
    assert allowed(grammar) == [EOS, OTHER_EOS]
    assert grammar.accept_token(EOS) and grammar.is_terminated()


def test_stop_token_ids() -> None:
    grammar = start("regex", "ab?", stop_token_ids=[SPECIAL, ord("b"), EOS], ignore_eos=True)
    assert allowed(grammar) == [ord("a")]
    accept(grammar, "a")
    assert allowed(grammar) == [ord("b"), SPECIAL]  # b is text of the grammar
    assert grammar.accept_token(SPECIAL) and grammar.is_terminated()
    assert not start("regex", "ab?", stop_token_ids=[SPECIAL]).accept_token(SPECIAL)


def test_special_tokens_are_text_where_they_are_shown() -> None:
    hidden, shown = (start("regex", "(<special>|<eos>|<x>)+", special_tokens=special) for special in (False, True))
    assert allowed(hidden) == [ord("<")]
    assert allowed(shown) == [ord("<"), SPECIAL]
    assert not hidden.accept_token(SPECIAL) and shown.accept_token(SPECIAL)
    assert allowed(shown) == [ord("<"), EOS, OTHER_EOS, SPECIAL]


def test_min_new_tokens_against_a_grammar_that_ends() -> None:
    grammar = start("regex", "ab", min_new_tokens=3)
    accept(grammar, "ab")
    assert allowed(grammar) == []
    assert grammar.failure == "it ends after 2 tokens, but min_new_tokens is 3"
    longer = start("regex", "ab*", min_new_tokens=3)
    accept(longer, "ab")
    assert ord("b") in allowed(longer) and longer.failure is None


def test_an_output_that_can_not_go_on() -> None:
    grammar = start("regex", r"a[^\s\S]")
    accept(grammar, "a")
    assert allowed(grammar) == [] and grammar.failure == "no token of the vocabulary can come next"


@pytest.fixture
def no_patience(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(xgrammar_backend, "MAX_MASK_SECONDS", 0.0)
    monkeypatch.setattr(xgrammar_backend, "MASK_SECONDS_PER_TOKEN", 0.0)
    yield


def test_masks_that_take_too_long(no_patience: None) -> None:
    grammar = start("regex", "a+")
    assert allowed(grammar) == []
    assert re.fullmatch("following it took .* s of computing time for 0 tokens, .*; simplify it", grammar.failure or "")


def refusal(kind: str, text: str) -> str:
    with pytest.raises((RuntimeError, ValueError)) as error:
        COMPILER.check(GrammarSource(kind, text))
    return str(error.value)


def test_what_the_check_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusal("regex", "x[^\\s\\S]") == "no token of the vocabulary can come next"
    assert "root rule" in refusal("ebnf", 'foo ::= "a"')
    assert refusal("structural_tag", '{"structures": [{"end": "x"}]}').startswith("a structural tag must be {")
    assert "JSON Schema at #: multipleOf" in refusal("structural_tag", structural_tag({"multipleOf": 3}))
    assert refusal("lark", "") == "unknown kind of grammar 'lark'"
    monkeypatch.setattr(xgrammar_backend, "MAX_COMPILE_SECONDS", 0.0)
    assert re.fullmatch("compiling it takes .* s, 0.0 s are accepted; simplify it", refusal("regex", "a"))


def test_anchors_and_classes_of_a_regex_that_would_not_be_followed() -> None:
    for pattern, words, text in (
        ("a$b", "pattern 'a$b' has $ elsewhere than at its end", "ab"),
        ("a(^b|c)", "pattern 'a(^b|c)' has ^ elsewhere than at its beginning", "ab"),
        (r"[\^a]", r"pattern '[\\^a]' has a class that begins with \^", "b"),
    ):
        tag = json.dumps({"type": "structural_tag", "format": {"type": "regex", "pattern": pattern}})
        for kind, source in (("regex", pattern), ("structural_tag", tag)):
            accept(start(kind, source), text)  # xgrammar has learnt this if it fails: accept it
            assert refusal(kind, source).startswith(words)
    assert "Lookahead" in refusal("regex", "(?!a)b")
    for pattern in ("^(a|b)$", "^a$|^b$", r"\^\$[$^][^^]"):
        COMPILER.check(GrammarSource("regex", pattern))


def structural_tag(schema: object) -> str:
    tag = {"type": "tag", "begin": "<f>", "content": {"type": "json_schema", "json_schema": schema}, "end": "</f>"}
    return json.dumps({"type": "structural_tag", "format": tag})


def test_structural_tags_of_both_forms() -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    older = {
        "type": "structural_tag",
        "structures": [{"begin": "<f>", "schema": schema, "end": "</f>"}, {"begin": "<g>", "end": "</g>"}],
        "triggers": ["<f", "<g"],
    }
    grammar = start("structural_tag", json.dumps(older))
    accept(grammar, 'Any text, then <f>{"n": 12}</f> and more')
    assert EOS in allowed(grammar)
    accept(grammar, "<f>{")
    assert not grammar.accept_token(ord("1"))
    grammar = start("structural_tag", structural_tag(schema))
    assert allowed(grammar) == [ord("<")]
    accept(grammar, '<f>{"n": 12}</f>')
    assert allowed(grammar) == [EOS, OTHER_EOS]


def test_outputs_of_every_kind() -> None:
    for seed in range(30):
        assert re.fullmatch(r"\d{3}-[a-f]{1,4}|é+", random_output("regex", r"\d{3}-[a-f]{1,4}|é+", seed) or "")
        assert random_output("ebnf", 'root ::= "(" root ")" | "x"', seed).strip("()") == "x"  # type: ignore[union-attr]
        if (text := random_output("json_schema", ANY_JSON, seed)) is not None:
            json.loads(text)


def test_white_space() -> None:
    schema = json.dumps({"type": "object", "properties": {"a": {}}, "required": ["a"]})
    for any_whitespace in (True, False):
        compiled = COMPILER.compile(GrammarSource("json_schema", schema, any_whitespace=any_whitespace))
        grammar = XGrammarGrammar(compiled, COMPILER.vocabulary)
        accept(grammar, "{")
        assert (ord("\n") in allowed(grammar)) == any_whitespace
        accept(grammar, '"a": 1}')
    limited = COMPILER.compile(GrammarSource("json_schema", schema, max_whitespace_cnt=2))
    grammar = XGrammarGrammar(limited, COMPILER.vocabulary)
    accept(grammar, "{\n\t")
    assert allowed(grammar) == [ord('"')]
