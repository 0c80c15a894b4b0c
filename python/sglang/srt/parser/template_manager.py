"""The chat template: the model's own or --chat-template's, and what it can do."""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.meta
from transformers.utils.chat_template_utils import _compile_jinja_template

from sglang.srt.errors import ArgumentError, RequestError

logger = logging.getLogger(__name__)


class ChatTemplate:
    """Writes conversations as the model was trained to read them.

    Args:
        tokenizer: its template is used unless ``source`` is given.
        source: --chat-template, a file's path or the template itself.

    Attributes:
        text: the template, of several named ones the one for tools; empty if there is none.
        variables: names that it reads, of those that a request may set.

    Raises:
        ArgumentError: ``source`` is neither, can't be read, or is no template.
    """

    def __init__(self, tokenizer: Any, source: str | None = None) -> None:
        self._tokenizer = tokenizer
        given = None if source is None else read_chat_template(source)
        self._template: str | dict[str, str] | None = given or tokenizer.chat_template
        named = self._template if isinstance(self._template, dict) else {"default": self._template or ""}
        self.text = named.get("tool_use") or named.get("default", "")
        try:
            self.variables = frozenset().union(*map(_variables, named.values()))
        except jinja2.TemplateError as error:
            if given is not None:
                raise ArgumentError(f"--chat-template is no Jinja template: {error}") from error
            logger.warning("The model's chat template is no Jinja template: %s", error)
            self.variables = frozenset()
        self._reserved = {"messages", *inspect.signature(tokenizer.apply_chat_template).parameters}

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        continue_final_message: bool = False,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt for the assistant's next message, or for the rest of its last one.

        Raises:
            RequestError: there is no template, it refuses the messages, or it does not read one of ``kwargs``.
        """
        if not self._template:
            raise RequestError(
                "This model's tokenizer has no chat template; start the server with --chat-template, or use "
                "/v1/completions or /generate with a finished prompt.",
                "messages",
            )
        kwargs = kwargs or {}
        for name, value in kwargs.items():
            if name in self._reserved:
                raise RequestError(f"'chat_template_kwargs' can't set {name!r}.", "chat_template_kwargs")
            # Jinja reads a name that is not set as false.
            if name not in self.variables and value not in (None, False):
                raise RequestError(
                    f"'chat_template_kwargs' sets {name!r}, which this model's chat template does not read.",
                    "chat_template_kwargs",
                )
        try:
            prompt: str = self._tokenizer.apply_chat_template(
                messages,
                tools=list(tools) or None,
                chat_template=self._template if isinstance(self._template, str) else None,
                tokenize=False,
                add_generation_prompt=not continue_final_message,
                continue_final_message=continue_final_message,
                **kwargs,
            )
        except Exception as error:  # a template may fail in any way on messages that it was not written for
            raise RequestError(f"The chat template can't write these messages: {error}", "messages") from error
        return prompt


def _variables(template: str) -> frozenset[str]:
    environment = _compile_jinja_template(template).environment
    return frozenset(jinja2.meta.find_undeclared_variables(environment.parse(template)))


def read_chat_template(source: str) -> str:
    """The template that --chat-template names or is.

    Raises:
        ArgumentError: no such file, or not one with a template.
    """
    if "{{" in source or "{%" in source:
        return source
    path = Path(source).expanduser()
    if not path.is_file():
        raise ArgumentError(
            f"--chat-template {source}: no such file. SGLang's built-in templates (llama-2, chatml, ...) are not in "
            "this server: give a file with a Jinja template, or the template itself"
        )
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix != ".json":
            return text.strip("\n")
        value = json.loads(text)
    except (OSError, ValueError) as error:
        raise ArgumentError(f"--chat-template {source} can't be read: {error}") from error
    template = value.get("chat_template") if isinstance(value, dict) else None
    if not isinstance(template, str):
        raise ArgumentError(
            f"--chat-template {source} has no text 'chat_template'; SGLang's JSON description of a conversation is not "
            "supported: give a file with a Jinja template"
        )
    return template
