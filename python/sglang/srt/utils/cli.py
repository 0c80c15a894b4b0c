"""What every entry point does with an error that is meant for the user."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from sglang.srt.errors import ArgumentError, StartupError


class ArgumentParser(argparse.ArgumentParser):
    """A parser whose errors are :class:`ArgumentError`, and that never guesses from an abbreviation."""

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise ArgumentError(message)


def run_main(main: Callable[[], None]) -> None:
    """Call ``main``; a :class:`StartupError` becomes its text on stderr and its exit status, without a traceback, and
    Ctrl-C the status that shells give it."""
    try:
        main()
    except StartupError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)


def check_appendable(file: Path) -> None:
    """Before work is done whose results go there.

    Raises:
        ArgumentError: ``file`` can't be written to.
    """
    try:
        new = not file.exists()
        with file.open("a"):
            pass
        if new:
            file.unlink()
    except OSError as error:
        raise ArgumentError(f"results can't be written to {file}: {error.strerror}") from None
