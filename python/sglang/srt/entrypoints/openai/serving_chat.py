"""``/v1/chat/completions``."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from sglang.srt.entrypoints.openai.logprobs import chat_logprobs
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
from sglang.srt.entrypoints.openai.serving_base import Answer, finish
from sglang.srt.errors import RequestError
from sglang.srt.managers.generate_request import GenerateRequest
from sglang.srt.managers.request_state import Delta, ReqState
from sglang.srt.managers.tokenizer_manager import TokenizerManager

# What a template may use of a message; anything else must ask for nothing.
_MESSAGE_FIELDS = frozenset({"role", "content", "name", "reasoning_content"})


class ChatAnswer(Answer[ChatCompletionRequest]):
    """A chat completion."""

    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"
    field_names: ClassVar[Mapping[str, str]] = {
        "text": "messages",
        "max_new_tokens": "max_completion_tokens",
        "top_logprobs_num": "top_logprobs",
    }

    def __init__(self, manager: TokenizerManager, request: ChatCompletionRequest, model: str) -> None:
        super().__init__(manager, request, model, "chatcmpl")
        self._begun: set[int] = set()

    def requests(self) -> list[GenerateRequest]:
        request = self.request
        prompt = render_chat(self.manager.tokenizer, request)
        params = request.sampling_params(request.output_limit)
        return [
            GenerateRequest(
                rid=f"{self.id}_{sample}",
                text=prompt,
                add_special_tokens=False,  # the template has written them
                sampling_params=params,
                max_new_tokens_given=request.output_limit is not None,
                return_logprob=request.logprobs,
                top_logprobs_num=request.top_logprobs or 0,
            )
            for sample in range(request.n)
        ]

    def choice(self, state: ReqState) -> dict[str, Any]:
        return {
            "index": state.index,
            "message": {"role": "assistant", "content": state.text},
            "logprobs": self._logprobs(state, 0),
            **finish(state),
        }

    def chunk_choices(self, state: ReqState, delta: Delta) -> Iterable[dict[str, Any]]:
        unfinished = {"finish_reason": None, "matched_stop": None}
        if state.index not in self._begun:
            self._begun.add(state.index)
            first = {"role": "assistant", "content": ""}
            yield {"index": state.index, "delta": first, "logprobs": None, **unfinished}
        logprobs = self._logprobs(state, delta.start) if delta.start < len(state.output_ids) else None
        if delta.text or logprobs:
            yield {"index": state.index, "delta": {"content": delta.text}, "logprobs": logprobs, **unfinished}
        if state.finished:
            yield {"index": state.index, "delta": {}, "logprobs": None, **finish(state)}

    def _logprobs(self, state: ReqState, start: int) -> dict[str, Any] | None:
        if not self.request.logprobs:
            return None
        tokens, tops = state.output_token_logprobs[start:], state.output_top_logprobs[start:]
        return chat_logprobs(self.manager.decoder, tokens, tops)


def render_chat(tokenizer: Any, request: ChatCompletionRequest) -> str:
    """The conversation as the model's chat template writes it.

    Raises:
        RequestError: there is no template, it refuses the messages, or they have what this server does not act on.
    """
    if not tokenizer.chat_template:
        raise RequestError(
            "This model's tokenizer has no chat template; use /v1/completions or /generate with a finished prompt.",
            "messages",
        )
    if not request.messages:
        raise RequestError("'messages' is empty.", "messages")
    messages = [_message(message, f"messages[{i}]") for i, message in enumerate(request.messages)]
    if request.continue_final_message and messages[-1]["role"] != "assistant":
        raise RequestError("'continue_final_message' needs a last message of the assistant.", "continue_final_message")
    kwargs = request.chat_template_kwargs or {}
    reserved = inspect.signature(tokenizer.apply_chat_template).parameters
    for name in kwargs:
        if name in reserved:
            raise RequestError(f"'chat_template_kwargs' can't set {name!r}.", "chat_template_kwargs")
    try:
        text: str = tokenizer.apply_chat_template(
            messages,
            tokenize=False,
            add_generation_prompt=not request.continue_final_message,
            continue_final_message=request.continue_final_message,
            **kwargs,
        )
    except Exception as error:  # a template may fail in any way on messages that it was not written for
        raise RequestError(f"The chat template can't write these messages: {error}", "messages") from error
    return text


def _message(message: dict[str, Any], where: str) -> dict[str, Any]:
    for name, value in message.items():
        if name not in _MESSAGE_FIELDS and value not in (None, False, [], {}):
            raise RequestError(f"'{where}.{name}' is not supported by this server.", f"{where}.{name}")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise RequestError(f"'{where}.role' must be a string such as 'user'.", f"{where}.role")
    used = {name: value for name, value in message.items() if name in _MESSAGE_FIELDS and value is not None}
    return {**used, "role": role, "content": _content(message.get("content"), f"{where}.content")}


def _content(content: Any, where: str) -> str:
    """A message's text; parts are joined with spaces as SGLang does."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"'{where}' must be a string or a list of parts.", where)
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise RequestError(f"'{where}[{i}]' must be a text part; this model reads text only.", f"{where}[{i}]")
        texts.append(part["text"])
    return " ".join(texts)
