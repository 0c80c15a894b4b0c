"""Whatever a schema is: it is refused, or every output satisfies it."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
from byte_vocabulary import COMPILER, random_output
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from sglang.srt.constrained.xgrammar_backend import GrammarSource

NAMES = st.sampled_from(["a", "b", "x1", 'q"\\', "né", ""])
SMALL = st.integers(0, 3)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.sampled_from([0.5, "a", 'é"\n']),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(NAMES, inner, max_size=2),
    max_leaves=3,
)
PATTERNS = st.sampled_from(["^a+$", "b", "^[^x]{2}$", "^(a|bc)*$", "\\d", "^\\s$", "."])


def some(**keywords: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """A schema with any of these keywords."""
    return st.fixed_dictionaries({}, optional=keywords)


def extended(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    schemas, properties = st.lists(inner, min_size=1, max_size=2), st.dictionaries(NAMES, inner, max_size=3)
    return (
        some(
            type=st.just("object"),
            properties=properties,
            required=st.lists(NAMES, max_size=1),
            additionalProperties=inner,
            minProperties=SMALL,
            maxProperties=SMALL,
        )
        | some(type=st.just("object"), properties=properties, patternProperties=st.dictionaries(PATTERNS, inner))
        | some(type=st.just("object"), propertyNames=some(pattern=PATTERNS), additionalProperties=inner)
        | some(type=st.just("array"), items=inner, prefixItems=schemas, minItems=SMALL, maxItems=SMALL)
        | some(anyOf=schemas, title=st.just("t"))
        | some(oneOf=schemas)
        | some(allOf=schemas)
    )


SCHEMAS = st.recursive(
    st.booleans()
    | some(type=st.sampled_from(["null", "boolean", "string", ["integer", "null"]]))
    | some(type=st.just("string"), minLength=SMALL, maxLength=SMALL)
    | some(type=st.just("string"), pattern=PATTERNS)
    | some(
        type=st.sampled_from(["integer", "number", ["number", "string"]]),
        minimum=st.integers(-3, 12),
        maximum=st.integers(0, 120) | st.just(2.5),
        exclusiveMinimum=st.integers(-3, 3),
        exclusiveMaximum=st.integers(5, 30) | st.just(0.25),
    )
    | some(const=VALUES)
    | some(enum=st.lists(VALUES, min_size=1, max_size=3), type=st.sampled_from(["string", "integer"])),
    extended,
    max_leaves=5,
)


@settings(max_examples=200, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(SCHEMAS, st.integers(0, 3))
def test_an_output_satisfies_its_schema(schema: Any, seed: int) -> None:
    text = json.dumps(schema)
    try:
        COMPILER.check(GrammarSource("json_schema", text))
    except (ValueError, RuntimeError):
        return  # refused
    output = random_output("json_schema", text, seed)
    assume(output is not None)
    assert output is not None
    jsonschema.Draft202012Validator(schema).validate(json.loads(output))
