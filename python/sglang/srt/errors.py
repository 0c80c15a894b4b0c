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


class Fp4GemmError(RuntimeError):
    """A kernel library failed on an NVFP4 weight or product; whatever it raised is the ``__cause__``.

    Args:
        backend: name of the FP4 GEMM backend.
        rows, out_features, in_features: M, N and K as the kernel got them; ``rows`` None while a weight is prepared.
        dtype: of inputs and outputs.
        cause: what was raised.
        hint: what this backend needs that may be missing, as a sentence.
    """

    def __init__(
        self,
        backend: str,
        rows: int | None,
        out_features: int,
        in_features: int,
        dtype: object,
        cause: Exception,
        hint: str = "",
    ) -> None:
        doing = "preparing a weight" if rows is None else f"M={rows}"
        text = str(cause).strip() or "no message"
        super().__init__(
            f"FP4 GEMM backend {backend} failed at {doing}, N={out_features}, K={in_features}, {dtype}: "
            f"{type(cause).__name__}: {text}. {hint}{' ' if hint else ''}"
            f"Run `python -m sglang.verify_fp4 --backend {backend}` to check it by itself; "
            "--fp4-gemm-backend auto, or another name, serves without it."
        )
        self.backend = backend


class RequestError(ValueError):
    """A request can't be served as written (HTTP 400).

    Args:
        message: what is wrong and what would be right.
        param: name of the offending request field, where there is one.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param
