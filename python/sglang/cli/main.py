"""``sglang serve MODEL [flags]`` and ``sglang version``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import sglang
from sglang.srt.errors import ArgumentError
from sglang.srt.utils.cli import ArgumentParser, run_main

REFUSED_COMMANDS = ("generate", "render", "tune", "webui")


def serve_argv(argv: Sequence[str]) -> list[str]:
    """The server's command line for what stands behind ``sglang serve``: a first word that is no flag is the model,
    and ``--model-type auto`` or ``llm`` (SGLang's third is diffusion) says what is so anyway.

    Raises:
        ArgumentError: another model type.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--model-type", default="auto", nargs="?")
    known, rest = parser.parse_known_args(argv)
    if known.model_type not in ("auto", "llm"):
        raise ArgumentError(
            f"--model-type must be auto or llm, not {known.model_type}: only language models are served"
        )
    return ["--model-path", *rest] if rest and not rest[0].startswith("-") else rest


def _main() -> None:
    argv = sys.argv[1:]
    if argv and argv[0] == "serve":
        from sglang.launch_server import main as launch_server

        launch_server(serve_argv(argv[1:]))
    if argv and argv[0] in REFUSED_COMMANDS:
        raise ArgumentError(f"sglang {argv[0]} is known from SGLang but not supported by this version")
    parser = ArgumentParser("sglang", "Serve language models.")
    parser.add_argument(
        "command",
        choices=["serve", "version"],
        help="serve MODEL [flags] starts a server (serve --help lists the flags); version shows the version",
    )
    parser.parse_args(argv)
    print(f"sglang version: {sglang.__version__}\ndistribution: sglang-nvfp4")


def main() -> None:
    """The console script ``sglang``."""
    run_main(_main)


if __name__ == "__main__":
    main()
