from pathlib import Path
from typing import NoReturn

import pytest

from sglang.srt.errors import ArgumentError, CheckpointError
from sglang.srt.utils.cli import check_appendable, run_main


@pytest.mark.parametrize(("error", "status"), [(ArgumentError("bad flag"), 2), (CheckpointError("bad file"), 1)])
def test_startup_error_is_one_line_and_a_status(capsys, error, status):
    def main():
        raise error

    with pytest.raises(SystemExit) as caught:
        run_main(main)
    assert caught.value.code == status
    captured = capsys.readouterr()
    assert captured.err == f"error: {error}\n"
    assert captured.out == ""


def test_other_errors_keep_their_traceback():
    with pytest.raises(ZeroDivisionError):
        run_main(lambda: 1 // 0)


def test_control_c_is_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted() -> NoReturn:
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as caught:
        run_main(interrupted)
    assert caught.value.code == 130 and capsys.readouterr().err == "interrupted\n"


def test_results_that_could_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "results.jsonl"
    check_appendable(file)
    assert not file.exists()
    file.write_text("old\n")
    check_appendable(file)
    assert file.read_text() == "old\n"
    for bad in (tmp_path, tmp_path / "absent" / "file"):
        with pytest.raises(ArgumentError, match=f"results can't be written to {bad}: "):
            check_appendable(bad)

    def denied(path: Path) -> bool:  # as Path.exists does in a folder that may not be searched
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "exists", denied)
    with pytest.raises(ArgumentError, match="Permission denied"):
        check_appendable(file)
