"""What every entry point does with an error that is meant for the user."""

import argparse
import sys
from collections.abc import Callable
from typing import NoReturn

from sglang.srt.errors import ArgumentError, StartupError


class ArgumentParser(argparse.ArgumentParser):
    """A parser whose errors are :class:`ArgumentError`, and that never guesses from an abbreviation."""

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise ArgumentError(message)


def run_main(main: Callable[[], None]) -> None:
    """Call ``main``; a :class:`StartupError` becomes its text on stderr and its exit status, without a traceback."""
    try:
        main()
    except StartupError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
