"""A server that more than one test file uses."""

from collections.abc import Iterator

import pytest
from launched_server import FIXTURES, Server, launched


@pytest.fixture(scope="session")
def tiny_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A tiny NVFP4 checkpoint, served as "tiny". Its weights are random: without a limit it would write white space for
    ever where JSON allows it."""
    arguments = ("--served-model-name", "tiny", "--constrained-json-max-whitespace-cnt", "1")
    model = FIXTURES / "tiny-llama-modelopt-nvfp4"
    with launched(model, tmp_path_factory.mktemp("tiny-server"), *arguments) as running:
        yield running
