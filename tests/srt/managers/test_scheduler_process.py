"""The scheduler with a real model, in this process and as the process that the server starts."""

import json
import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq
from fake_model import FakeChannel

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.errors import StartupError
from sglang.srt.managers import scheduler_main
from sglang.srt.managers.io_struct import (
    BatchTokenIDOutput,
    ControlReply,
    GetInternalStateReq,
    PortArgs,
    TokenizedGenerateReqInput,
    decode_to_tokenizer,
    encode,
)
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_main import run_scheduler_process
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs

FIXTURES = Path(__file__).parents[2] / "fixtures"
ARGS = ServerArgs(
    model_path=str(FIXTURES / "tiny-llama-bf16"),
    device="cpu",
    dtype="float32",
    max_total_tokens=640,
    chunked_prefill_size=64,
    page_size=16,
    random_seed=1,
)
PROMPTS: list[list[int]] = list(json.loads((FIXTURES / "prompts.json").read_text()).values())


def request(rid: str, prompt: list[int], max_new_tokens: int, logprobs: bool = False) -> TokenizedGenerateReqInput:
    params = SamplingParams(max_new_tokens=max_new_tokens, temperature=0.0, ignore_eos=True)
    return TokenizedGenerateReqInput(
        rid=rid, input_ids=prompt, sampling_params=params, return_logprob=logprobs, top_logprobs_num=0
    )


def generate(scheduler: Scheduler, requests: list[TokenizedGenerateReqInput]) -> dict[str, dict[str, Any]]:
    channel = scheduler.channel
    assert isinstance(channel, FakeChannel)
    channel.inbox += requests
    while scheduler.step():
        pass
    results: dict[str, dict[str, Any]] = {r.rid: {"ids": [], "logprobs": [], "input": None} for r in requests}
    for message in channel.sent:
        assert isinstance(message, BatchTokenIDOutput)
        for out in message.outputs:
            result = results[out.rid]
            result["ids"] += out.output_ids
            result["logprobs"] += out.output_token_logprobs or []
            result["input"] = out.input_token_logprobs or result["input"]
    channel.sent.clear()
    return results


@pytest.fixture(scope="module")
def runner() -> Iterator[ModelRunner]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # threads that wait for each other on a loaded machine cost more than they bring
    yield ModelRunner(ARGS, ModelConfig.from_server_args(ARGS))
    torch.set_num_threads(threads)


def make(runner: ModelRunner, **changes: Any) -> Scheduler:
    return Scheduler(replace(ARGS, **changes), runner.model_config, runner, FakeChannel())


def test_batching_cache_and_chunks_do_not_change_a_real_model(runner: ModelRunner) -> None:
    prompts = [PROMPTS[i % 3][: 40 + 10 * i] for i in range(9)]
    plain = make(runner, chunked_prefill_size=-1, disable_radix_cache=True)
    alone = [generate(plain, [request("x", p, 12, logprobs=True)])["x"] for p in prompts]
    everything = make(runner, chunked_prefill_size=16)
    for _ in range(2):  # the second time with a filled prefix cache
        results = generate(everything, [request(str(i), p, 12, logprobs=True) for i, p in enumerate(prompts)])
        for i, want in enumerate(alone):
            got = results[str(i)]
            assert got["ids"] == want["ids"]
            for name in ("logprobs", "input"):
                values, expected = ([v or 0.0 for v, _ in r[name]] for r in (got, want))
                assert values == pytest.approx(expected, abs=1e-4)


def test_prompt_logprobs_of_a_real_model_are_those_of_the_reference(runner: ModelRunner) -> None:
    from safetensors.torch import load_file

    logits = load_file(FIXTURES / "expected.safetensors")["bf16.plain.prompt2"]
    prompt = PROMPTS[2]
    want = logits.log_softmax(-1)[torch.arange(len(prompt) - 1), torch.tensor(prompt[1:])]
    got = generate(make(runner), [request("x", prompt, 1, logprobs=True)])["x"]["input"]
    assert [token for _, token in got] == prompt and got[0][0] is None
    torch.testing.assert_close(torch.tensor([value for value, _ in got[1:]]), want, atol=1e-4, rtol=0)


class Parent:
    """The HTTP process's side of a spawned scheduler."""

    def __init__(self, args: ServerArgs) -> None:
        self.port_args = PortArgs.create()
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.pull, self.push = self.context.socket(zmq.PULL), self.context.socket(zmq.PUSH)
        self.pull.bind(self.port_args.tokenizer_ipc)
        self.push.connect(self.port_args.scheduler_input_ipc)
        spawn = multiprocessing.get_context("spawn")
        self.ready, writer = spawn.Pipe(duplex=False)
        self.process = spawn.Process(target=run_scheduler_process, args=(args, self.port_args, writer), daemon=True)
        self.process.start()
        writer.close()

    def recv(self) -> Any:
        assert self.pull.poll(60_000), "no answer from the scheduler"
        return decode_to_tokenizer(self.pull.recv())

    def close(self) -> None:
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.context.destroy(linger=0)
        self.port_args.remove()


@pytest.fixture
def parent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Parent]:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    parent = Parent(replace(ARGS, page_size=1))
    yield parent
    parent.close()


def test_the_process_serves_waits_without_work_and_drains_on_sigterm(parent: Parent) -> None:
    info = parent.ready.recv()
    assert info["status"] == "ready" and info["max_total_num_tokens"] == 640 and info["max_req_input_len"] == 639
    assert info["memory_usage"]["weight_bytes"] > 0 and "resolved" in info["fp4_gemm_backend"]
    parent.push.send(encode(request("a", PROMPTS[0], 4)))
    tokens = 0
    while tokens < 4:
        tokens += len(parent.recv().outputs[0].output_ids)

    def cpu_seconds() -> float:
        fields = Path(f"/proc/{parent.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    time.sleep(0.2)
    before = cpu_seconds()
    time.sleep(0.5)
    assert cpu_seconds() - before <= 0.05
    parent.push.send(encode(GetInternalStateReq(call_id="c")))
    reply = parent.recv()
    assert isinstance(reply, ControlReply) and reply.data["#running"] == 0

    assert parent.process.pid is not None
    os.kill(parent.process.pid, signal.SIGINT)  # for the parent to act on
    parent.push.send(encode(request("b", PROMPTS[1], 300)))
    first = parent.recv().outputs[0]
    os.kill(parent.process.pid, signal.SIGTERM)
    ids = list(first.output_ids)
    while first.finish_reason is None:
        first = parent.recv().outputs[0]
        ids += first.output_ids
    assert len(ids) == 300 and first.finish_reason == {"type": "length", "length": 300}
    parent.process.join(20)
    assert parent.process.exitcode == 0


# What happens to errors, without a process


class Writer:
    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []

    def send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)

    def close(self) -> None: ...


@pytest.fixture
def writer() -> Iterator[Writer]:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield Writer()
    for number, handler in handlers.items():
        signal.signal(number, handler)


def run(args: ServerArgs, writer: Any, tp_rank: int = 0) -> int:
    ports = PortArgs.create()
    try:
        with pytest.raises(SystemExit) as end:
            run_scheduler_process(args, ports, writer, tp_rank)
    finally:
        ports.remove()
    assert isinstance(end.value.code, int)
    return end.value.code


def test_a_start_up_error_is_reported_in_its_own_words(writer: Writer, tmp_path: Path) -> None:
    code = run(replace(ARGS, model_path=str(tmp_path), context_length=None), writer)
    (report,) = writer.sent
    assert code == report["exit_code"] == 1 and report["status"] == "error"
    assert "config.json" in report["message"] and not report["message"].startswith("CheckpointError")


def test_an_unexpected_start_up_error_is_logged(
    writer: Writer, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any) -> None:
        raise KeyError("surprise")

    monkeypatch.setattr(scheduler_main, "_make_scheduler", fail)
    assert run(ARGS, writer) == 1
    assert writer.sent == [{"status": "error", "message": "KeyError: 'surprise'", "exit_code": 1}]
    assert "Traceback" in capfd.readouterr().err


def test_ranks_share_the_cores_of_a_cpu(writer: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    def meet(*_: Any) -> None:
        raise StartupError(f"{torch.get_num_threads()} threads")

    monkeypatch.setattr(scheduler_main, "init_tensor_parallel", meet)
    before = torch.get_num_threads()
    try:
        for chosen in ("", "4"):
            monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
            if chosen:
                monkeypatch.setenv("OMP_NUM_THREADS", chosen)
            for ranks in (1, 2, 4):
                torch.set_num_threads(4)
                run(replace(ARGS, tp_size=ranks), writer)
    finally:
        torch.set_num_threads(before)
    assert [report["message"] for report in writer.sent] == [f"{n} threads" for n in (4, 2, 1, 4, 4, 4)]


def test_log_lines_name_the_rank_and_the_cause_has_a_start(
    writer: Writer, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any) -> None:
        logging.getLogger("sglang").info("an information")
        logging.getLogger("sglang").warning("a warning")
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(scheduler_main, "_make_scheduler", fail)
    monkeypatch.setattr(scheduler_main, "GRACE_FOR_THE_CAUSE", 0.3)
    began = time.monotonic()
    run(ARGS, writer)
    assert time.monotonic() - began < 0.3 and "TP" not in capfd.readouterr().err
    for rank, informed in ((0, True), (1, False)):
        began = time.monotonic()
        run(replace(ARGS, tp_size=2), writer, rank)
        assert time.monotonic() - began > 0.3
        text = capfd.readouterr().err
        assert f" TP{rank}] a warning" in text and f" TP{rank}] The scheduler could not start" in text
        assert ("an information" in text) == informed


def test_an_exception_in_the_loop_ends_the_process(
    runner: ModelRunner, writer: Writer, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    scheduler = make(runner)
    scheduler.pools.req_to_token_pool.alloc()  # a leak, noticed when idle
    closed: list[bool] = []

    class Closing(FakeChannel):
        def close(self) -> None:
            closed.append(True)

    monkeypatch.setattr(scheduler_main, "_make_scheduler", lambda *_: (scheduler, Closing()))
    assert run(ARGS, writer) == 1
    assert writer.sent[0]["status"] == "ready" and closed == [True]
    assert writer.sent[1]["traceback"].startswith("Traceback") and "KV cache leak" in writer.sent[1]["traceback"]
    assert "KV cache leak" in capfd.readouterr().err
