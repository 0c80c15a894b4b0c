"""What serves HTTP, for this node whatever its number: uvicorn, its settings, signals."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import ssl
from collections.abc import Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from sglang.srt.entrypoints.client_timeouts import http_protocol
from sglang.srt.environ import envs
from sglang.srt.errors import StartupError
from sglang.srt.server_args import ServerArgs


class Uvicorn(uvicorn.Server):
    """Without uvicorn's signal handlers: a signal drains first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def make_uvicorn(application: ASGIApp, args: ServerArgs) -> Uvicorn:
    """A server for ``application`` as the flags say; ``serve(sockets=[listener])`` runs it.

    Raises:
        ArgumentError: SGLANG_WRITE_TIMEOUT or SGLANG_READ_TIMEOUT is no number of seconds.
    """
    config = uvicorn.Config(
        application,
        host=args.host,
        port=args.port,
        root_path=args.fastapi_root_path or "",
        log_config=None,
        log_level=args.log_level_http or args.log_level,
        ssl_keyfile=args.ssl_keyfile,
        ssl_certfile=args.ssl_certfile,
        ssl_keyfile_password=args.ssl_keyfile_password,
        ssl_ca_certs=args.ssl_ca_certs,
        ssl_cert_reqs=ssl.CERT_REQUIRED if args.ssl_ca_certs is not None else ssl.CERT_NONE,
        http=http_protocol(envs.SGLANG_WRITE_TIMEOUT.get(), envs.SGLANG_READ_TIMEOUT.get()),
        lifespan="off",
        ws="none",
        timeout_graceful_shutdown=5,
    )
    # It would say that it runs before the model is loaded.
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    return Uvicorn(config)


def check_tls(args: ServerArgs) -> None:
    """Raise StartupError unless the files of --ssl-* can be used."""
    if args.ssl_certfile is None:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(args.ssl_certfile, args.ssl_keyfile, lambda: args.ssl_keyfile_password or "")
        if args.ssl_ca_certs is not None:
            context.load_verify_locations(args.ssl_ca_certs)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        files = ", ".join(file for file in (args.ssl_certfile, args.ssl_keyfile, args.ssl_ca_certs) if file)
        raise StartupError(
            f"--ssl-certfile, --ssl-keyfile or --ssl-ca-certs ({files}) can't be used: {error}. They must be PEM "
            "files, certificate and key of each other; an encrypted key needs --ssl-keyfile-password"
        ) from None


def new_event_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:  # not on every platform
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


class Signals:
    """SIGTERM and SIGINT: the first one drains, a second one ends at once."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.first: asyncio.Future[None] = loop.create_future()
        self.second: asyncio.Future[None] = loop.create_future()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.arrive)

    def arrive(self) -> None:
        for future in (self.first, self.second):
            if not future.done():
                future.set_result(None)
                return


async def first_of(*futures: asyncio.Future[Any], timeout: float | None = None) -> None:
    """Wait until one of them is done, or ``timeout`` seconds."""
    await asyncio.wait(set(futures), timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
