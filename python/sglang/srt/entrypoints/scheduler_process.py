"""The scheduler as child processes, one per tensor-parallel rank of this node: start, readiness, death, end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import multiprocessing.connection
import os
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from sglang.srt.entrypoints.nodes import End, Nodes
from sglang.srt.errors import StartupError
from sglang.srt.managers.io_struct import PortArgs
from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

T = TypeVar("T")

# The last argument is the tensor-parallel rank.
RunScheduler = Callable[[ServerArgs, PortArgs, Connection, int], None]

# Seconds that the other ranks get to end by themselves once rank 0 has ended, on its node and on another.
_OTHER_RANKS_GRACE = 0.5
_OTHER_NODES_GRACE = 10.0


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

    def traceback(self) -> str:
        """Of the process, which has ended, if it could still tell."""
        try:
            return str(self.ready.recv().get("traceback", "")) if self.ready.poll() else ""
        except EOFError:
            return ""

    def kill(self) -> None:
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


class SchedulerProcesses:
    """The processes of this node's ranks. They, and those of the other ``nodes``, live and die together; :meth:`stop`
    them in the end."""

    def __init__(
        self, run: RunScheduler, server_args: ServerArgs, port_args: PortArgs, nodes: Nodes | None = None
    ) -> None:
        self._nodes = nodes
        self._is_first_node = server_args.node_rank == 0
        first = server_args.node_rank * server_args.ranks_per_node
        with _spin_briefly():
            self._ranks = [
                _Rank(run, server_args, port_args, rank) for rank in range(first, first + server_args.ranks_per_node)
            ]

    async def ready(self) -> dict[str, Any]:
        """Wait until this node's ranks serve; what the first of them reports of itself.

        Raises:
            StartupError: one reported an error, or died, or another node ended; all are ended then.
        """
        try:
            report = await self._unless_another_node_ends(self._reports())
            if isinstance(report, End):
                raise StartupError(report.error or "Node 0 has ended.")
        except StartupError as error:
            self._tell_end(str(error))
            self._kill()
            raise
        return report

    async def _reports(self) -> dict[str, Any]:
        reports: dict[Connection, dict[str, Any]] = {}
        waiting = {rank.ready: rank for rank in self._ranks}
        while waiting:
            for ready in await _readable(*waiting):
                reports[ready] = waiting.pop(ready).report()
        return reports[self._ranks[0].ready]

    async def died(self) -> str:
        """Wait for the end of any rank of any node; a sentence that says which and how. The others, which would wait
        for it, are ended. Empty if the end is as asked, which only other nodes than the first see."""
        first = await self._unless_another_node_ends(self._first_to_end())
        if isinstance(first, End):
            message = first.error
            if not message:  # rank 0 has told ours
                await asyncio.to_thread(self._join, _OTHER_NODES_GRACE)
            elif first.traceback:
                logger.error("Of another node:\n%s", first.traceback)
        elif first.process.exitcode == 0 and not self._is_first_node:
            return ""
        else:
            message = f"The {first.end()}."
            self._tell_end(message, first.traceback())
        self._kill()
        return message

    async def _first_to_end(self) -> _Rank:
        ranks = {rank.process.sentinel: rank for rank in self._ranks}
        first, *_ = await _readable(*ranks)
        ranks[first].process.join()
        return ranks[first]

    async def _unless_another_node_ends(self, work: Coroutine[Any, Any, T]) -> T | End:
        """The result of ``work``, or another node's end if that is first."""
        task = asyncio.ensure_future(work)
        futures: set[asyncio.Future[Any]] = {task} if self._nodes is None else {task, self._nodes.ended}
        try:
            await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
            if task.done() or self._nodes is None:
                return task.result()
            return self._nodes.ended.result()
        finally:
            task.cancel()

    def _tell_end(self, error: str = "", traceback: str = "") -> None:
        if self._nodes is not None and not self._nodes.ended.done():
            self._nodes.tell_end(error, traceback)

    def _join(self, grace: float) -> None:
        deadline = time.monotonic() + grace
        for rank in self._ranks:
            rank.process.join(max(0.0, deadline - time.monotonic()))

    def _kill(self) -> None:
        for rank in self._ranks:
            rank.kill()

    def stop(self, grace: float = 10.0) -> None:
        """End the processes, by force after ``grace`` seconds (or at once if 0), and those of the other nodes."""
        self._tell_end()
        if grace > 0 and self._is_first_node:
            # Rank 0 tells the others when it ends.
            first = self._ranks[0].process
            first.terminate()
            first.join(grace)
            self._join(_OTHER_RANKS_GRACE)
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
