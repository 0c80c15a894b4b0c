"""A command line of the server, taken or refused."""

import pytest

from sglang.srt.errors import ArgumentError
from sglang.srt.server_args import ServerArgs, prepare_server_args


def parse(text: str) -> ServerArgs:
    return prepare_server_args(["--model-path", "m", *text.split()])


def refusal(text: str) -> str:
    with pytest.raises(ArgumentError) as caught:
        parse(text)
    message = str(caught.value)
    assert "\n" not in message
    assert caught.value.exit_code == 2
    return message
