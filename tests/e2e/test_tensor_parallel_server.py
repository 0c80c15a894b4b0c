"""``--tp-size 2``: real servers and an engine with one process per rank."""

import json
import os
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from launched_server import FIXTURES, run_to_exit
from test_fixture_logprobs import check_prompts
from two_ranks import DEVICES, GPUS, NEEDS_GPU, rank_processes, two_ranks

from sglang import Engine
from sglang.srt.managers.request_state import ServiceError

MODEL = FIXTURES / "tiny-llama-modelopt-nvfp4"
WEIGHT_ONLY = FIXTURES / "tiny-llama-modelopt-w4a16"
ARGUMENTS = ("--dtype", "float32", "--max-total-tokens", "2048", "--random-seed", "1")
PROMPTS: list[list[int]] = list(json.loads((FIXTURES / "prompts.json").read_text()).values())[:2]
GREEDY = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
LONG = {"temperature": 0, "max_new_tokens": 1900, "ignore_eos": True}


@pytest.mark.parametrize("device", DEVICES)
def test_two_ranks_answer_what_one_answers(tmp_path: Path, device: str) -> None:
    with two_ranks(MODEL, tmp_path, device, *ARGUMENTS) as (server, processes):
        assert len(processes) == 2
        info = server.get("/get_server_info").json()
        assert info["tp_size"] == 2 and info["max_total_num_tokens"] == 2048
        ask = {"input_ids": PROMPTS, "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}
        greedy = server.post("/generate", **ask, sampling_params=GREEDY).json()
        drawn = server.post("/generate", input_ids=PROMPTS, sampling_params={**GREEDY, "temperature": 1.0}).json()
        assert all(len(reply["output_ids"]) == 8 for reply in drawn)
        # Abort one of several, flush, ask again: all ranks do it in the same step.
        with httpx.stream(
            "POST", server.url + "/generate", json={"input_ids": [5, 6], "sampling_params": LONG, "stream": True}
        ) as stream:
            lines = stream.iter_lines()  # whose end closes the response
            next(lines)
            assert server.post("/generate", **ask, sampling_params=GREEDY).json()[0]["output_ids"]
        wait_until(lambda: server.get("/server_info").json()["internal_states"][0]["#running"] == 0)
        assert server.post("/flush_cache").status_code == 200
        assert [r["output_ids"] for r in server.post("/generate", **ask, sampling_params=GREEDY).json()] == [
            r["output_ids"] for r in greedy
        ]
        # New weights on all ranks or on none.
        assert server.post("/update_weights_from_disk", model_path=str(FIXTURES / "nowhere")).status_code == 400
        assert server.post("/update_weights_from_disk", model_path=str(WEIGHT_ONLY)).json()["success"]
        other = server.post("/generate", **ask, sampling_params=GREEDY).json()
        assert other[0]["meta_info"]["input_token_logprobs"] != greedy[0]["meta_info"]["input_token_logprobs"]
        before = [cpu_seconds(process) for process in processes]
        time.sleep(0.5)
        assert all(cpu_seconds(process) - old <= 0.05 for process, old in zip(processes, before, strict=True))
    assert " TP0] KV Cache is allocated" in server.log and "TP1] KV Cache" not in server.log
    assert "Traceback" not in server.log
    wait_until(lambda: not any(process.is_running() for process in processes))

    with Engine(model_path=str(MODEL), device=device, dtype="float32", max_total_tokens=2048) as one:
        expected = one.generate(**ask, sampling_params=GREEDY)
    for got, want in zip(greedy, expected, strict=True):
        assert got["output_ids"] == want["output_ids"]
        for key in ("input_token_logprobs", "output_token_logprobs"):
            values, references = (
                [entry[0] for entry in reply["meta_info"][key] if entry[0] is not None] for reply in (got, want)
            )
            assert values == pytest.approx(references, abs=1e-4)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=NEEDS_GPU)])
def test_collectives_in_graphs(tmp_path: Path, device: str) -> None:
    """16 bits, w4a16, prompts and decode steps replayed: what one rank answers, in the bounds of the CPU's tests."""
    arguments = ("--dtype", "bfloat16", "--max-total-tokens", "4096", "--cuda-graph-max-bs", "4")
    ask = {"input_ids": PROMPTS, "return_logprob": True, "sampling_params": {**GREEDY, "max_new_tokens": 16}}
    with two_ranks(MODEL, tmp_path, device, *arguments) as (server, _):
        check_prompts(server, "modelopt-nvfp4.w4a16", "bfloat16", (0, 1, 2))
        replies = [server.post("/generate", **ask).json() for _ in range(2)]
        assert "FP4 GEMM backend: w4a16 (requested: auto)" in server.log
        assert server.log.count("Capture") >= 2 and "not recorded" not in server.log
    with Engine(model_path=str(MODEL), device=device, dtype="bfloat16", max_total_tokens=4096) as one:
        expected = one.generate(**ask)
    for reply in replies:
        for got, want in zip(reply, expected, strict=True):
            assert got["output_ids"] == want["output_ids"]
            values, references = (
                [entry[0] for entry in each["meta_info"]["output_token_logprobs"]] for each in (got, want)
            )
            assert values == pytest.approx(references, abs=0.05)


def cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def wait_until(condition: Any, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("device", DEVICES)
def test_a_killed_rank_ends_the_server(tmp_path: Path, device: str) -> None:
    with two_ranks(MODEL, tmp_path, device, *ARGUMENTS) as (server, processes):
        answers: list[httpx.Response] = []
        thread = threading.Thread(
            target=lambda: answers.append(server.post("/generate", input_ids=[5, 6], sampling_params=LONG))
        )
        thread.start()
        wait_until(lambda: "Decode batch" in server.log)
        began = time.monotonic()
        processes[1].kill()
        assert server.process.wait(20) == 1
        thread.join(10)
        assert time.monotonic() - began < 10
        assert answers[0].status_code == 500 and "scheduler process TP1 was killed by signal 9" in answers[0].text
        assert "The scheduler process TP1 was killed by signal 9." in server.log
        assert "Traceback" not in server.log
        wait_until(lambda: not any(process.is_running() for process in processes))


@pytest.mark.parametrize("device", DEVICES)
def test_engine(capfd: pytest.CaptureFixture[str], device: str) -> None:
    if device == "cuda" and GPUS < 2:
        pytest.skip("needs two GPUs")
    engine = Engine(model_path=str(MODEL), device=device, tp_size=2, max_total_tokens=2048)
    processes = rank_processes(os.getpid())[-2:]
    assert len(engine.generate(input_ids=[5, 6, 7], sampling_params=GREEDY)["output_ids"]) == 8
    stream = engine.generate(input_ids=[5, 6, 7], sampling_params=LONG, stream=True)
    next(stream)
    os.kill(processes[0].pid, signal.SIGKILL)
    with pytest.raises(ServiceError, match="TP0 was killed by signal 9"):
        list(stream)
    engine.shutdown()
    assert not any(process.is_running() for process in processes)
    assert "Traceback" not in capfd.readouterr().err


def test_an_error_of_several_ranks_is_told_once(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(MODEL, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 528}))
    result = run_to_exit(folder, "--tp-size", "2")
    text = result.stdout + result.stderr
    assert result.returncode == 1 and "Traceback" not in text
    assert (
        text.count("layer model.layers.0.mlp.down_proj: NVFP4 needs K to be a multiple of 16, it is 264 per rank") == 1
    )
    assert "use a smaller --tp-size" in text
