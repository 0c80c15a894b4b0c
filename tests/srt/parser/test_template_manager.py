"""The chat template: where it comes from and what a request may set in it."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from http_server_thread import FIXTURE
from sglang.srt.entrypoints.runtime import Runtime
from sglang.srt.errors import ArgumentError, RequestError
from sglang.srt.parser.template_manager import ChatTemplate, read_chat_template
from sglang.srt.server_args import ServerArgs

TOKENIZER = AutoTokenizer.from_pretrained(FIXTURE)
USER = [{"role": "user", "content": "hi"}]
ECHO = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


def test_sources(tmp_path: Path) -> None:
    jinja, description = tmp_path / "a.jinja", tmp_path / "b.json"
    jinja.write_text(ECHO + "\n")
    description.write_text(json.dumps({"chat_template": ECHO}))
    assert read_chat_template(str(jinja)) == read_chat_template(str(description)) == read_chat_template(ECHO) == ECHO
    assert ChatTemplate(TOKENIZER, ECHO).render(USER) == "hi"
    assert ChatTemplate(TOKENIZER).render(USER) == "<s><|user|>\nhi</s>\n<|assistant|>\n"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("chatml", "built-in templates .* not in this server"),
        ("/no/such.jinja", "no such file"),
        ("{% if %}", "no Jinja template"),
    ],
)
def test_bad_source(source: str, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        ChatTemplate(TOKENIZER, source)


def test_bad_source_ends_the_start() -> None:
    with pytest.raises(ArgumentError, match="--chat-template chatml") as caught:
        Runtime(ServerArgs(model_path=str(FIXTURE), device="cpu", chat_template="chatml"))
    assert caught.value.exit_code == 2


def test_bad_files(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    for content, words in (('{"name": "x", "sep_style": "CHATML"}', "no text 'chat_template'"), ("{", "can't be read")):
        file.write_text(content)
        with pytest.raises(ArgumentError, match=words):
            read_chat_template(str(file))


def test_kwargs() -> None:
    template = ChatTemplate(TOKENIZER, "{% if not quiet %}LOUD {% endif %}" + ECHO)
    assert template.render(USER, kwargs={"quiet": True}) == "hi"
    # False asks for nothing where the template knows no such thing.
    assert template.render(USER, kwargs={"enable_thinking": False}) == "LOUD hi"
    refused: dict[str, Any] = {"enable_thinking": True, "quite": 1, "messages": [], "tools": [], "chat_template": "x"}
    for name, value in refused.items():
        with pytest.raises(RequestError, match=name) as caught:
            template.render(USER, kwargs={name: value})
        assert caught.value.param == "chat_template_kwargs"


def test_named_templates() -> None:
    tokenizer = AutoTokenizer.from_pretrained(FIXTURE)
    tokenizer.chat_template = {"default": ECHO, "tool_use": "{{ tools | length }} tools"}
    template = ChatTemplate(tokenizer)
    tool = {"type": "function", "function": {"name": "f"}}
    assert template.render(USER) == "hi" and template.render(USER, tools=[tool]) == "1 tools"
    assert {"tools", "messages"} <= template.variables and template.text.endswith("tools")
