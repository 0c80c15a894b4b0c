"""What every entry point does at its ends."""

import resource
from pathlib import Path
from typing import NoReturn

import pytest

from sglang.srt.errors import ArgumentError
from sglang.srt.utils.cli import check_appendable, run_main
from sglang.srt.utils.open_files import WANTED, raise_open_file_limit


def test_control_c_is_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted() -> NoReturn:
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as caught:
        run_main(interrupted)
    assert caught.value.code == 130 and capsys.readouterr().err == "interrupted\n"


def test_results_that_could_not_be_written(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    check_appendable(file)
    assert not file.exists()
    file.write_text("old\n")
    check_appendable(file)
    assert file.read_text() == "old\n"
    for bad in (tmp_path, tmp_path / "absent" / "file"):
        with pytest.raises(ArgumentError, match=f"results can't be written to {bad}: "):
            check_appendable(bad)


@pytest.mark.parametrize(
    ("now", "most", "wanted"),
    [
        (1024, 20_000, 20_000),
        (1024, resource.RLIM_INFINITY, WANTED),
        (1024, 1 << 20, WANTED),
        (WANTED, 1 << 20, None),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, None),
    ],
)
def test_open_files(now: int, most: int, wanted: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: (now, most))
    monkeypatch.setattr(resource, "setrlimit", lambda which, both: limits.append(both))
    raise_open_file_limit()
    assert limits == ([] if wanted is None else [(wanted, most)])
