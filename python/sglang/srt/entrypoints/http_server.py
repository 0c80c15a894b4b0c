"""The life of a server process: checks, start, service, drain, end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import socket
from collections.abc import Callable

from sglang.srt.entrypoints.http_app import HttpServer
from sglang.srt.entrypoints.node_server import launch_node
from sglang.srt.entrypoints.runtime import Runtime
from sglang.srt.entrypoints.scheduler_process import RunScheduler
from sglang.srt.entrypoints.startup_table import startup_table
from sglang.srt.entrypoints.uvicorn_server import Signals, check_tls, first_of, make_uvicorn, new_event_loop
from sglang.srt.managers.scheduler_main import run_scheduler_process
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.log import configure_logging
from sglang.srt.utils.net import listen_on

logger = logging.getLogger(__name__)

DRAIN_TIMEOUT = 30.0


def launch_server(
    server_args: ServerArgs,
    run_scheduler: RunScheduler = run_scheduler_process,
    on_ready: Callable[[], None] | None = None,
) -> int:
    """Serve until SIGTERM or SIGINT; the exit status. On another node than the first, see ``launch_node``.

    Args:
        run_scheduler: what the scheduler process runs.
        on_ready: called once, when requests are accepted.

    Raises:
        StartupError: the server can't start as asked. Nothing is left running.
    """
    configure_logging(server_args.log_level)
    logger.info("server_args=%s", server_args)
    if server_args.node_rank > 0:
        return launch_node(server_args, run_scheduler, on_ready or (lambda: None))
    check_tls(server_args)
    with contextlib.closing(listen_on(server_args.host, server_args.port)) as listener:
        runtime = Runtime(server_args, run_scheduler)
        loop = new_event_loop()
        try:
            return loop.run_until_complete(_serve(runtime, listener, on_ready or (lambda: None)))
        finally:
            runtime.stop(grace=0)
            loop.close()


async def _serve(runtime: Runtime, listener: socket.socket, on_ready: Callable[[], None]) -> int:
    args = runtime.server_args
    application = HttpServer(runtime)
    server = make_uvicorn(application.app, args)
    signals = Signals()
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
    signals: Signals,
    on_ready: Callable[[], None],
) -> int:
    starting = asyncio.ensure_future(runtime.start())
    await first_of(starting, signals.first, serving)
    if not starting.done():
        starting.cancel()
        return 0 if signals.first.done() else 1
    starting.result()

    # What the start has made stays, and collections that look through it hold up everybody.
    gc.freeze()
    application.ready = True
    args = runtime.server_args
    logger.info("Serving\n%s", startup_table(args, runtime.model_config, runtime.scheduler_info))
    scheme = "http" if args.ssl_certfile is None else "https"
    logger.info("Listening on %s://%s:%d (Ctrl-C stops)", scheme, args.host, args.port)
    logger.info("The server is fired up and ready to roll!")
    on_ready()
    if runtime.nodes is not None:  # what SIGTERM on another node asks for
        runtime.nodes.drain.add_done_callback(lambda _: signals.arrive())
    await first_of(signals.first, runtime.death, serving)

    if signals.first.done() and not runtime.death.done():
        application.ready = False
        logger.info("Shutting down: no new requests; waiting for the running ones.")
        draining = asyncio.ensure_future(runtime.manager.drain(DRAIN_TIMEOUT))
        await first_of(draining, runtime.death, signals.second)
        if signals.second.done():
            await runtime.manager.drain(0)
    return 0 if signals.first.done() and not runtime.death.done() else 1
