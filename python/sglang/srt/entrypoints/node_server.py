"""The life of a server process on another node than the first: its ranks, and whether they run, over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import socket
from collections.abc import Callable

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.entrypoints.nodes import make_nodes
from sglang.srt.entrypoints.scheduler_process import RunScheduler, SchedulerProcesses
from sglang.srt.entrypoints.uvicorn_server import Signals, check_tls, first_of, make_uvicorn, new_event_loop
from sglang.srt.layers.quantization import get_quantization
from sglang.srt.layers.quantization.fp4_utils import initialize_fp4_gemm_config
from sglang.srt.managers.io_struct import PortArgs
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.cache_folder import ensure_cache_folder
from sglang.srt.utils.net import listen_on

logger = logging.getLogger(__name__)

# Longer than node 0 drains.
END_TIMEOUT = 45.0


class NodeServer:
    """This node's ranks, from start to end.

    Attributes:
        ready: its ranks serve.

    Raises:
        StartupError: something that is cheap to check is not as it must be.
    """

    def __init__(self, server_args: ServerArgs, run_scheduler: RunScheduler) -> None:
        self.ready = False
        self._args = server_args
        self._run_scheduler = run_scheduler
        self._config = ModelConfig.from_server_args(server_args)
        ensure_cache_folder()
        quantized = get_quantization(self._config, server_args) is not None
        initialize_fp4_gemm_config(server_args, self._config.dtype, quiet=not quantized)
        paths = ("/health", "/ready", "/ping", "/health_generate")
        routes = [Route(path, self._health) for path in paths]
        self.app = Starlette(routes=[*routes, Route("/{path:path}", self._elsewhere, methods=["GET", "POST", "PUT"])])

    async def _health(self, request: Request) -> Response:
        return Response(status_code=200 if self.ready else 503)

    async def _elsewhere(self, request: Request) -> Response:
        text = f"This is node {self._args.node_rank} of {self._args.nnodes}; node 0 answers requests.\n"
        return PlainTextResponse(text, 404)

    async def serve(self, listener: socket.socket, on_ready: Callable[[], None]) -> int:
        server = make_uvicorn(self.app, self._args)
        signals = Signals()
        serving = asyncio.ensure_future(server.serve(sockets=[listener]))
        living = asyncio.ensure_future(self._live(signals, on_ready))
        try:
            await first_of(living, serving)
            return living.result() if living.done() else 1
        finally:
            living.cancel()
            self.ready = False
            server.should_exit = True
            await asyncio.wait({living, serving})

    async def _live(self, signals: Signals, on_ready: Callable[[], None]) -> int:
        port_args = PortArgs.create()
        nodes = make_nodes(self._args, self._config)
        assert nodes is not None
        processes: SchedulerProcesses | None = None
        try:
            meeting = asyncio.ensure_future(nodes.meet())
            await first_of(meeting, signals.first)
            if not meeting.done():
                meeting.cancel()
                return 0
            port_args = msgspec.structs.replace(port_args, rendezvous=meeting.result())
            # One seed for all ranks: what is drawn at random must be the same on each.
            args = dataclasses.replace(self._args, random_seed=nodes.random_seed)
            processes = SchedulerProcesses(self._run_scheduler, args, port_args, nodes)
            starting = asyncio.ensure_future(processes.ready())
            await first_of(starting, signals.first)
            if not starting.done():
                starting.cancel()
                nodes.tell_end("it was stopped by a signal while it started.")
                return 1
            starting.result()
            self.ready = True
            logger.info("Node %d of %d: its ranks are ready.", args.node_rank, args.nnodes)
            on_ready()
            dying = asyncio.ensure_future(processes.died())
            await first_of(dying, signals.first)
            self.ready = False
            if not dying.done():
                logger.info("Asking node 0 to end.")
                nodes.ask_to_drain()
                await first_of(dying, signals.second, timeout=END_TIMEOUT)
            if not dying.done():
                dying.cancel()
                nodes.tell_end("it was stopped by signals.")
                return 1
            if message := dying.result():
                logger.error(message)
            return 1 if message else 0
        finally:
            if processes is not None:
                processes.stop(grace=0)
            nodes.close()
            port_args.remove()


def launch_node(server_args: ServerArgs, run_scheduler: RunScheduler, on_ready: Callable[[], None]) -> int:
    """Serve until node 0 ends, or this one is asked to and node 0 follows; the exit status. Arguments and errors as
    of ``launch_server``."""
    check_tls(server_args)
    with contextlib.closing(listen_on(server_args.host, server_args.port)) as listener:
        node = NodeServer(server_args, run_scheduler)
        loop = new_event_loop()
        try:
            return loop.run_until_complete(node.serve(listener, on_ready))
        finally:
            loop.close()
