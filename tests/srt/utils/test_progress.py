import logging
import sys

import pytest

from sglang.srt.utils import progress
from sglang.srt.utils.progress import progress_of


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        self.now += 4.0
        return self.now


def test_log_file_gets_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(progress, "time", Clock())
    assert list(progress_of(list("abcdefgh"), "Reading")) == list("abcdefgh")
    assert caplog.messages == ["Reading: 2 of 8", "Reading: 5 of 8"]
    assert capsys.readouterr() == ("", "")


def test_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert list(progress_of([1, 2], "Reading")) == [1, 2]
    assert "Reading: 100%" in capsys.readouterr().err
    assert list(progress_of([1, 2], "Reading", show=False)) == [1, 2]
    assert capsys.readouterr().err == ""
