"""``python -m sglang.launch_server --model-path MODEL``: serve a model over HTTP."""

import sys
from collections.abc import Sequence
from typing import NoReturn

from sglang.srt.server_args import prepare_server_args
from sglang.srt.utils.cli import run_main
from sglang.srt.utils.open_files import raise_open_file_limit


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Serve until the end; ``argv`` defaults to the process's."""
    server_args = prepare_server_args(sys.argv[1:] if argv is None else argv)
    # Slow imports come after the arguments, so that a mistyped one is answered at once.
    from sglang.srt.entrypoints.http_server import launch_server

    raise_open_file_limit()
    sys.exit(launch_server(server_args))


if __name__ == "__main__":
    run_main(main)
