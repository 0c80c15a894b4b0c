"""``python -m sglang.launch_server --model-path MODEL``: serve a model over HTTP."""

import sys

from sglang.srt.server_args import prepare_server_args
from sglang.srt.utils.cli import run_main


def main() -> None:
    server_args = prepare_server_args(sys.argv[1:])
    # Slow imports come after the arguments, so that a mistyped one is answered at once.
    from sglang.srt.entrypoints.http_server import launch_server

    sys.exit(launch_server(server_args))


if __name__ == "__main__":
    run_main(main)
