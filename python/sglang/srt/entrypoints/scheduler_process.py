"""The scheduler as child processes, one per tensor-parallel rank: start, readiness, death, end."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import multiprocessing.connection
import os
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from sglang.srt.errors import StartupError
from sglang.srt.managers.io_struct import PortArgs
from sglang.srt.server_args import ServerArgs

# The last argument is the tensor-parallel rank.
RunScheduler = Callable[[ServerArgs, PortArgs, Connection, int], None]

# Seconds that the other ranks get to end by themselves once rank 0 has ended.
_OTHER_RANKS_GRACE = 0.5


def _main(run: RunScheduler, server_args: ServerArgs, port_args: PortArgs, ready_writer: Connection, rank: int) -> None:
    # In a session of its own Ctrl-C reaches only the HTTP process, which drains before it ends this one.
    os.setsid()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    run(server_args, port_args, ready_writer, rank)


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
    from 50 tokens/s to 0.4. With this it is 16; without neighbours nothing is lost (2000 would give 25, and 44 of 54).
    """
    chosen = "GOMP_SPINCOUNT" in os.environ or "OMP_WAIT_POLICY" in os.environ
    if not chosen:
        os.environ["GOMP_SPINCOUNT"] = "5000"
    try:
        yield
    finally:
        if not chosen:
            del os.environ["GOMP_SPINCOUNT"]


class _Rank:
    """One process: ``run(server_args, port_args, ready_writer, rank)``, spawned."""

    def __init__(self, run: RunScheduler, server_args: ServerArgs, port_args: PortArgs, rank: int) -> None:
        several = server_args.tp_size > 1
        # What it is called in messages, and in its log lines.
        self.name = f"scheduler process TP{rank}" if several else "scheduler process"
        context = multiprocessing.get_context("spawn")
        self.ready, writer = context.Pipe(duplex=False)
        self.process = context.Process(
            target=_main,
            args=(run, server_args, port_args, writer, rank),
            name=f"sglang::scheduler_TP{rank}" if several else "sglang::scheduler",
            daemon=True,
        )
        self.process.start()
        # The child has the only writing end now, so its death ends the wait for readiness.
        writer.close()

    def report(self) -> dict[str, Any]:
        """What it says of itself when it serves.

        Raises:
            StartupError: it reported an error, or died.
        """
        try:
            report: dict[str, Any] = self.ready.recv()
        except EOFError:
            raise StartupError(f"The {self.end()} before it was ready.") from None
        if report.get("status") == "ready":
            return report
        error = StartupError(str(report.get("message")))
        error.exit_code = int(report.get("exit_code", 1))
        raise error

    def end(self) -> str:
        """The name of the process, which is ending, and how it ended."""
        self.process.join()
        code = self.process.exitcode
        how = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with exit status {code}"
        return f"{self.name} {how}"

    def kill(self) -> None:
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


class SchedulerProcesses:
    """The processes of all ranks, which live and die together; :meth:`stop` them in the end."""

    def __init__(self, run: RunScheduler, server_args: ServerArgs, port_args: PortArgs) -> None:
        with _spin_briefly():
            self._ranks = [_Rank(run, server_args, port_args, rank) for rank in range(server_args.tp_size)]

    async def ready(self) -> dict[str, Any]:
        """Wait until all ranks serve; what rank 0 reports of itself.

        Raises:
            StartupError: one reported an error, or died; all are ended then.
        """
        reports: dict[Connection, dict[str, Any]] = {}
        waiting = {rank.ready: rank for rank in self._ranks}
        try:
            while waiting:
                for ready in await _readable(*waiting):
                    reports[ready] = waiting.pop(ready).report()
        except StartupError:
            self._kill()
            raise
        return reports[self._ranks[0].ready]

    async def died(self) -> str:
        """Wait for the end of any rank; its name and how it ended. The others, which would wait for it, are ended."""
        ranks = {rank.process.sentinel: rank for rank in self._ranks}
        first, *_ = await _readable(*ranks)
        end = ranks[first].end()
        self._kill()
        return end

    def _kill(self) -> None:
        for rank in self._ranks:
            rank.kill()

    def stop(self, grace: float = 10.0) -> None:
        """End the processes, by force after ``grace`` seconds (or at once if 0)."""
        if grace > 0:
            # Rank 0 tells the others when it ends.
            first, *others = (rank.process for rank in self._ranks)
            first.terminate()
            first.join(grace)
            deadline = time.monotonic() + _OTHER_RANKS_GRACE
            for process in others:
                process.join(max(0.0, deadline - time.monotonic()))
        self._kill()
        for rank in self._ranks:
            rank.ready.close()


Waitable = TypeVar("Waitable", int, Connection)


async def _readable(*objects: Waitable) -> list[Waitable]:
    """Wait until at least one of these file descriptors or connections can be read; those that can."""
    loop = asyncio.get_running_loop()
    event = asyncio.Event()
    for each in objects:
        loop.add_reader(each, event.set)
    try:
        await event.wait()
    finally:
        for each in objects:
            loop.remove_reader(each)
            # uvloop makes what it watches non-blocking, and a long report would be read in part.
            os.set_blocking(each if isinstance(each, int) else each.fileno(), True)
    ready = multiprocessing.connection.wait(objects, timeout=0)
    return [each for each in objects if each in ready]
