"""What the OpenAI endpoints know of the model beside its weights."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.errors import CheckpointError, RequestError
from sglang.srt.function_call.base_format_detector import BaseFormatDetector
from sglang.srt.function_call.function_call_parser import TOOL_CALL_PARSERS, tool_call_parser_of
from sglang.srt.parser.reasoning_parser import REASONING_PARSERS, ReasoningFormat
from sglang.srt.parser.template_manager import ChatTemplate
from sglang.srt.sampling.sampling_params import parse_sampling_params
from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class OpenAISettings:
    """How conversations are written and answers read.

    Attributes:
        tool_call_parser: reads tool calls that the model makes on its own; None if its format is not known.
        reasoning: how the model marks its thoughts; None: they are not told apart.
        sampling_defaults: values of sampling fields that a request leaves out.
    """

    template: ChatTemplate
    tool_call_parser: type[BaseFormatDetector] | None
    reasoning: ReasoningFormat | None
    sampling_defaults: Mapping[str, Any]

    @classmethod
    def create(cls, server_args: ServerArgs, tokenizer: Any, model_config: ModelConfig) -> OpenAISettings:
        """From the arguments and the model's files; what was derived is logged.

        Raises:
            ArgumentError: --chat-template is no template.
            CheckpointError: generation_config.json recommends what no request may ask for.
        """
        template = ChatTemplate(tokenizer, server_args.chat_template)
        parser: str | None = server_args.tool_call_parser
        if parser is None:
            parser = tool_call_parser_of(template.text)
            if parser is not None:
                logger.info("Tool call parser: %s (from the chat template; --tool-call-parser names another)", parser)
        defaults: Mapping[str, Any] = {}
        if server_args.sampling_defaults == "model":
            defaults = _checked(model_config.sampling_defaults)
            if defaults:
                logger.info("Sampling defaults of the OpenAI endpoints, from generation_config.json: %s", defaults)
        return cls(
            template=template,
            tool_call_parser=None if parser is None else TOOL_CALL_PARSERS[parser],
            reasoning=REASONING_PARSERS[server_args.reasoning_parser] if server_args.reasoning_parser else None,
            sampling_defaults=defaults,
        )


def _checked(defaults: Mapping[str, Any]) -> dict[str, Any]:
    if defaults.get("top_k") == 0:  # transformers' spelling of the whole vocabulary
        defaults = {**defaults, "top_k": -1}
    try:
        parse_sampling_params(defaults)
    except RequestError as error:
        raise CheckpointError(
            f"generation_config.json: {error} Correct it, or start with --sampling-defaults openai."
        ) from error
    return dict(defaults)
