"""What xgrammar ignores is refused; what people write is not."""

from __future__ import annotations

import json
import re
from enum import Enum
from typing import Any, Literal, Optional

import pytest
from byte_vocabulary import COMPILER, allowed, random_output, start
from pydantic import BaseModel, Field

from sglang.srt.constrained.json_schema_validation import (
    UnsupportedJSONSchemaFeature,
    lengths_as_patterns,
    validate_xgrammar_json_schema,
)
from sglang.srt.constrained.xgrammar_backend import GrammarSource

OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
# Schema, what is said of it, and a text that xgrammar allows although it breaks the schema.
IGNORED: list[tuple[dict[str, Any], str, str]] = [
    ({"type": "number", "multipleOf": 0.5}, "#: multipleOf is not supported", "0.3"),
    ({"type": "string", "pattern": "^a+$", "maxLength": 2}, "#: pattern, maxLength together", '"aaa"'),
    ({"type": "string", "format": "email", "maxLength": 6}, "#: format, maxLength together", '"abcdef@b.co"'),
    ({"type": "string", "pattern": '^"$'}, "#: pattern '^\"$' has a quote", '"""'),
    ({"type": "string", "pattern": "^\\n$"}, "#: pattern '^\\\\n$' has a quote", '"\n"'),
    ({"type": "string", "pattern": "^(?!a)[ab]$"}, "#: pattern '^(?!a)[ab]$' has a lookahead", '"a"'),
    ({"type": "string", "pattern": "^a+(?=b)"}, "#: pattern '^a+(?=b)' has a lookahead", '"a"'),
    ({"type": "string", "pattern": "^[ab]{2}(?!$)$"}, "#: pattern '^[ab]{2}(?!$)$' has a lookahead", '"ab"'),
    ({"type": "string", "pattern": "^a$b$"}, "#: pattern '^a$b$' has $ elsewhere", '"ab"'),
    ({"type": "string", "pattern": "a^|b"}, "#: pattern 'a^|b' has ^ elsewhere", '"a"'),
    ({"type": "string", "pattern": "(^a)+b"}, "#: pattern '(^a)+b' has ^ elsewhere", '"aab"'),
    ({"type": "string", "pattern": "^(a(,|$))+$"}, "#: pattern '^(a(,|$))+$' has $ elsewhere", '"aa"'),
    ({"type": "string", "pattern": "^a$?"}, "#: pattern '^a$?' has $?, a repetition", '""'),
    ({"type": "string", "pattern": r"\Aa\Z"}, r"#: pattern '\\Aa\\Z' has \A", '"AaZ"'),
    (
        {"type": "object", "patternProperties": {"^a$b$": {"type": "null"}}},
        "#: pattern '^a$b$' has $ elsewhere",
        '{"ab": null}',
    ),
    (
        {"type": "object", "propertyNames": {"pattern": "(?!a)[ab]"}, "additionalProperties": {"type": "null"}},
        "#/propertyNames: pattern '(?!a)[ab]' has a lookahead",
        '{"a": null}',
    ),
    ({"type": "string", "enum": ["a", 1]}, "#: enum has a value that is not of type 'string'", "1"),
    ({**OBJECT, "required": ["c"]}, "#: required has 'c'", '{"a": 1}'),
    ({**OBJECT, "propertyNames": {"pattern": "^b"}}, "#: propertyNames is only", '{"a": 1}'),
    (
        {"type": "object", "propertyNames": {"pattern": "a"}, "additionalProperties": False},
        "#: propertyNames is only supported beside an additionalProperties",
        '{"a": 1}',
    ),
    ({**OBJECT, "dependentRequired": {"a": ["b"]}}, "#: dependentRequired is not supported", '{"a": 1}'),
    ({**OBJECT, "dependencies": {"a": ["b"]}}, "#: dependencies is not supported", '{"a": 1}'),
    ({**OBJECT, "dependentSchemas": {"a": False}}, "#: dependentSchemas is not supported", '{"a": 1}'),
    ({**OBJECT, "anyOf": [{"required": ["a"]}]}, "#: properties, type beside anyOf", "{}"),
    ({**OBJECT, "patternProperties": {"^a": {"type": "null"}}}, "#: property 'a' matches patternProp", '{"a": 1}'),
    (
        {"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 2},
        "#: minProperties is only supported where",
        '{"x": 1, "x": 2}',
    ),
    (
        {**OBJECT, "patternProperties": {"^x": {"type": "null"}}, "additionalProperties": {"type": "integer"}},
        "#: patternProperties with several patterns or additionalProperties",
        '{"x": 1}',
    ),
    ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, "#: uniqueItems is not", "[1, 1]"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "#: oneOf is only supported", "1"),
    ({"allOf": [{"type": "integer"}, {"maximum": 5}]}, "#: allOf of several schemas", "7"),
    ({"not": {"type": "integer"}}, "#: not is not supported", "1"),
    ({"if": {"type": "integer"}, "then": {"minimum": 3}}, "#: if, then is not supported", "1"),
    ({"$defs": {"x": {"type": "integer"}}, "$ref": "#/$defs/x", "minimum": 3}, "#: minimum beside $ref", "1"),
    ({"$ref": "http://example.com/a.json"}, "#: $ref 'http://example.com/a.json' is not supported", "1"),
    ({"$defs": {"x": {"$anchor": "x", "type": "integer"}}, "$ref": "#x"}, "#: $ref '#x' is not supported", '"a"'),
    ({"$dynamicAnchor": "n", "$dynamicRef": "#n"}, "#: $dynamicRef is not supported", "1"),
    ({"minimum": 3}, "#: minimum without a type", "1"),
    ({"pattern": "^a$"}, "#: pattern without a type", '"b"'),
    ({"maxItems": 0, "uniqueItems": False}, "#: maxItems without a type", "[1]"),
    (
        {"type": "array", "items": {"anyOf": [{"type": "string"}, {"type": "integer", "multipleOf": 2, "minimum": 0}]}},
        "#/items/anyOf/1: multipleOf is not supported",
        "[1]",
    ),
    (
        {**OBJECT, "properties": {"a/b~": {"type": "array", "items": {}, "uniqueItems": True}}},
        "#/properties/a~1b~0: uniqueItems",
        '{"a/b~": [1, 1]}',
    ),
]


@pytest.mark.parametrize(("schema", "words", "text"), IGNORED, ids=[words for _, words, _ in IGNORED])
def test_what_xgrammar_ignores_is_refused(schema: dict[str, Any], words: str, text: str) -> None:
    grammar = start("json_schema", json.dumps(schema))
    assert all(grammar.accept_token(byte) for byte in text.encode()), "xgrammar has learnt this: accept it"
    with pytest.raises(UnsupportedJSONSchemaFeature, match=re.escape(f"JSON Schema at {words}")):
        COMPILER.check(GrammarSource("json_schema", json.dumps(schema)))


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "array", "contains": {"type": "integer"}}, "#: contains is not supported"),
        ({"type": "string", "format": "idn-email"}, "#: format 'idn-email' is not supported; supported: date, "),
        ({"properties": {}, "items": {}, "maxItems": 0}, "#: items, maxItems, properties without a type"),
        ({"type": "object", "minProperties": 1}, "#: minProperties is only supported"),
        ({"type": "string", "pattern": "(?<=a)b"}, "#: pattern '(?<=a)b' has a lookahead or lookbehind"),
        ({"type": "string", "pattern": "(?<!a)b"}, "#: pattern '(?<!a)b' has a lookahead or lookbehind"),
        ({"type": "string", "pattern": "a)^("}, "#: pattern 'a)^(' has ^ elsewhere"),
    ],
)
def test_refused_as_well(schema: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedJSONSchemaFeature, match=re.escape(words)):
        validate_xgrammar_json_schema(schema)


# A pattern, an output that it allows, and one that it doesn't.
FOLLOWED = [
    ("^(a|b)$", "b", "ab"),
    ("^a|b$", "b", "c"),
    ("(^a$|^b$)", "a", "^"),
    ("^((?:^a|b)$)$", "a", "ab"),
    ("(?<name>^a)(?:$)", "a", "$"),
    ("(^|,)a(,|$)", ",a", "^a"),
    ("(?i)^a$", "a", "b"),
    ("^(^-)??a(!$)?$", "-a!", "a-"),
    ("^^a$$", "a", ""),
    (r"^\^a\$$", "^a$", "a"),
    (r"^\(\?!a\)$", "(?!a)", "("),
    ("^[^a][$^]$", "b$", "a$"),
    (r"^[\]^$][\^][(?!]$", "^^(", "(^^"),
]


@pytest.mark.parametrize(("pattern", "right", "wrong"), FOLLOWED, ids=[pattern for pattern, _, _ in FOLLOWED])
def test_anchors_that_are_followed(pattern: str, right: str, wrong: str) -> None:
    schema = json.dumps({"type": "string", "pattern": pattern})
    COMPILER.check(GrammarSource("json_schema", schema))
    for text, follows in ((right, True), (wrong, False)):
        grammar = start("json_schema", schema)
        assert all(grammar.accept_token(byte) for byte in f'"{text}"'.encode()) == follows


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Circle(BaseModel):
    kind: Literal["circle"]
    radius: float = Field(ge=0, le=10)


class Square(BaseModel):
    kind: Literal["square"]
    sides: tuple[int, int]


class Drawing(BaseModel):
    """What clients send: from pydantic, with optional, nested and repeated parts."""

    title: str = Field(min_length=1, max_length=20, description="shown above")
    colour: Colour = Colour.RED
    shapes: list[Circle | Square] = Field(max_length=2)
    first: Circle | Square = Field(discriminator="kind")
    note: Optional[str] = None  # noqa: UP045
    scale: dict[str, int] = {}
    parts: list[Drawing] = Field(default=[], max_length=1)


def test_schemas_of_pydantic_are_followed() -> None:
    schema = json.dumps(Drawing.model_json_schema())
    COMPILER.check(GrammarSource("json_schema", schema))
    outputs = [output for seed in range(20) if (output := random_output("json_schema", schema, seed, 2000))]
    assert len(outputs) > 10
    for output in outputs:
        Drawing.model_validate_json(output)


def test_lengths_leave_no_control_characters() -> None:
    schema = {"type": "array", "items": {"type": ["string", "null"], "minLength": 1, "maxLength": 2}, "minItems": 1}
    grammar = start("json_schema", json.dumps(schema))
    assert all(grammar.accept_token(byte) for byte in b'["a')
    assert not [byte for byte in allowed(grammar) if byte < 32]
    assert ord('"') in allowed(grammar) and grammar.accept_token(ord("b"))
    assert allowed(grammar) == [ord('"')]
    untouched = {"type": "string", "minLength": -1}
    lengths_as_patterns(untouched)
    assert untouched == {"type": "string", "minLength": -1}
