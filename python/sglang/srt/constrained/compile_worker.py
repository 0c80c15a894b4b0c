"""The process that tries grammars: what clients send is compiled first where it can be killed.

It has xgrammar imported and does nothing but fork. Every grammar is tried in a child of its own with bounds of time and
memory, so that one that never ends or crashes the compiler harms no other. The process imports torch, which xgrammar
needs, and runs no tensor operation: it has one thread, so its forks are safe.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import time
from collections import deque
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path

import msgspec

from sglang.srt.constrained.xgrammar_backend import GrammarCompiler, GrammarSource, Vocabulary

MAX_MEMORY_BYTES = 2 << 30
# What is accepted needs less: see MAX_COMPILE_SECONDS and MAX_MASK_SECONDS.
MAX_CPU_SECONDS = 4


class CompileJob(msgspec.Struct, frozen=True):
    """One grammar to try, within ``timeout`` seconds and with ``memory_bytes`` more than the process has."""

    number: int
    source: GrammarSource
    timeout: float
    memory_bytes: int = MAX_MEMORY_BYTES


class CompileResult(msgspec.Struct, frozen=True):
    """Why a grammar is refused; None if it is not. Number -1 is about the worker itself."""

    number: int
    error: str | None = None


@dataclass
class _Child:
    job: CompileJob
    pid: int
    deadline: float
    output: list[bytes] = field(default_factory=list)


def run_compile_worker(connection: Connection, vocabulary: Vocabulary, max_children: int) -> None:
    """Body of the process: says with number -1 whether it can work, then takes :class:`CompileJob` and answers with
    :class:`CompileResult` until the connection ends."""
    with contextlib.suppress(PermissionError):
        os.setsid()  # Ctrl-C in a terminal is for the HTTP process alone
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    error = None
    try:
        compiler = GrammarCompiler(vocabulary)
    except Exception as problem:  # whatever an import or a native library does
        error = f"xgrammar can't be used: {type(problem).__name__}: {problem}"
    connection.send_bytes(msgspec.msgpack.encode(CompileResult(-1, error)))
    if error is None:
        with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
            _serve(connection, compiler, max_children)


def _serve(connection: Connection, compiler: GrammarCompiler, max_children: int) -> None:
    waiting: deque[CompileJob] = deque()
    running: dict[int, _Child] = {}  # by the descriptor of what it writes
    try:
        while True:
            while waiting and len(running) < max_children:
                descriptor, child = _start(waiting.popleft(), compiler)
                running[descriptor] = child
            nearest = min((child.deadline for child in running.values()), default=None)
            timeout = None if nearest is None else max(0.0, nearest - time.monotonic())
            for ready in wait([connection, *running], timeout):
                if ready is connection:
                    waiting.append(msgspec.msgpack.decode(connection.recv_bytes(), type=CompileJob))
                    continue
                assert isinstance(ready, int)
                data = os.read(ready, 1 << 20)
                running[ready].output.append(data)
                if not data:
                    os.close(ready)
                    connection.send_bytes(msgspec.msgpack.encode(_end(running.pop(ready))))
            now = time.monotonic()
            for child in running.values():
                if child.deadline <= now:
                    os.kill(child.pid, signal.SIGKILL)
                    child.deadline = now + 3600  # its end comes through the pipe
    finally:
        for child in running.values():
            os.kill(child.pid, signal.SIGKILL)


def _start(job: CompileJob, compiler: GrammarCompiler) -> tuple[int, _Child]:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reader)
            _try_in_child(job, compiler, writer)
        finally:
            os._exit(1)
    os.close(writer)
    return reader, _Child(job, pid, time.monotonic() + job.timeout)


def _end(child: _Child) -> CompileResult:
    _, status = os.waitpid(child.pid, 0)
    if status == 0:
        return msgspec.msgpack.decode(b"".join(child.output), type=CompileResult)
    error = "it makes the compiler crash; simplify it"
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU:
        error = f"compiling it takes more than {MAX_CPU_SECONDS} s of computing time; simplify it"
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        error = f"compiling it takes longer than {child.job.timeout:g} s; simplify it"
    return CompileResult(child.job.number, error)


def _try_in_child(job: CompileJob, compiler: GrammarCompiler, writer: int) -> None:
    """Try the grammar, write the result to ``writer`` and end the process."""
    os.nice(10)  # the model's steps come first
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # xgrammar's warnings are no log lines of ours
    used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + job.memory_bytes,) * 2)
    resource.setrlimit(resource.RLIMIT_CPU, (MAX_CPU_SECONDS, MAX_CPU_SECONDS + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    error = None
    try:
        compiler.check(job.source)
    except (MemoryError, RecursionError):
        error = _TOO_MUCH_MEMORY
    except Exception as problem:
        error = _reason(problem)
    with open(writer, "wb") as out:
        out.write(msgspec.msgpack.encode(CompileResult(job.number, error)))
    os._exit(0)


_TOO_MUCH_MEMORY = "compiling it takes too much memory; simplify it"
_XGRAMMAR_PREFIX = re.compile(r"^\[[\d:]+\] \S+:\d+: (?:Check failed: \(.*?\) is false: )?")


def _reason(error: Exception) -> str:
    text = _XGRAMMAR_PREFIX.sub("", str(error)).strip() or type(error).__name__
    if "bad_alloc" in text:
        return _TOO_MUCH_MEMORY
    return text if len(text) <= 500 else f"{text[:500]}..."
