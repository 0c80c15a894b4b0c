"""Grammars tried in the process that may be killed, and what is sent to the scheduler."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import uvloop
from byte_vocabulary import EOS, OTHER_EOS, VOCABULARY

from sglang.srt.constrained import compile_worker, grammar_manager
from sglang.srt.constrained.compile_worker import CompileJob
from sglang.srt.constrained.grammar_backend import GrammarBackend
from sglang.srt.constrained.grammar_manager import Grammar, GrammarManager
from sglang.srt.constrained.xgrammar_backend import GrammarCompiler, GrammarSource
from sglang.srt.errors import RequestError
from sglang.srt.managers.io_struct import LoadGrammarReq, LoadVocabularyReq
from sglang.srt.managers.request_state import ServiceError
from sglang.srt.sampling.sampling_params import SamplingParams

T = TypeVar("T")
# Takes xgrammar 20 s: it is quadratic in the number of properties.
ENDLESS = json.dumps({"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(20_000)}})
DECODER: Any = SimpleNamespace(pieces=VOCABULARY.tokens, special_ids=frozenset(VOCABULARY.special_token_ids))


def new_manager() -> GrammarManager:
    return GrammarManager(DECODER, len(VOCABULARY.tokens), {OTHER_EOS, EOS, 10**6})


@pytest.fixture(scope="module")
def run() -> Iterator[Callable[[Coroutine[Any, Any, T]], T]]:
    loop = asyncio.new_event_loop()
    yield loop.run_until_complete
    loop.close()


@pytest.fixture(scope="module")
def manager(run: Any) -> Iterator[GrammarManager]:
    manager = new_manager()
    yield manager

    async def close() -> None:
        manager.close()

    run(close())


def prepare(run: Any, manager: GrammarManager, **params: Any) -> Grammar:
    grammar = run(manager.prepare(SamplingParams(**params)))
    assert isinstance(grammar, Grammar)
    return grammar


def test_nothing_is_started_for_a_request_without_grammar(run: Any) -> None:
    manager = new_manager()
    assert run(manager.prepare(SamplingParams())) is None
    assert manager._worker is None


def test_the_scheduler_gets_everything_once_and_forgets_the_oldest(
    run: Any, manager: GrammarManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_manager, "MAX_GRAMMARS", 2)
    backend = GrammarBackend()

    def send(grammar: Grammar) -> list[type]:
        messages = manager.messages(grammar)
        for message in messages:
            if isinstance(message, LoadVocabularyReq):
                backend.load_vocabulary(message)
            else:
                assert isinstance(message, LoadGrammarReq)
                backend.load(message)
        assert backend.start(grammar.number, SamplingParams()) is not None
        return [type(message) for message in messages]

    first = prepare(run, manager, regex="a")
    assert send(first) == [LoadVocabularyReq, LoadGrammarReq]
    assert prepare(run, manager, regex="a") is first and send(first) == []
    hidden = prepare(run, manager, json_schema="{}")
    assert send(hidden) == [LoadGrammarReq]
    assert send(first) == []  # now the latest
    shown = prepare(run, manager, json_schema="{}", skip_special_tokens=False)
    assert send(shown) == [LoadGrammarReq]
    assert backend.start(hidden.number, SamplingParams()) is None, "forgotten"
    assert send(first) == []
    assert send(hidden) == [LoadGrammarReq], "a request that was still holding it"
    assert backend.start(shown.number, SamplingParams()) is None


def test_grammars_are_tried_at_once_and_each_only_once(run: Any, manager: GrammarManager) -> None:
    async def several() -> list[Any]:
        params = [SamplingParams(regex="b" * (1 + i % 3)) for i in range(9)]
        waiting = [asyncio.ensure_future(manager.prepare(each)) for each in params]
        await asyncio.sleep(0)
        assert len(manager._trying) == 3
        waiting[0].cancel()  # its client is gone; the others still want it
        return await asyncio.gather(*waiting, return_exceptions=True)

    gone, *others = run(several())
    assert isinstance(gone, asyncio.CancelledError)
    assert len({id(each) for each in others}) == 3 and not manager._trying


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"regex": "(a"}, "Invalid regex: Regex parsing error at position 3: The parenthesis is not closed."),
        ({"json_schema": '{"type":'}, "Invalid json_schema: Failed to parse JSON: syntax error"),
        ({"json_schema": '{"type": "integer", "multipleOf": 3}'}, "Invalid json_schema: JSON Schema at #: multipleOf"),
        ({"json_schema": "[" * 100_000}, "Invalid json_schema: "),
        ({"regex": "(" * 100_000 + ")" * 100_000}, "Invalid regex: "),
        ({"regex": "a" * (1 << 21)}, "regex has 2097152 characters, 1048576 are accepted."),
        ({"ebnf": "root ::= root"}, "Invalid ebnf: "),
        ({"structural_tag": "3"}, "Invalid structural_tag: "),
    ],
)
def test_what_can_not_be_compiled(run: Any, manager: GrammarManager, params: dict[str, str], words: str) -> None:
    with pytest.raises(RequestError) as error:
        prepare(run, manager, **params)
    assert str(error.value).startswith(words) and len(str(error.value)) < 700
    assert error.value.param == next(iter(params))


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that have the imports behind them, and a grammar that never ends: the regex "endless"."""
    context = multiprocessing.get_context("fork")
    monkeypatch.setattr(grammar_manager.multiprocessing, "get_context", lambda method: context)
    check = GrammarCompiler.check

    def check_or_spin(compiler: GrammarCompiler, source: GrammarSource) -> None:
        while source.text == "endless":
            pass
        check(compiler, source)

    monkeypatch.setattr(GrammarCompiler, "check", check_or_spin)


def test_one_that_takes_too_long_is_killed_and_holds_up_no_other(
    run: Any, forked: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_GRAMMAR_TIMEOUT", "2.5")
    manager = new_manager()
    prepare(run, manager, regex="warm")

    async def both() -> Any:
        slow = asyncio.ensure_future(manager.prepare(SamplingParams(regex="endless")))
        await asyncio.sleep(0.05)
        await manager.prepare(SamplingParams(regex="quick"))
        assert not slow.done()
        return (await asyncio.gather(slow, return_exceptions=True))[0]

    error = run(both())
    assert isinstance(error, RequestError)
    assert str(error) == "Invalid regex: compiling it takes longer than 2.5 s; simplify it"
    manager.close()


def test_too_many_at_once(run: Any, manager: GrammarManager, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(run, manager, regex="warm")
    monkeypatch.setattr(grammar_manager, "MAX_TRYING", 2)

    async def three() -> Any:
        params = [SamplingParams(regex=f"too many {i}") for i in range(3)]
        return await asyncio.gather(*map(manager.prepare, params), return_exceptions=True)

    first, second, third = run(three())
    assert isinstance(first, Grammar) and isinstance(second, Grammar)
    assert isinstance(third, ServiceError) and third.status == 503 and "try again later" in str(third)
    assert not manager._trying

    monkeypatch.setattr(grammar_manager, "_PATIENCE", 0)
    with pytest.raises(ServiceError, match="regex: too many grammars are being compiled"):
        prepare(run, manager, regex="impatient")
    (task,) = manager._trying.values()  # it is tried all the same
    run(task)
    assert prepare(run, manager, regex="impatient") is not None


def test_computing_time_is_bounded(run: Any, forked: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_GRAMMAR_TIMEOUT", "60")
    monkeypatch.setattr(compile_worker, "MAX_CPU_SECONDS", 1)
    manager = new_manager()
    with pytest.raises(RequestError, match="compiling it takes more than 1 s of computing time"):
        prepare(run, manager, regex="endless")
    manager.close()


def test_a_long_grammar_in_the_event_loop_of_the_server(forked: None) -> None:
    """It is longer than the buffer of the socket to the process, which is slow to read it."""
    loop = uvloop.new_event_loop()
    manager = new_manager()
    prepare(loop.run_until_complete, manager, regex="warm")
    assert manager._worker is not None and manager._worker._process.pid is not None
    os.kill(manager._worker._process.pid, signal.SIGSTOP)
    threading.Timer(0.3, os.kill, (manager._worker._process.pid, signal.SIGCONT)).start()
    prepare(loop.run_until_complete, manager, ebnf='root ::= "a" #' + "x" * 1_000_000)
    manager.close()
    loop.close()


def test_memory_is_bounded(run: Any, manager: GrammarManager) -> None:
    prepare(run, manager, regex="warm")
    worker = manager._worker
    assert worker is not None
    schema = '{"enum": [' + ",".join(f'"value number {i}"' for i in range(5000)) + "]}"

    async def job(memory_bytes: int) -> str | None:
        answer = worker.submit(GrammarSource("json_schema", schema), 60.0, memory_bytes)
        return await answer

    assert run(job(1 << 20)) == "compiling it takes too much memory; simplify it"


def test_the_process_is_replaced_when_it_dies(run: Any, forked: None) -> None:
    manager = new_manager()
    prepare(run, manager, regex="warm")
    worker = manager._worker
    assert worker is not None and worker._process.pid is not None

    async def die() -> Any:
        waiting = asyncio.ensure_future(manager.prepare(SamplingParams(regex="c" * 40_000)))
        await asyncio.sleep(0)
        os.kill(worker._process.pid, signal.SIGKILL)
        return (await asyncio.gather(waiting, return_exceptions=True))[0]

    error = run(die())
    assert isinstance(error, ServiceError) and error.status == 500
    assert str(error) == "regex: the process that compiles grammars ended; try again."
    assert prepare(run, manager, regex="again").number and manager._worker is not worker
    assert prepare(run, manager, regex="warm").number == 1, "what was tried stays tried"

    async def close() -> None:
        manager.close()

    run(close())
    assert manager._worker is not None and not manager._worker._process.is_alive()


def test_no_xgrammar(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_manager.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RequestError, match="^regex can't be served: the package xgrammar is not installed.$"):
        prepare(run, new_manager(), regex="a")


def test_an_xgrammar_that_can_not_be_imported(run: Any, forked: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_manager.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    manager = new_manager()
    for _ in range(2):  # the second time nothing is started
        with pytest.raises(RequestError, match="^regex can't be served: xgrammar can't be used: ModuleNotFoundError"):
            prepare(run, manager, regex="a")
        monkeypatch.setattr(grammar_manager, "_Worker", None)


def test_a_model_without_an_end(run: Any) -> None:
    manager = GrammarManager(DECODER, len(VOCABULARY.tokens), ())
    with pytest.raises(RequestError, match="^regex needs a model with an end-of-sequence token, and this one has none"):
        prepare(run, manager, regex="a")


def test_a_crash_of_the_compiler_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.constrained import compile_worker

    def crash(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGUSR1)

    monkeypatch.setattr(compile_worker, "_try_in_child", crash)
    compiler: Any = None
    descriptor, child = compile_worker._start(CompileJob(7, GrammarSource("regex", "a"), 5.0), compiler)
    assert os.read(descriptor, 100) == b""
    os.close(descriptor)
    assert compile_worker._end(child).error == "it makes the compiler crash; simplify it"
