import logging
import re

import pytest

from sglang.srt.utils.log import configure_logging


@pytest.fixture(autouse=True)
def restore_root_logger():
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.mark.parametrize("prefix", ["", " TP0", " 100% TP1"])
def test_format(capsys, prefix):
    configure_logging("info", prefix)
    logging.getLogger("sglang.x").info("The server is %s", "ready")
    logging.getLogger("sglang.x").debug("hidden")
    text = capsys.readouterr().err
    assert re.fullmatch(rf"\[\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d{re.escape(prefix)}\] The server is ready\n", text)


def test_second_call_replaces_the_first(capsys):
    configure_logging("info", " A")
    configure_logging("warning", " B")
    logging.info("hidden")
    logging.warning("shown")
    text = capsys.readouterr().err
    assert text.count("\n") == 1
    assert " B] shown" in text
