"""``/v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import msgspec

from sglang.srt.entrypoints.openai.chat_output import ChatOutput
from sglang.srt.entrypoints.openai.logprobs import chat_logprobs
from sglang.srt.entrypoints.openai.messages import template_messages
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
from sglang.srt.entrypoints.openai.response_format import after_thoughts, forced_calls, with_strict_calls
from sglang.srt.entrypoints.openai.serving_base import Answer, finish
from sglang.srt.entrypoints.openai.settings import OpenAISettings
from sglang.srt.entrypoints.openai.tools import ToolChoice, parse_tools
from sglang.srt.errors import RequestError
from sglang.srt.function_call.base_format_detector import BaseFormatDetector
from sglang.srt.function_call.json_array_detector import JsonArrayDetector
from sglang.srt.managers.generate_request import GenerateRequest
from sglang.srt.managers.request_state import Delta, ReqState
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.parser.reasoning_parser import ReasoningFormat, ReasoningParser, ReasoningTokenCounter

# Names by which templates know whether the model shall think.
_THINKING_SWITCHES = ("enable_thinking", "thinking")
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


class ChatAnswer(Answer[ChatCompletionRequest]):
    """A chat completion."""

    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def __init__(
        self, manager: TokenizerManager, request: ChatCompletionRequest, model: str, settings: OpenAISettings
    ) -> None:
        super().__init__(manager, request, model, settings, "chatcmpl")
        self._tools = parse_tools(request)
        self._detector = _detector(self._tools, settings)
        self._thoughts: Literal["open", "closed", "unknown"] = "unknown"
        self._outputs: dict[int, ChatOutput] = {}
        self._counters: dict[int, ReasoningTokenCounter] = {}

    @property
    def _reasoning(self) -> ReasoningFormat | None:
        return None if self._thoughts == "closed" else self.settings.reasoning

    def requests(self) -> list[GenerateRequest]:
        request, settings = self.request, self.settings
        messages = template_messages(request.messages)
        last = messages[-1]
        if request.continue_final_message and last["role"] != "assistant":
            raise RequestError(
                "'continue_final_message' needs a last message of the assistant.", "continue_final_message"
            )
        self._check_tools()
        prompt = settings.template.render(
            messages,
            tools=self._tools.shown if "tools" in settings.template.variables else (),
            continue_final_message=request.continue_final_message,
            kwargs=_template_kwargs(request, settings),
        )
        if settings.reasoning is not None:
            continued = last["content"] if request.continue_final_message else None
            self._thoughts = _thoughts_in(settings.reasoning, prompt, continued)
        params = request.sampling_params(request.output_limit, settings.sampling_defaults, self._grammar())
        if self._marks_are_special():
            params = msgspec.structs.replace(params, skip_special_tokens=False)
        return [
            GenerateRequest(
                rid=f"{self.id}_{sample}",
                text=prompt,
                add_special_tokens=False,  # the template has written them
                sampling_params=params.sample(sample),
                max_new_tokens_given=request.output_limit is not None,
                return_logprob=request.logprobs,
                top_logprobs_num=request.top_logprobs or 0,
            )
            for sample in range(params.n)
        ]

    def _check_tools(self) -> None:
        if self._tools.mode != "auto":
            return
        if "tools" not in self.settings.template.variables:
            raise RequestError(
                "This model's chat template does not show tools to the model, so it can't choose one: set "
                "'tool_choice' to required or to a function, or start the server with a --chat-template that has them.",
                "tools",
            )
        if self.settings.tool_call_parser is None:
            raise RequestError(
                "How this model writes tool calls is not known: start the server with --tool-call-parser, or set "
                "'tool_choice' to required or to a function.",
                "tools",
            )

    def _grammar(self) -> Mapping[str, str]:
        """The field of /generate that constrains the whole output: answer, tool calls and thoughts before them."""
        request, tools, reasoning = self.request, self._tools, self._reasoning
        grammar = request.grammar()
        if tools.mode == "required":
            if grammar:
                raise RequestError(
                    "A 'tool_choice' that requires a call can't be combined with 'response_format', 'regex' or 'ebnf'.",
                    "tool_choice",
                )
            grammar = forced_calls(tools.required_schema(parallel=request.parallel_tool_calls))
        elif self._detector is not None and (grammar or any(function.strict for function in tools.functions)):
            tags = self._detector.strict_tags(tools.functions)
            grammar = with_strict_calls(grammar, tags, parallel=request.parallel_tool_calls)
        if not grammar or reasoning is None:
            return grammar
        opened, certain = self._thoughts == "open", self._begins_thinking(reasoning)
        return after_thoughts(grammar, reasoning, opened=opened, certain=certain)

    def _marks_are_special(self) -> bool:
        """Whether leaving special tokens out of the text would hide what is looked for in it."""
        marks = {self._detector.bot_token} if self._detector is not None else set()
        if self._reasoning is not None:
            marks |= {self._reasoning.think_start, self._reasoning.think_end}
        decoder = self.manager.decoder
        return bool(marks) and any(decoder.text(i) in marks for i in decoder.special_ids)

    def reasoning_tokens(self, state: ReqState) -> int:
        form = self._reasoning
        if form is None:
            return 0
        if (counter := self._counters.get(state.index)) is None:
            pieces, force = self.manager.decoder.pieces, self._begins_thinking(form)
            counter = self._counters[state.index] = ReasoningTokenCounter(form, pieces, force_reasoning=force)
        return counter.count(state.output_ids)

    def _begins_thinking(self, form: ReasoningFormat) -> bool:
        return self._thoughts == "open" or form.always

    def _output(self, index: int) -> ChatOutput:
        if (output := self._outputs.get(index)) is None:
            request, tools = self.request, self._tools
            reasoning = detector = None
            if (form := self._reasoning) is not None and request.separate_reasoning:
                reasoning = ReasoningParser(
                    form, force_reasoning=self._begins_thinking(form), stream_reasoning=request.stream_reasoning
                )
            if self._detector is not None:
                detector = self._detector(tools.functions, parallel=request.parallel_tool_calls)
            parser = self.settings.tool_call_parser or BaseFormatDetector
            output = self._outputs[index] = ChatOutput(reasoning, detector, parser.new_call_id)
        return output

    def choice(self, state: ReqState) -> dict[str, Any]:
        output = self._output(state.index)
        return {
            "index": state.index,
            "message": output.message(state.text),
            "logprobs": self._logprobs(state, 0),
            **_finish(state, output),
        }

    def chunk_choices(self, state: ReqState, delta: Delta) -> Iterable[dict[str, Any]]:
        unfinished = {"finish_reason": None, "matched_stop": None}
        if state.index not in self._outputs:
            first = {"role": "assistant", "content": ""}
            yield {"index": state.index, "delta": first, "logprobs": None, **unfinished}
        output = self._output(state.index)
        logprobs = self._logprobs(state, delta.start) if delta.start < len(state.output_ids) else None
        deltas = output.deltas(delta.text, last=state.finished)
        if logprobs and not deltas:
            deltas = [{"content": ""}]
        for piece in deltas:
            yield {"index": state.index, "delta": piece, "logprobs": logprobs, **unfinished}
            logprobs = None
        if state.finished:
            yield {"index": state.index, "delta": {}, "logprobs": None, **_finish(state, output)}

    def _logprobs(self, state: ReqState, start: int) -> dict[str, Any] | None:
        if not self.request.logprobs:
            return None
        tokens, tops = state.output_token_logprobs[start:], state.output_top_logprobs[start:]
        return chat_logprobs(self.manager.decoder, tokens, tops)


def _detector(tools: ToolChoice, settings: OpenAISettings) -> type[BaseFormatDetector] | None:
    if tools.mode == "none":
        return None
    return JsonArrayDetector if tools.mode == "required" else settings.tool_call_parser


def _finish(state: ReqState, output: ChatOutput) -> dict[str, Any]:
    end = finish(state)
    if output.has_tool_calls and end["finish_reason"] == "stop":
        return {"finish_reason": "tool_calls", "matched_stop": None}
    return end


def _template_kwargs(request: ChatCompletionRequest, settings: OpenAISettings) -> dict[str, Any]:
    """What a template is given beside messages and tools.

    Raises:
        RequestError: ``reasoning_effort`` is none of OpenAI's, or means nothing to this model.
    """
    kwargs = dict(request.chat_template_kwargs or {})
    effort = request.reasoning_effort
    if effort is None:
        return kwargs
    if effort not in _EFFORTS and not (isinstance(effort, float) and 0 <= effort < 1):
        raise RequestError(
            f"'reasoning_effort' must be one of {', '.join(_EFFORTS)}, got {effort!r}.", "reasoning_effort"
        )
    meant = {"reasoning_effort": effort, **dict.fromkeys(_THINKING_SWITCHES, effort != "none")}
    known = {name: value for name, value in meant.items() if name in settings.template.variables}
    if not known and effort != "none":
        raise RequestError(
            "This model's chat template reads neither 'reasoning_effort' nor a switch for thoughts: leave it out.",
            "reasoning_effort",
        )
    return {**known, **kwargs}


def _thoughts_in(form: ReasoningFormat, prompt: str, continued: str | None) -> Literal["open", "closed", "unknown"]:
    """Whether the prompt leaves the model inside its thoughts, behind them, or free to begin them.

    Args:
        continued: what the assistant's message, which the model continues, has so far.
    """
    if continued is not None:
        start, end = continued.rfind(form.think_start), continued.rfind(form.think_end)
        if start == end == -1:
            return "closed" if continued.strip() and not form.always else "unknown"
        return "open" if start > end else "closed"
    prompt = prompt.rstrip()
    if prompt.endswith(form.think_start):
        return "open"
    return "closed" if prompt.endswith(form.think_end) else "unknown"
