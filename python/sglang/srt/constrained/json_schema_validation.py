"""JSON Schemas that xgrammar follows exactly; all others are refused.

xgrammar ignores what it does not implement, and of several keywords that apply to one value it often follows only one.
An output would then parse and still break its schema. Annotations and keywords that JSON Schema doesn't know constrain
nothing and pass.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import combinations
from typing import Any

from sglang.srt.constrained.regex_validation import problem_of_pattern

# Each of these says all that xgrammar sees of a value: what stands beside it is ignored.
_ALONE = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_OF_TYPE = {
    "string": _words("format pattern minLength maxLength"),
    "number": _words("minimum maximum exclusiveMinimum exclusiveMaximum"),
    "object": _words(
        "properties required additionalProperties patternProperties propertyNames minProperties maxProperties "
        "unevaluatedProperties"
    ),
    "array": _words("items prefixItems minItems maxItems unevaluatedItems"),
}
_CONSTRAINTS = frozenset({"type"}).union(*_OF_TYPE.values())
_NOT_FOLLOWED = _words(
    "$dynamicRef $recursiveRef additionalItems contains contentEncoding contentMediaType contentSchema dependencies "
    "dependentRequired dependentSchemas else if maxContains minContains multipleOf not then"
)
_FORMATS = _words(
    "date date-time duration email hostname ipv4 ipv6 json-pointer relative-json-pointer time uri uri-reference "
    "uri-template uuid"
)
# In a pattern (negated classes aside), what may not stand in a JSON string as it is: the grammar doesn't escape it.
_NEGATED_CLASS = re.compile(r"\[\^(?:\\.|[^\]\\])*\]", re.DOTALL)
_UNESCAPED = re.compile(
    r"\"|\\\\|\\[ntrfv0]|\\c|\\x(?:[01].|22|5[cC])|\\u(?:00[01].|0022|005[cC])|\\u\{|\\\"|[\x00-\x1f]"
)
_SUBSCHEMA = ("additionalProperties", "items", "propertyNames", "unevaluatedItems", "unevaluatedProperties")
_SUBSCHEMA_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SUBSCHEMA_MAPS = ("$defs", "definitions", "patternProperties", "properties")

Schema = dict[str, Any]


class UnsupportedJSONSchemaFeature(ValueError):  # noqa: N818 (SGLang's name)
    """A schema has constraints that xgrammar would not follow; the text names them and their place."""


def validate_xgrammar_json_schema(schema: Any) -> None:
    """Raise :class:`UnsupportedJSONSchemaFeature` unless everything in ``schema`` (decoded JSON) is followed."""
    for part, place in _parts(schema, "#"):
        named = place.endswith("/propertyNames")  # applies to names, which are strings
        for problem in _problems({"type": "string", **part} if named else part, schema):
            raise UnsupportedJSONSchemaFeature(f"JSON Schema at {place}: {problem}")


def lengths_as_patterns(schema: Any) -> None:
    """Write ``minLength`` and ``maxLength`` in ``schema`` (decoded JSON) as patterns, in place: where xgrammar counts
    characters itself it allows control characters, and the output would be no JSON. Surrogates are no characters."""
    for part, _ in _parts(schema, "#"):
        low, high = part.get("minLength", 0), part.get("maxLength", "")
        numbers = [each for each in (low, high) if each != ""]
        valid = all(type(each) is int and each >= 0 for each in numbers) and (high == "" or low <= high)
        if (low, high) != (0, "") and valid and not {"pattern", "format"}.intersection(part):
            part.pop("minLength", None)
            part.pop("maxLength", None)
            part["pattern"] = f'^[^\\x00-\\x1f"\\\\\\ud800-\\udfff]{{{low},{high}}}$'


def _parts(schema: Any, place: str) -> Iterator[tuple[Schema, str]]:
    """Every schema in ``schema`` with its JSON pointer; not what only looks like one (in ``const``, say)."""
    if not isinstance(schema, dict):
        return
    yield schema, place
    for name in _SUBSCHEMA:
        yield from _parts(schema.get(name), f"{place}/{name}")
    for name in _SUBSCHEMA_LISTS:
        if isinstance(children := schema.get(name), list):
            for index, child in enumerate(children):
                yield from _parts(child, f"{place}/{name}/{index}")
    for name in _SUBSCHEMA_MAPS:
        if isinstance(children := schema.get(name), dict):
            for key, child in children.items():
                yield from _parts(child, f"{place}/{name}/{key.replace('~', '~0').replace('/', '~1')}")


def _problems(schema: Schema, root: Any) -> Iterator[str]:
    if found := sorted(_NOT_FOLLOWED.intersection(schema)):
        yield f"{', '.join(found)} is not supported: the grammar could not follow it"
    if schema.get("uniqueItems"):
        yield "uniqueItems is not supported: the grammar could not follow it"
    alone = [name for name in _ALONE if name in schema]
    if alone:
        yield from _problems_alone(alone, schema, root)
    else:
        yield from _problems_typed(schema)


def _problems_alone(alone: list[str], schema: Schema, root: Any) -> Iterator[str]:
    name = alone[0]
    beside = alone[1:] + sorted(_CONSTRAINTS.intersection(schema))
    if name in ("const", "enum") and beside == ["type"]:
        values = [schema["const"]] if name == "const" else schema["enum"]
        types = _types(schema)
        if isinstance(values, list) and any(not _has_type(value, types) for value in values):
            yield f"{name} has a value that is not of type {schema['type']!r}"
    elif beside:
        yield f"{', '.join(beside)} beside {name} is not supported: only {name} would be followed"
    value = schema[name]
    if name == "$ref" and not (isinstance(value, str) and (value == "#" or value.startswith("#/"))):
        yield f"$ref {value!r} is not supported: only references into the same schema (#/...) are"
    if name == "allOf" and isinstance(value, list) and len(value) > 1:
        yield "allOf of several schemas is not supported: write them as one"
    if name == "oneOf" and isinstance(value, list):
        for first, second in combinations(value, 2):
            if not _disjoint(first, second, root):
                yield (
                    "oneOf is only supported of alternatives that can't both hold: other types, or objects that "
                    "have a required property with other const or enum values; use anyOf"
                )
                return


def _problems_typed(schema: Schema) -> Iterator[str]:
    if "type" not in schema:
        found = _CONSTRAINTS.intersection(schema)
        # xgrammar takes a schema with properties for an object and one with items for an array.
        kinds = [kind for kind, mark in (("object", "properties"), ("array", "items")) if mark in schema]
        if len(kinds) > 1 or not found <= (_OF_TYPE[kinds[0]] if kinds else frozenset()):
            yield f"{', '.join(sorted(found))} without a type is not supported: the grammar would not follow it"
    if isinstance(format := schema.get("format"), str) and format not in _FORMATS:
        yield f"format {format!r} is not supported; supported: {', '.join(sorted(_FORMATS))}"
    groups = [" and ".join(group) for names in _STRING_GROUPS if (group := [n for n in names if n in schema])]
    if len(groups) > 1:
        yield f"{', '.join(groups)} together are not supported: only one of them would be followed"
    patterns = [schema["pattern"]] if isinstance(schema.get("pattern"), str) else []
    patterns += schema.get("patternProperties") or ()
    for pattern in patterns:
        if _UNESCAPED.search(_NEGATED_CLASS.sub("", pattern)):
            yield f"pattern {pattern!r} has a quote, a backslash or a control character: it would not be escaped"
        if problem := problem_of_pattern(pattern):
            yield f"pattern {pattern!r} {problem}"
    yield from _problems_of_object(schema)


def _problems_of_object(schema: Schema) -> Iterator[str]:
    properties = schema.get("properties") or {}
    if missing := [name for name in schema.get("required") or () if name not in properties]:
        yield f"required has {', '.join(map(repr, missing))}, which properties has not: it would not be followed"
    # Names that are not written down may come twice, or be one that another keyword speaks of.
    open_names = [name for name in _OPEN_NAMES if schema.get(name, False) is not False]
    if "minProperties" in schema and (open_names or not properties):
        yield "minProperties is only supported where properties has all names: a name may come twice"
    beside = [name for name in ("patternProperties", "unevaluatedProperties") if name in schema]
    if "propertyNames" in schema and (properties or beside or schema.get("additionalProperties") is False):
        yield "propertyNames is only supported beside an additionalProperties that is a schema or true"
    patterns = schema.get("patternProperties") or {}
    if patterns and len(patterns) + len(open_names) > 2:
        yield "patternProperties with several patterns or additionalProperties is not supported: they may overlap"
    for pattern in patterns:
        try:
            matching = [name for name in properties if re.search(pattern, name)]
        except re.error:
            matching = []  # xgrammar says what it takes for a pattern
        if matching:
            yield f"property {matching[0]!r} matches patternProperties {pattern!r}, which would not be followed"


_OPEN_NAMES = ("additionalProperties", "patternProperties", "propertyNames", "unevaluatedProperties")
_STRING_GROUPS = (("format",), ("pattern",), ("minLength", "maxLength"))


def _types(schema: Any) -> frozenset[str]:
    value = schema.get("type") if isinstance(schema, dict) else None
    return frozenset(value if isinstance(value, list) else [value] if value is not None else [])


def _has_type(value: Any, types: frozenset[str]) -> bool:
    match value:
        case None:
            return "null" in types
        case bool():
            return "boolean" in types
        case int() | float():
            return "number" in types or ("integer" in types and float(value).is_integer())
        case str():
            return "string" in types
        case list():
            return "array" in types
    return "object" in types


def _disjoint(first: Any, second: Any, root: Any) -> bool:
    """No value can satisfy both, as far as that is easily seen."""
    first, second = _resolve(first, root), _resolve(second, root)
    types = [_types(each) | {_type_of(v) for v in _values(each) or ()} for each in (first, second)]
    if types[0] and types[1]:
        wide = [each | {"number"} if "integer" in each else each for each in types]
        if not wide[0] & wide[1]:
            return True
    values = [_values(each) for each in (first, second)]
    if values[0] is not None and values[1] is not None:
        return not any(value in values[1] for value in values[0])
    if types[0] == types[1] == {"object"}:
        # Whichever requires the property, it is there, and must have a value that both allow.
        required = {*(first.get("required") or ()), *(second.get("required") or ())}
        return any(_disjoint_values(first, second, name, root) for name in required)
    return False


def _disjoint_values(first: Schema, second: Schema, name: str, root: Any) -> bool:
    values = [_values(_resolve((each.get("properties") or {}).get(name), root)) for each in (first, second)]
    if values[0] is None or values[1] is None:
        return False
    return not any(value in values[1] for value in values[0])


def _values(schema: Any) -> list[Any] | None:
    """All values that ``const`` or ``enum`` allows."""
    if not isinstance(schema, dict):
        return None
    if "const" in schema:
        return [schema["const"]]
    return schema["enum"] if isinstance(schema.get("enum"), list) else None


def _type_of(value: Any) -> str:
    return next(
        kind
        for kind in ("null", "boolean", "number", "string", "array", "object")
        if _has_type(value, frozenset({kind}))
    )


def _resolve(schema: Any, root: Any) -> Any:
    """What ``schema`` refers to, if it refers."""
    for _ in range(10):
        if not isinstance(schema, dict) or not isinstance(ref := schema.get("$ref"), str) or ref[:2] != "#/":
            break
        target = root
        for step in ref[2:].split("/"):
            target = target.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(target, dict) else None
        schema = target
    return schema
