import pytest

from sglang.srt.errors import ArgumentError, CheckpointError
from sglang.srt.utils.cli import run_main


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
