"""The errors that reach a user, by what they should do about them.

A :class:`StartupError` ends the process before it serves: its text is printed without a traceback and
``exit_code`` becomes the exit status. A :class:`RequestError` answers one request with HTTP 400 and harms
nothing else.
"""


class StartupError(Exception):
    """The server can't start; the text says what, where and what to do."""

    exit_code = 1


class ArgumentError(StartupError):
    """A command-line flag or an environment variable has a value that can't be used."""

    exit_code = 2


class CheckpointError(StartupError):
    """A model folder can't be loaded exactly; the text names the file or tensor."""


class RequestError(ValueError):
    """A request can't be served as written (HTTP 400).

    Args:
        message: what is wrong and what would be right.
        param: name of the offending request field, where there is one.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param
