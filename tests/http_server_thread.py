"""A real uvicorn with the real application in a thread of the test process; the scheduler process is a fake."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fake_scheduler import run_fake_scheduler
from sglang.srt.entrypoints.http_app import HttpServer
from sglang.srt.entrypoints.runtime import Runtime
from sglang.srt.entrypoints.uvicorn_server import make_uvicorn, new_event_loop
from sglang.srt.server_args import ServerArgs

FIXTURE = Path(__file__).parent / "fixtures" / "tiny-llama-bf16"


@contextlib.contextmanager
def serve(**arguments: Any) -> Iterator[str]:
    """The base URL of a server with these arguments, ready."""
    arguments = {
        "model_path": str(FIXTURE),
        "device": "cpu",
        "random_seed": 1,
        "log_level_http": "warning",
        **arguments,
    }
    runtime = Runtime(ServerArgs(**arguments), run_fake_scheduler)
    application = HttpServer(runtime)
    server = make_uvicorn(application.app, runtime.server_args)
    listener = socket.create_server(("127.0.0.1", 0))
    started = threading.Event()

    async def run() -> None:
        try:
            await runtime.start()
            application.ready = True
            started.set()
            await server.serve(sockets=[listener])
        finally:
            started.set()
            runtime.stop()

    loop = new_event_loop()
    thread = threading.Thread(target=loop.run_until_complete, args=(run(),), daemon=True)
    thread.start()
    started.wait()
    assert application.ready
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()
        loop.close()
