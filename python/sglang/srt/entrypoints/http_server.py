"""The life of a server process: checks, start, service, drain, end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import ssl
from collections.abc import Callable, Iterator

import uvicorn

from sglang.srt.entrypoints.http_app import HttpServer
from sglang.srt.entrypoints.runtime import Runtime
from sglang.srt.entrypoints.scheduler_process import RunScheduler
from sglang.srt.entrypoints.startup_table import startup_table
from sglang.srt.errors import StartupError
from sglang.srt.managers.scheduler_main import run_scheduler_process
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.log import configure_logging
from sglang.srt.utils.net import listen_on

logger = logging.getLogger(__name__)

DRAIN_TIMEOUT = 30.0


class _Uvicorn(uvicorn.Server):
    """Without uvicorn's signal handlers: a signal drains first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def launch_server(
    server_args: ServerArgs,
    run_scheduler: RunScheduler = run_scheduler_process,
    on_ready: Callable[[], None] | None = None,
) -> int:
    """Serve until SIGTERM or SIGINT; the exit status.

    Args:
        run_scheduler: what the scheduler process runs.
        on_ready: called once, when requests are accepted.

    Raises:
        StartupError: the server can't start as asked. Nothing is left running.
    """
    configure_logging(server_args.log_level)
    logger.info("server_args=%s", server_args)
    _check_tls(server_args)
    with contextlib.closing(listen_on(server_args.host, server_args.port)) as listener:
        runtime = Runtime(server_args, run_scheduler)
        loop = _new_event_loop()
        try:
            return loop.run_until_complete(_serve(runtime, listener, on_ready or (lambda: None)))
        finally:
            runtime.stop(grace=0)
            loop.close()


def _check_tls(args: ServerArgs) -> None:
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


def _new_event_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:  # not on every platform
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


async def _serve(runtime: Runtime, listener: socket.socket, on_ready: Callable[[], None]) -> int:
    args = runtime.server_args
    application = HttpServer(runtime)
    config = uvicorn.Config(
        application.app,
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
        lifespan="off",
        ws="none",
        timeout_graceful_shutdown=5,
    )
    # It would say that it runs before the model is loaded.
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    server = _Uvicorn(config)
    signals = _Signals()
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    try:
        return await _live(runtime, application, serving, signals, on_ready)
    finally:
        application.ready = False
        server.should_exit = True
        await asyncio.wait({serving})
        runtime.stop()


async def _live(
    runtime: Runtime,
    application: HttpServer,
    serving: asyncio.Future[None],
    signals: _Signals,
    on_ready: Callable[[], None],
) -> int:
    starting = asyncio.ensure_future(runtime.start())
    await _first_of(starting, signals.first, serving)
    if not starting.done():
        starting.cancel()
        return 0 if signals.first.done() else 1
    starting.result()

    application.ready = True
    args = runtime.server_args
    logger.info("Serving\n%s", startup_table(args, runtime.model_config, runtime.scheduler_info))
    scheme = "http" if args.ssl_certfile is None else "https"
    logger.info("Listening on %s://%s:%d (Ctrl-C stops)", scheme, args.host, args.port)
    logger.info("The server is fired up and ready to roll!")
    on_ready()
    await _first_of(signals.first, runtime.death, serving)

    if signals.first.done() and not runtime.death.done():
        application.ready = False
        logger.info("Shutting down: no new requests; waiting for the running ones.")
        draining = asyncio.ensure_future(runtime.manager.drain(DRAIN_TIMEOUT))
        await _first_of(draining, runtime.death, signals.second)
        if signals.second.done():
            await runtime.manager.drain(0)
    return 0 if signals.first.done() and not runtime.death.done() else 1


class _Signals:
    """SIGTERM and SIGINT: the first one drains, a second one ends at once."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.first: asyncio.Future[None] = loop.create_future()
        self.second: asyncio.Future[None] = loop.create_future()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        for future in (self.first, self.second):
            if not future.done():
                future.set_result(None)
                return


async def _first_of(*futures: asyncio.Future[None] | asyncio.Future[str]) -> None:
    await asyncio.wait(set(futures), return_when=asyncio.FIRST_COMPLETED)
