"""Tool calls in a model's text: what is a call, what stays text, and that pieces make no difference."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.srt.entrypoints.openai.chat_output import ChatOutput
from sglang.srt.function_call.base_format_detector import BaseFormatDetector
from sglang.srt.function_call.core_types import Function
from sglang.srt.function_call.function_call_parser import TOOL_CALL_PARSERS, tool_call_parser_of
from sglang.srt.function_call.hermes_detector import HermesDetector
from sglang.srt.function_call.json_array_detector import JsonArrayDetector, get_json_schema_constraint
from sglang.srt.function_call.llama32_detector import Llama32Detector
from sglang.srt.function_call.mistral_detector import MistralDetector
from sglang.srt.parser.reasoning_parser import REASONING_PARSERS, ReasoningParser

FUNCTIONS = [Function("get_weather"), Function("f"), Function("fa")]
CITY = '{"city": "Paris, \\"{}\\" </tool_call>"}'
CALL = f'{{"name": "get_weather", "arguments": {CITY}}}'


def parse(kind: type[BaseFormatDetector], text: str, **options: Any) -> tuple[str | None, list[tuple[str, str]]]:
    message = ChatOutput(None, kind(FUNCTIONS, **options)).message(text)
    return message["content"], [
        (c["function"]["name"], c["function"]["arguments"]) for c in message["tool_calls"] or ()
    ]


CALLS: list[tuple[type[BaseFormatDetector], str, str | None, list[tuple[str, str]]]] = [
    (HermesDetector, f"<tool_call>\n{CALL}\n</tool_call>", None, [("get_weather", CITY)]),
    (
        HermesDetector,
        f'I look.\n\n<tool_call>{CALL}</tool_call>\n<tool_call>\n{{"name": "f", "arguments": {{}}}}\n</tool_call>\n',
        "I look.",
        [("get_weather", CITY), ("f", "{}")],
    ),
    (HermesDetector, f"<tool_call>{CALL}\n{CALL}</tool_call> done", "done", [("get_weather", CITY)] * 2),
    (HermesDetector, f"<tool_call>[{CALL}, {CALL}]</tool_call>", None, [("get_weather", CITY)] * 2),
    # Keys in another order, more of them, none.
    (HermesDetector, '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', None, [("f", '{"a": 1}')]),
    (HermesDetector, '<tool_call>{"id": 1, "name": "f", "arguments": null}</tool_call>', None, [("f", "{}")]),
    (HermesDetector, '<tool_call>{"name": "f"}</tool_call>', None, [("f", "{}")]),
    (HermesDetector, '<tool_call>{"name": "f", "arguments": {}, "id": "}"}</tool_call>x', "x", [("f", "{}")]),
    # A closing brace too few, as small models write it.
    (HermesDetector, '<tool_call>{"name": "f", "arguments": {"a": {}}\n</tool_call>x', "x", [("f", '{"a": {}}')]),
    # Cut off: what there is of the arguments.
    (HermesDetector, '<tool_call>\n{"name": "f", "arguments": {"a": "b', None, [("f", '{"a": "b')]),
    (Llama32Detector, '{"name": "f", "parameters": {"a": 1}}', None, [("f", '{"a": 1}')]),
    (Llama32Detector, '<|python_tag|>{"name": "f", "parameters": {"a": 1}}', None, [("f", '{"a": 1}')]),
    (
        Llama32Detector,
        '\n{"name": "f", "parameters": {}}; {"name": "fa", "parameters": {}}',
        None,
        [("f", "{}"), ("fa", "{}")],
    ),
    (MistralDetector, f"[TOOL_CALLS] [{CALL}, {CALL}]", None, [("get_weather", CITY)] * 2),
    (MistralDetector, f"Sure. [TOOL_CALLS][{CALL}]", "Sure.", [("get_weather", CITY)]),
    (MistralDetector, '[TOOL_CALLS] [{"name": "f", "arguments": {}, "id": "abcdefghi"}]', None, [("f", "{}")]),
    (
        MistralDetector,
        '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]fa[CALL_ID]xyz[ARGS]{}',
        None,
        [("f", '{"a": 1}'), ("fa", "{}")],
    ),
    (JsonArrayDetector, '[{"name": "f", "parameters": {"a": [1]}}]', None, [("f", '{"a": [1]}')]),
]


@pytest.mark.parametrize(("kind", "text", "content", "calls"), CALLS, ids=[f"{i}" for i in range(len(CALLS))])
def test_calls(kind: type[BaseFormatDetector], text: str, content: str | None, calls: list[tuple[str, str]]) -> None:
    assert parse(kind, text) == (content, calls)
    one = parse(kind, text, parallel=False)
    assert one == (content, calls[:1])


TEXTS = [
    (HermesDetector, text)
    for text in (
        "",
        "  no call\n",
        "<tool_call>not JSON</tool_call>",
        "<tool_call>",
        "<tool_ca",
        '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "unknown", "argum',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "text"}</tool_call>',
        '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "argum',
        '<tool_call>{"arguments": {"a": 1}}</tool_call>',
        '<tool_call>{"city": "Paris"}</tool_call>',
        '<tool_call>{"name": "f" "arguments": {}}</tool_call>',
        '{"name": "f", "arguments": {}}',
    )
] + [
    (Llama32Detector, '{"answer": 42}'),
    (Llama32Detector, '{"name": "Bob", "age": 3}'),
    (Llama32Detector, 'Call {"name": "f", "parameters": {}}'),
    (Llama32Detector, "[1, 2] and {"),
    (MistralDetector, "[TOOL_CALLS]unknown[ARGS]{}"),
    (MistralDetector, "[TOOL_CALLS]f[ARGS]x"),
    (MistralDetector, "[TOOL_CALLS]f[CALL_ID]"),
    (MistralDetector, "[TOOL_CALLS] Paris is"),
]


@pytest.mark.parametrize(("kind", "text"), TEXTS, ids=[f"{i}" for i in range(len(TEXTS))])
def test_no_calls(kind: type[BaseFormatDetector], text: str) -> None:
    assert parse(kind, text) == (text, [])


def test_call_after_a_false_one() -> None:
    assert parse(HermesDetector, f"<tool_call>oh <tool_call>{CALL}</tool_call>") == (
        "<tool_call>oh",
        [("get_weather", CITY)],
    )


def test_arguments_come_as_they_are_written() -> None:
    """What a client can show of a call does not wait for its end."""
    output = ChatOutput(None, HermesDetector(FUNCTIONS))
    assert output.deltas("<tool_call>", last=False) == []
    assert output.deltas('{"name": "f", "arguments": ', last=False) == []
    first, second = output.deltas('{"a"', last=False)
    assert first["tool_calls"][0].pop("id")
    assert first == {"tool_calls": [{"index": 0, "type": "function", "function": {"name": "f", "arguments": ""}}]}
    assert second == {"tool_calls": [{"index": 0, "function": {"arguments": '{"a"'}}]}
    assert output.deltas(": 1", last=False) == [{"tool_calls": [{"index": 0, "function": {"arguments": ": 1"}}]}]


def test_plain_json_is_not_held_back() -> None:
    output = ChatOutput(None, Llama32Detector(FUNCTIONS))
    assert output.deltas('{"answer"', last=False) == [{"content": '{"answer"'}]


FRAGMENTS = [
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "<think>", "</think>", CALL, '{"name": "f", ',
    '"arguments": ', '"parameters": ', '{"name": "g"', '{"arguments": {}, "name": "f"}', "f[ARGS]", "fa[CALL_ID]x",
    '{"a": "b\\', "{", "}", "[", "]", ",", ";", '"', "\\", " ", "\n", "x", "ü", "<", "</tool",
]  # fmt: skip
TEXT = st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.text(max_size=2)), max_size=12).map("".join)
FORMATS = sorted({*TOOL_CALL_PARSERS.values(), JsonArrayDetector}, key=lambda kind: kind.__name__)


def _sum(deltas: list[dict[str, Any]]) -> tuple[str, str, list[list[str]]]:
    content = reasoning = ""
    calls: list[list[str]] = []
    for delta in deltas:
        assert len(delta) == 1 and all(delta.values()), delta
        content += delta.get("content", "")
        reasoning += delta.get("reasoning_content", "")
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                assert call["index"] == len(calls)
                calls.append([call["function"]["name"], ""])
            assert call["index"] == len(calls) - 1  # a call is complete before the next one
            calls[-1][1] += call["function"]["arguments"]
    return content, reasoning, calls


@settings(max_examples=400, deadline=None)
@given(
    kind=st.sampled_from(FORMATS),
    reasoning=st.sampled_from([None, *REASONING_PARSERS]),
    force=st.booleans(),
    stream_reasoning=st.booleans(),
    parallel=st.booleans(),
    text=TEXT,
    data=st.data(),
)
def test_pieces_make_no_difference(
    kind: type[BaseFormatDetector],
    reasoning: str | None,
    force: bool,
    stream_reasoning: bool,
    parallel: bool,
    text: str,
    data: st.DataObject,
) -> None:
    def new() -> ChatOutput:
        form = None if reasoning is None else REASONING_PARSERS[reasoning]
        thoughts = form and ReasoningParser(form, force_reasoning=force, stream_reasoning=stream_reasoning)
        return ChatOutput(thoughts, kind(FUNCTIONS, parallel=parallel))

    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8).map(sorted))
    whole, piecewise, characters = new(), new(), new()
    message = whole.message(text)
    expected = (
        message["content"] or "",
        message["reasoning_content"] or "",
        [[c["function"]["name"], c["function"]["arguments"]] for c in message["tool_calls"] or ()],
    )
    for output, marks in ((piecewise, [0, *cuts, len(text)]), (characters, range(len(text) + 1))):
        deltas = [d for a, b in pairwise(marks) for d in output.deltas(text[a:b], last=False)]
        deltas += output.deltas("", last=True)
        assert _sum(deltas) == expected
    # Without calls and thoughts the text is left as it is.
    assert expected[2] or reasoning is not None or expected[0] == text


@given(name=st.text(min_size=1, max_size=6), arguments=st.dictionaries(st.text(max_size=4), st.integers()))
@pytest.mark.parametrize("kind", FORMATS)
def test_any_name_and_arguments(kind: type[BaseFormatDetector], name: str, arguments: dict[str, int]) -> None:
    call = json.dumps({"name": name, "arguments": arguments})
    text = {"JsonArrayDetector": f"[{call}]"}.get(kind.__name__, f"{kind.bot_token}{call}{kind.eot_token}")
    message = ChatOutput(None, kind([Function(name)])).message(text)
    (made,) = message["tool_calls"]
    assert made["function"]["name"] == name and json.loads(made["function"]["arguments"]) == arguments
    assert message["content"] is None


def test_call_ids() -> None:
    # Mistral's templates refuse any other form.
    assert len(MistralDetector.new_call_id()) == 9 and MistralDetector.new_call_id().isalnum()
    assert HermesDetector.new_call_id().startswith("call_")
    assert HermesDetector.new_call_id() != HermesDetector.new_call_id()


@pytest.mark.parametrize(
    ("template", "parser"),
    [
        ('{{- "<tool_call>\\n{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}" }}', "qwen25"),
        ("{{ '[TOOL_CALLS] [' }}", "mistral"),
        (
            'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.',
            "llama3",
        ),
        # Qwen3-Coder, GLM and MiniMax write something else between the same marks.
        ('<tool_call>\n<function=example>"arguments"', None),
        ('<tool_call>{name}<arg_key>"arguments"', None),
        ('<tool_call><invoke name="f">arguments', None),
        ("{{ messages }}", None),
        ('<tool_call>"arguments" [TOOL_CALLS]', None),
    ],
)
def test_parser_of_a_template(template: str, parser: str | None) -> None:
    assert tool_call_parser_of(template) == parser


def test_forced_calls_schema() -> None:
    point = {"$defs": {"P": {"type": "object"}}, "type": "object", "properties": {"p": {"$ref": "#/$defs/P"}}}
    schema = get_json_schema_constraint([Function("f", point), Function("g")], parallel=False)
    assert schema["$defs"] == {"P": {"type": "object"}} and schema["maxItems"] == schema["minItems"] == 1
    names = [call["properties"]["name"]["enum"] for call in schema["items"]["anyOf"]]
    assert names == [["f"], ["g"]]
    other = {"$defs": {"P": {"type": "string"}}}
    with pytest.raises(ValueError, match="'P' differently"):
        get_json_schema_constraint([Function("f", point), Function("h", other)], parallel=True)
