"""OpenAI's request objects: what is acted on, what asks for nothing, and what is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from sglang.srt.entrypoints.openai.response_format import GRAMMAR_FIELDS, grammar_of
from sglang.srt.errors import RequestError
from sglang.srt.managers.generate_request import NOTHING, NOTHING_OF_FLAG, check_rid
from sglang.srt.request_validation import convert, select_supported
from sglang.srt.sampling.sampling_params import SamplingParams, parse_sampling_params

# SGLang's default of "model": whatever is served.
DEFAULT_MODEL_NAME = "default"

# Fields that are known and not acted on, with the values that ask for nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        (
            "bootstrap_host",
            "bootstrap_port",
            "bootstrap_room",
            "cache_salt",
            "custom_labels",
            "custom_params",
            "data_parallel_rank",
            "disagg_prefill_dp_rank",
            "extra_key",
            "images_config",
            "ngram_corpus_id",
            "priority",
            "routed_dp_rank",
            "session_id",
        ),
        (),
    ),
    **dict.fromkeys(("custom_logit_processor", "lora_path", "session_params"), NOTHING),
    **dict.fromkeys(
        (
            "return_cached_tokens_details",
            "return_hidden_states",
            "return_routed_experts",
            "return_token_ids",
            "store",
        ),
        NOTHING_OF_FLAG,
    ),
    "routed_experts_start_len": (0,),
    "service_tier": ("auto", "default"),
}
CHAT_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **NEUTRAL,
    **dict.fromkeys(
        (
            "audio",
            "input_ids",
            "max_dynamic_patch",
            "min_dynamic_patch",
            "moderation",
            "prediction",
            "prompt_cache_options",
            "reasoning",
            "task",
            "web_search_options",
        ),
        (),
    ),
    "functions": NOTHING,
    **dict.fromkeys(("return_meta_info", "return_prompt_token_ids", "use_audio_in_video"), NOTHING_OF_FLAG),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "prompt_cache_retention": ("in_memory",),
    "verbosity": ("medium",),
}
COMPLETION_NEUTRAL: dict[str, tuple[Any, ...]] = {**NEUTRAL, "suffix": ("",)}

# Fields that name the user or group requests for the provider's own purposes; they ask nothing of the answer.
LABELS = frozenset({"metadata", "prompt_cache_key", "safety_identifier", "user"})

# Fields that /generate has under the same name, and those that it has under another one.
_SAME = (
    "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty",
    "logit_bias", "stop", "stop_token_ids", "stop_regex", "no_stop_trim", "ignore_eos", "skip_special_tokens", "n",
)  # fmt: skip
_RENAMED = {"sampling_seed": "seed", "min_new_tokens": "min_tokens"}


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    # An OpenAI option against guessing text from packet sizes; padding nothing is its off position.
    include_obfuscation: bool = False


class _CommonRequest(msgspec.Struct, kw_only=True):
    """Fields that both endpoints have, by OpenAI's or else SGLang's names."""

    model: str = DEFAULT_MODEL_NAME
    n: int = 1
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    response_format: dict[str, Any] | None = None
    top_k: int | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[int] | None = None
    stop_regex: str | list[str] | None = None
    no_stop_trim: bool = False
    regex: str | None = None
    ebnf: str | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    rid: str | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.continuous_usage_stats

    @property
    def field_names(self) -> dict[str, str]:
        """This endpoint's names of fields that an error may call by /generate's."""
        names = dict(_RENAMED)
        if self.response_format is not None:
            names |= dict.fromkeys(("json_schema", "structural_tag"), "response_format")
        return names

    def grammar(self) -> dict[str, str]:
        """The field of /generate, if any, that says what the output has to look like.

        Raises:
            RequestError: more than one does, or ``response_format`` is none.
        """
        return grammar_of(self.response_format, {name: getattr(self, name, None) for name in GRAMMAR_FIELDS})

    def sampling_params(
        self, max_new_tokens: int | None, defaults: Mapping[str, Any], grammar: Mapping[str, str]
    ) -> SamplingParams:
        """The sampling that is asked for; ``n`` is still in it.

        Args:
            defaults: for fields that the request leaves out.
            grammar: from :meth:`grammar`, or what was made of it.

        Raises:
            RequestError: a value is out of range.
        """
        given = {name: getattr(self, name) for name in _SAME}
        given |= {generate: getattr(self, own) for generate, own in _RENAMED.items()}
        asked = {name: value for name, value in given.items() if value is not None}
        return parse_sampling_params({**defaults, **asked, **grammar, "max_new_tokens": max_new_tokens})

    def check(self) -> None:
        check_rid(self.rid)
        for name in ("max_tokens", "max_completion_tokens"):
            value = getattr(self, name, None)
            if value is not None and value < 0:
                raise RequestError(f"{name} must be at least 0, got {value}.", name)
        if self.stream_options is not None and not self.stream:
            raise RequestError("'stream_options' is only allowed when 'stream' is true.", "stream_options")
        if self.stream_options is not None and self.stream_options.include_obfuscation:
            raise RequestError("'stream_options.include_obfuscation' is not supported.", "stream_options")


R = TypeVar("R", bound=_CommonRequest)


class ChatCompletionRequest(_CommonRequest, kw_only=True):
    messages: list[dict[str, Any]]
    logprobs: bool = False
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    reasoning_effort: str | float | None = None
    separate_reasoning: bool = True
    stream_reasoning: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool = False

    @property
    def output_limit(self) -> int | None:
        """Most new tokens; None: as many as the context has room for."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def field_names(self) -> dict[str, str]:
        return {
            **super().field_names,
            "text": "messages",
            "max_new_tokens": "max_completion_tokens",
            "top_logprobs_num": "top_logprobs",
        }

    def check(self) -> None:
        super().check()
        if self.top_logprobs is not None and self.top_logprobs < 0:
            raise RequestError(f"top_logprobs must be at least 0, got {self.top_logprobs}.", "top_logprobs")
        if self.top_logprobs and not self.logprobs:
            raise RequestError("'top_logprobs' is only allowed when 'logprobs' is true.", "top_logprobs")


class CompletionRequest(_CommonRequest, kw_only=True):
    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool = False
    best_of: int | None = None
    json_schema: str | None = None

    @property
    def output_limit(self) -> int:
        return 16 if self.max_tokens is None else self.max_tokens  # OpenAI's default

    @property
    def field_names(self) -> dict[str, str]:
        return {
            **super().field_names,
            "text": "prompt",
            "input_ids": "prompt",
            "max_new_tokens": "max_tokens",
            "top_logprobs_num": "logprobs",
        }

    def check(self) -> None:
        super().check()
        if self.logprobs is not None and self.logprobs < 0:
            raise RequestError(f"logprobs must be at least 0, got {self.logprobs}.", "logprobs")
        if self.best_of not in (None, self.n):
            raise RequestError(
                "'best_of' is not supported by this server: leave it out, or make it equal to n.", "best_of"
            )


def parse_chat_request(body: Mapping[str, Any]) -> ChatCompletionRequest:
    """Raises RequestError naming the field that is wrong or not supported."""
    return _parse(body, ChatCompletionRequest, CHAT_NEUTRAL)


def parse_completion_request(body: Mapping[str, Any]) -> CompletionRequest:
    """Raises RequestError naming the field that is wrong or not supported."""
    return _parse(body, CompletionRequest, COMPLETION_NEUTRAL)


def _parse(body: Mapping[str, Any], target: type[R], neutral: dict[str, tuple[Any, ...]]) -> R:
    # null means the default everywhere.
    body = {name: value for name, value in body.items() if value is not None and name not in LABELS}
    request = convert(select_supported(body, target.__struct_fields__, neutral), target)
    request.check()
    return request
