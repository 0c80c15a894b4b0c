"""Grammars made to hurt: what can't be satisfied, what never ends compiling, what is too large."""

from __future__ import annotations

import asyncio
import json
import random
import re
import statistics
from collections.abc import Iterator

from clients import Answer, ask, good_client, session
from rows import Row, none_of
from servers import Server, Setup, running

# SGLANG_GRAMMAR_TIMEOUT is 10 s; the compiler's own start is in the first answer, and they queue for its children.
ANSWERED_SECONDS = 120.0
SLOWER = 4.0
GOOD = 40


def hostile_grammars() -> Iterator[tuple[str, str, str]]:
    """Name, kind, text."""
    for name, pattern in (
        ("repetition of repetitions", "a{1,1000}{1,1000}"),
        ("four deep", "((((a{1,99}){1,99}){1,99}){1,99})"),
        ("star of star", "((a*)*)*b"),
        ("alternatives", "(a|a|aa|aaa)*" * 50 + "b{1000}"),
        ("a large class", "[\\u0000-\\U0010ffff]{1,5000}"),
        ("many optional", "(a?){3000}a{3000}"),
        ("look-ahead", "(?=a)b"),
        ("back-reference", "(a)\\1"),
        ("not closed", "(a"),
        ("empty", ""),
        ("what no token has", "\\u0378{3}"),
        ("5000 brackets", "(" * 5000 + "a" + ")" * 5000),
        ("1 MB", "ab" * (1 << 19)),
    ):
        yield name, "regex", pattern
    for name, grammar in (
        ("no root", 'x ::= "a"'),
        ("undefined rule", "root ::= x"),
        ("left recursion", 'root ::= root "a" | "a"'),
        ("nothing but itself", "root ::= root"),
        ("mutual", "root ::= a\na ::= b\nb ::= a"),
        ("ambiguous", 'root ::= "" | root root | "a"'),
        (
            "exponential",
            "root ::= a0\n" + "\n".join(f"a{i} ::= a{i + 1} a{i + 1}" for i in range(40)) + '\na40 ::= "a"',
        ),
        (
            "20000 rules",
            "root ::= a0\n" + "\n".join(f'a{i} ::= "x" a{i + 1}' for i in range(20000)) + '\na20000 ::= "a"',
        ),
        ("garbage", "\x00\x01"),
    ):
        yield name, "ebnf", grammar
    nested = '{"type":"array","items":' * 3000 + "{}" + "}" * 3000
    for name, schema in (
        ("no value", '{"enum": []}'),
        ("shorter than it must be", '{"type": "string", "minLength": 5, "maxLength": 2}'),
        ("false", "false"),
        ("two types", '{"allOf": [{"type": "string"}, {"type": "integer"}]}'),
        ("itself", '{"$ref": "#"}'),
        ("a loop", '{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}'),
        ("elsewhere", '{"$ref": "http://127.0.0.1:1/schema.json"}'),
        ("recursion", '{"type":"object","properties":{"a":{"$ref":"#"}},"required":["a"]}'),
        ("3000 deep", nested),
        ("50000 values", json.dumps({"enum": [f"value {i}" for i in range(50000)]})),
        ("many properties", json.dumps({"type": "object", "properties": {f"p{i}": {} for i in range(999)}})),
        ("a million items", '{"type": "array", "items": {"type": "integer"}, "minItems": 1000000}'),
        ("a million characters", '{"type": "string", "minLength": 1000000}'),
        ("a pattern", '{"type": "string", "pattern": "^(a{1,1000}){1,1000}$"}'),
        ("not JSON", '{"type": '),
        ("a number", "3"),
    ):  # fmt: skip
        yield name, "json_schema", schema
    yield "no structure", "structural_tag", "{}"
    yield "not its form", "structural_tag", '{"type": "structural_tag", "format": {"type": "x"}}'


def grammars(setup: Setup) -> Iterator[Row]:
    check = "hostile grammars"
    hostile = list(hostile_grammars())
    with running(setup, "--max-total-tokens", "16384") as server:
        start = {"text": "x", "sampling_params": {"max_new_tokens": 4, "regex": "[ab]+"}}
        assert server.post("/generate", start).status_code == 200  # starts the compiler

        async def ask_good(http: object) -> list[Answer]:
            rng = random.Random(0)
            answers = []
            for _ in range(GOOD):
                answers.append(await good_client(rng)(http, server.url))  # type: ignore[arg-type]
            return answers

        async def both(attack: bool) -> tuple[list[Answer], list[Answer]]:
            async with session() as http:
                attacks = [
                    ask(http, f"{server.url}/generate", _body(kind, text))
                    for _, kind, text in (hostile if attack else ())
                ]
                good, bad = await asyncio.gather(ask_good(http), asyncio.gather(*attacks))
            return good, bad

        alone, _ = asyncio.run(both(attack=False))
        good, bad = asyncio.run(both(attack=True))
        wrong = [
            f"{name} ({kind}): {answer.status} {answer.text}"
            for (name, kind, text), answer in zip(hostile, bad, strict=True)
            if answer.status not in (200, 400) or not _follows(kind, text, answer)
        ]
        yield none_of(
            check, wrong, f"Of {len(hostile)} at once, those answered with neither a 400 nor an output of theirs."
        )
        refused = sum(answer.status == 400 for answer in bad)
        yield Row(check, refused, 10, "requests", "Those refused.", at_least=True)
        slowest, name = max((answer.seconds, name) for (name, *_), answer in zip(hostile, bad, strict=True))
        yield Row(check, slowest, ANSWERED_SECONDS, "s", f"The slowest answer ({name}).")
        failed = [answer.text[-200:] for answer in good if answer.error or not answer.complete]
        yield none_of(check, failed, f"Of {GOOD} good requests meanwhile, those that failed.")
        times = [statistics.fmean(answer.seconds for answer in some) for some in (alone, good)]
        what = f"Mean latency of those, to that of the same ones alone ({times[0]:.2f} s)."
        yield Row(check, times[1] / times[0], SLOWER, "times", what)
        yield none_of(check, server.left_behind() + _compilers(server), "What they left behind: requests, processes.")
        yield none_of(check, server.faults_in_log(), "Errors in the log.")


def _body(kind: str, text: str) -> dict[str, object]:
    return {"text": "x", "sampling_params": {"max_new_tokens": 12, kind: text}}


def _follows(kind: str, text: str, answer: Answer) -> bool:
    """Whether an output that has ended is in the language of a regular expression; others are not judged here."""
    if kind != "regex" or answer.status != 200:
        return True
    result = json.loads(answer.text)
    return result["meta_info"]["finish_reason"]["type"] != "stop" or bool(re.fullmatch(text, result["text"]))


def _compilers(server: Server) -> list[str]:
    """Children of the compiler's process that still try a grammar."""
    return [
        f"{process} with {len(process.children())} children" for process in server.processes()[1:] if process.children()
    ]
