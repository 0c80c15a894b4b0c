"""What the OpenAI endpoints make of a request's fields: prompt, sampling and grammar."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
import xgrammar
from transformers import AutoTokenizer

from http_server_thread import FIXTURE
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.entrypoints.openai.protocol import (
    CHAT_NEUTRAL,
    COMPLETION_NEUTRAL,
    LABELS,
    ChatCompletionRequest,
    CompletionRequest,
    parse_chat_request,
    parse_completion_request,
)
from sglang.srt.entrypoints.openai.serving_chat import ChatAnswer
from sglang.srt.entrypoints.openai.serving_completions import CompletionAnswer
from sglang.srt.entrypoints.openai.settings import OpenAISettings
from sglang.srt.errors import CheckpointError, RequestError
from sglang.srt.managers.detokenizer import TokenDecoder
from sglang.srt.managers.generate_request import GenerateRequest
from sglang.srt.server_args import ServerArgs

TOKENIZER = AutoTokenizer.from_pretrained(FIXTURE)
TOKENIZER.add_special_tokens(
    {"additional_special_tokens": ["[TOOL_CALLS]", "[THINK]", "[/THINK]"]}, replace_extra_special_tokens=False
)
MANAGER: Any = SimpleNamespace(decoder=TokenDecoder(TOKENIZER))
CONFIG = ModelConfig.from_server_args(ServerArgs(model_path=str(FIXTURE), device="cpu"))
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
STRICT = {"type": "function", "function": {"name": "f", "parameters": SCHEMA, "strict": True}}
LOOSE = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
# Shows tools, takes switches, and opens thoughts if asked to.
TEMPLATE = (
    "{% for m in messages %}{{ m['content'] }}|{% endfor %}{{ tools or '' }}{{ reasoning_effort }}"
    "{% if enable_thinking %}<think>\n{% elif enable_thinking is defined %}<think>\n</think>\n{% endif %}"
)


def settings_of(config: ModelConfig = CONFIG, **arguments: Any) -> OpenAISettings:
    arguments = {"chat_template": TEMPLATE, "tool_call_parser": "hermes", **arguments}
    return OpenAISettings.create(ServerArgs(model_path=str(FIXTURE), device="cpu", **arguments), TOKENIZER, config)


def chat(body: dict[str, Any], **arguments: Any) -> list[GenerateRequest]:
    request = parse_chat_request({"messages": [{"role": "user", "content": "hi"}], **body})
    return ChatAnswer(MANAGER, request, "m", settings_of(**arguments)).requests()


def accepted(request: GenerateRequest, *texts: str) -> list[bool]:
    """Whether each text is a whole output under the request's grammar, as xgrammar reads it."""
    params = request.sampling_params
    compiler = xgrammar.GrammarCompiler(xgrammar.TokenizerInfo.from_huggingface(TOKENIZER, vocab_size=330))
    if params.structural_tag is not None:
        grammar = compiler.compile_structural_tag(params.structural_tag)
    elif params.json_schema is not None:
        grammar = compiler.compile_json_schema(params.json_schema)
    else:
        assert params.regex is not None
        grammar = compiler.compile_regex(params.regex)
    matchers = [xgrammar.GrammarMatcher(grammar, terminate_without_stop_token=True) for _ in texts]
    return [m.accept_string(text) and m.is_completed() for m, text in zip(matchers, texts, strict=True)]


def test_fields_reach_the_sampler() -> None:
    fields = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "frequency_penalty": 0.5, "presence_penalty": -1.0,
        "repetition_penalty": 1.5, "logit_bias": {"5": 1.0}, "ignore_eos": True, "no_stop_trim": True,
        "skip_special_tokens": False, "stop_token_ids": [3], "stop": ["x"], "stop_regex": "a+",
    }  # fmt: skip
    body = {**fields, "seed": 3, "min_tokens": 2, "max_tokens": 9, "regex": "a"}
    completion = parse_completion_request({"prompt": "a", **body})
    for request in (
        chat(body)[0],
        CompletionAnswer(MANAGER, completion, "m", settings_of()).requests()[0],
    ):
        params = request.sampling_params
        for name, value in fields.items():
            got = getattr(params, name)
            assert (list(got) if isinstance(got, tuple) else got) in (value, [value]), name
        assert (params.sampling_seed, params.min_new_tokens, params.max_new_tokens, params.regex) == (3, 2, 9, "a")


def test_samples_have_seeds_of_their_own() -> None:
    assert [r.sampling_params.sampling_seed for r in chat({"n": 3, "seed": 7})] == [7, 8, 9]
    assert [r.sampling_params.sampling_seed for r in chat({"n": 2})] == [None, None]


def test_defaults_of_the_model() -> None:
    config = ModelConfig.from_server_args(ServerArgs(model_path=str(FIXTURE), device="cpu"))
    config.sampling_defaults.update({"temperature": 0.6, "top_k": 20, "top_p": 0.95})
    params = chat({"top_p": 0.5}, config=config)[0].sampling_params
    assert (params.temperature, params.top_k, params.top_p) == (0.6, 20, 0.5)
    params = chat({}, config=config, sampling_defaults="openai")[0].sampling_params
    assert (params.temperature, params.top_k, params.top_p) == (1.0, -1, 1.0)
    config.sampling_defaults["top_k"] = 0
    assert chat({}, config=config)[0].sampling_params.top_k == -1
    config.sampling_defaults["top_p"] = 7
    with pytest.raises(CheckpointError, match=r"top_p must be in .*--sampling-defaults openai"):
        settings_of(config)


def test_response_format() -> None:
    (request,) = chat({"response_format": {"type": "json_object"}})
    assert accepted(request, '{"a": [1, {"b": null}]}', "[1]", "text") == [True, False, False]
    (request,) = chat({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}})
    assert accepted(request, '{"a": 1}', '{"a": "b"}') == [True, False]
    tag = {"type": "structural_tag", "format": {"type": "const_string", "value": "yes"}}
    assert accepted(chat({"response_format": tag})[0], "yes", "no") == [True, False]
    assert accepted(chat({"regex": "a+"})[0], "aa", "b") == [True, False]


def test_required_calls() -> None:
    other = {"type": "function", "function": {"name": "g"}}
    call_f, call_g = '{"name": "f", "parameters": {"a": 1}}', '{"name": "g", "parameters": {}}'
    texts = f"[{call_f}]", f"[{call_g}]", f"[{call_f}, {call_g}]", "[]", '[{"name": "f", "parameters": {"a": "b"}}]'
    body = {"tools": [LOOSE, other], "tool_choice": "required"}
    assert accepted(chat(body)[0], *texts) == [True, True, True, False, False]
    body["parallel_tool_calls"] = False
    assert accepted(chat(body)[0], *texts) == [True, True, False, False, False]
    body["tool_choice"] = {"type": "function", "function": {"name": "g"}}
    assert accepted(chat(body)[0], *texts) == [False, True, False, False, False]
    tools = [{"type": "function", "function": {"name": "f"}}]
    body["tool_choice"] = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": tools}}
    assert accepted(chat(body)[0], *texts) == [True, False, False, False, False]


STRICT_CALLS = {
    "hermes": '<tool_call>\n{{"name": "f", "arguments": {}}}\n</tool_call>',
    "llama3": '{{"name": "f", "parameters": {}}}',
    "mistral": '[TOOL_CALLS] [{{"name": "f", "arguments": {}}}]',
}


@pytest.mark.parametrize("parser", STRICT_CALLS)
def test_strict_tools(parser: str) -> None:
    """The model may answer with text or call; a call has the arguments that the schema wants."""
    (request,) = chat({"tools": [STRICT]}, tool_call_parser=parser)
    call = STRICT_CALLS[parser].format
    texts = "Hello.", call('{"a": 1}'), call('{"a": "b"}')
    assert accepted(request, *texts) == [True, True, False]
    assert chat({"tools": [LOOSE]}, tool_call_parser=parser)[0].sampling_params.structural_tag is None


def test_strict_compact_mistral_call() -> None:
    (request,) = chat({"tools": [STRICT]}, tool_call_parser="mistral")
    assert accepted(request, '[TOOL_CALLS]f[ARGS]{"a": 1}', "[TOOL_CALLS]f[ARGS]{}") == [True, False]


def test_tools_and_response_format() -> None:
    """The answer fits the schema, or it is a call."""
    body = {"tools": [LOOSE], "response_format": {"type": "json_object"}}
    call = STRICT_CALLS["hermes"].format('{"b": 1}')
    assert accepted(chat(body)[0], '{"x": 1}', call, f"{call}\n{call}", "Hello.") == [True, True, True, False]
    body["parallel_tool_calls"] = False
    assert accepted(chat(body)[0], call, f"{call}\n{call}") == [True, False]


def test_grammar_comes_behind_thoughts() -> None:
    body: dict[str, Any] = {"response_format": {"type": "json_object"}}
    texts = "{}", "<think>hm</think>\n\n{}", "hm</think>{}", "<think>hm{}"
    hybrid = {"reasoning_parser": "qwen3"}
    assert accepted(chat(body, **hybrid)[0], *texts) == [True, True, False, False]
    body["chat_template_kwargs"] = {"enable_thinking": True}  # the prompt opens them
    assert accepted(chat(body, **hybrid)[0], "{}", "hm</think>{}", "hm{}") == [False, True, False]
    body["chat_template_kwargs"] = {"enable_thinking": False}  # the prompt closes them
    assert accepted(chat(body, **hybrid)[0], *texts) == [True, False, False, False]
    del body["chat_template_kwargs"]
    always = {"reasoning_parser": "deepseek-r1"}
    assert accepted(chat(body, **always)[0], *texts) == [False, True, True, False]
    required = {"tools": [LOOSE], "tool_choice": "required"}
    calls = '[{"name": "f", "parameters": {"a": 1}}]'
    assert accepted(chat(required, **always)[0], calls, f"hm</think>{calls}") == [False, True]


def test_thoughts_between_special_tokens_stay_in_the_text() -> None:
    mistral = {"reasoning_parser": "mistral"}
    (request,) = chat({"regex": "a+"}, **mistral)
    assert not request.sampling_params.skip_special_tokens
    assert accepted(request, "aa", "[THINK]hm[/THINK]\naa", "[THINK]hm") == [True, True, False]
    assert chat({}, reasoning_parser="qwen3")[0].sampling_params.skip_special_tokens


def test_reasoning_effort_is_what_the_template_reads() -> None:
    assert chat({"reasoning_effort": "low"})[0].text == "hi|low<think>\n"
    assert chat({"reasoning_effort": "none"})[0].text == "hi|none<think>\n</think>\n"
    kwargs = {"chat_template_kwargs": {"enable_thinking": False}}
    assert chat({"reasoning_effort": "low", **kwargs})[0].text == "hi|low<think>\n</think>\n"
    with pytest.raises(RequestError, match="reads neither"):
        chat({"reasoning_effort": "low"}, chat_template="{{ messages }}")


def test_tools_in_the_prompt() -> None:
    assert "'name': 'f'" in (chat({"tools": [LOOSE]})[0].text or "")
    assert chat({"tools": [LOOSE], "tool_choice": "none"})[0].text == "hi|"
    # A template without tools is enough where calls are forced, and says so where they are not.
    plain = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    assert chat({"tools": [LOOSE], "tool_choice": "required"}, chat_template=plain)[0].text == "hi"
    with pytest.raises(RequestError, match="does not show tools"):
        chat({"tools": [LOOSE]}, chat_template=plain)
    with pytest.raises(RequestError, match="--tool-call-parser"):
        chat({"tools": [LOOSE]}, tool_call_parser=None)


def test_marks_that_are_special_tokens_stay_visible() -> None:
    def skips(body: dict[str, Any], parser: str) -> bool:
        return chat(body, tool_call_parser=parser)[0].sampling_params.skip_special_tokens

    assert skips({"tools": [LOOSE]}, "mistral") is False
    assert skips({"tools": [LOOSE]}, "hermes") is skips({}, "mistral") is True


def test_no_field_without_a_decision() -> None:
    """Every field of the client's request types is taken, harmless, or refused by name."""
    from openai.types import completion_create_params
    from openai.types.chat import completion_create_params as chat_create_params

    for params, request, neutral in (
        (chat_create_params.CompletionCreateParamsBase, ChatCompletionRequest, CHAT_NEUTRAL),
        (completion_create_params.CompletionCreateParamsBase, CompletionRequest, COMPLETION_NEUTRAL),
    ):
        known = {*request.__struct_fields__, *neutral, *LABELS}
        assert set(params.__annotations__) - known == set()
        assert not set(request.__struct_fields__) & set(neutral)


def test_structural_tag_is_xgrammars() -> None:
    (request,) = chat({"tools": [STRICT]})
    assert json.loads(request.sampling_params.structural_tag or "")["type"] == "structural_tag"
