"""The scheduler as a child process: start, readiness, death, end."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import multiprocessing.connection
import os
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

from sglang.srt.errors import StartupError
from sglang.srt.managers.io_struct import PortArgs
from sglang.srt.server_args import ServerArgs

RunScheduler = Callable[[ServerArgs, PortArgs, Connection], None]


def _main(run: RunScheduler, server_args: ServerArgs, port_args: PortArgs, ready_writer: Connection) -> None:
    # In a session of its own Ctrl-C reaches only the HTTP process, which drains before it ends this one.
    os.setsid()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    run(server_args, port_args, ready_writer)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)


@contextlib.contextmanager
def _spin_briefly() -> Iterator[None]:
    """Let OpenMP threads of a process started meanwhile wait for each other by spinning only briefly, then sleep.

    By default they spin for milliseconds. Where another process wants one of their cores (the HTTP process, on a small
    machine), all then wait for a thread that is not running: one busy neighbour on 2 cores was seen to take decoding
    from 50 tokens/s to 0.4, and to 26 with this, which costs a tenth of the speed of a machine without neighbours.
    """
    chosen = "GOMP_SPINCOUNT" in os.environ or "OMP_WAIT_POLICY" in os.environ
    if not chosen:
        os.environ["GOMP_SPINCOUNT"] = "2000"
    try:
        yield
    finally:
        if not chosen:
            del os.environ["GOMP_SPINCOUNT"]


class SchedulerProcess:
    """``run(server_args, port_args, ready_writer)`` in a spawned process; :meth:`stop` it in the end."""

    def __init__(self, run: RunScheduler, server_args: ServerArgs, port_args: PortArgs) -> None:
        context = multiprocessing.get_context("spawn")
        self._ready, writer = context.Pipe(duplex=False)
        self._process = context.Process(
            target=_main, args=(run, server_args, port_args, writer), name="sglang::scheduler", daemon=True
        )
        with _spin_briefly():
            self._process.start()
        # The child has the only writing end now, so its death ends the wait for readiness.
        writer.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    async def ready(self) -> dict[str, Any]:
        """Wait until the scheduler serves; what it reports of itself.

        Raises:
            StartupError: it reported an error, or died.
        """
        await _readable(self._ready.fileno())
        try:
            report: dict[str, Any] = self._ready.recv()
        except EOFError:
            raise StartupError(f"The scheduler process {await self.died()} before it was ready.") from None
        if report.get("status") == "ready":
            return report
        error = StartupError(str(report.get("message")))
        error.exit_code = int(report.get("exit_code", 1))
        raise error

    async def died(self) -> str:
        """Wait for the end of the process; how it ended."""
        await _readable(self._process.sentinel)
        self._process.join()
        code = self._process.exitcode
        return f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with exit status {code}"

    def stop(self, grace: float = 10.0) -> None:
        """End the process, by force after ``grace`` seconds (or at once if 0)."""
        if grace > 0:
            self._process.terminate()
            self._process.join(grace)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._ready.close()


async def _readable(fd: int) -> None:
    loop = asyncio.get_running_loop()
    event = asyncio.Event()
    loop.add_reader(fd, event.set)
    try:
        await event.wait()
    finally:
        loop.remove_reader(fd)
