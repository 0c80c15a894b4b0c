"""``--nnodes 2`` for real: two servers on one machine, each with half of the ranks."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import httpx
import psutil
import pytest
from launched_server import FIXTURES
from two_ranks import DEVICES, GPUS, rank_processes, two_nodes

from sglang import Engine

MODEL = FIXTURES / "tiny-llama-modelopt-nvfp4"
ARGUMENTS = ("--dtype", "float32", "--max-total-tokens", "2048", "--dist-timeout", "120")
PROMPTS: list[list[int]] = list(json.loads((FIXTURES / "prompts.json").read_text()).values())[:2]
GREEDY = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}


def listening_addresses(parent: int) -> set[str]:
    """Where the processes at and below ``parent`` listen."""
    processes = [psutil.Process(parent), *psutil.Process(parent).children(recursive=True)]
    return {
        connection.laddr.ip
        for process in processes
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }


@pytest.mark.parametrize("device", DEVICES)
def test_two_nodes_answer_what_one_rank_answers(tmp_path: Path, device: str) -> None:
    ask = {"input_ids": PROMPTS, "return_logprob": True, "logprob_start_len": 0, "sampling_params": GREEDY}
    ranks = 4 if device == "cpu" or GPUS >= 4 else 2
    with two_nodes(MODEL, tmp_path, device, ranks, *ARGUMENTS) as (first, other):
        replies = first.post("/generate", **ask).json()
        info = first.get("/server_info").json()
        assert (info["tp_size"], info["nnodes"], info["node_rank"]) == (ranks, 2, 0)
        assert other.get("/health").status_code == 200
        refused = other.get("/v1/models")
        assert refused.status_code == 404 and refused.text == "This is node 1 of 2; node 0 answers requests.\n"
        for server in (first, other):
            assert listening_addresses(server.process.pid) <= {"127.0.0.1", "::1"}
        # A node that is asked to end asks node 0, which lets running requests finish.
        long = {"temperature": 0, "max_new_tokens": 400, "ignore_eos": True}
        stream_request = {"input_ids": [5, 6], "sampling_params": long, "stream": True}
        with httpx.stream("POST", first.url + "/generate", json=stream_request, timeout=120) as stream:
            lines = stream.iter_lines()
            next(lines)
            other.process.send_signal(signal.SIGTERM)
            events = [line for line in lines if line]
        assert events[-1] == "data: [DONE]" and '"completion_tokens":400' in events[-2]
        assert (first.process.wait(60), other.process.wait(60)) == (0, 0)
        assert "Traceback" not in first.log + other.log

    with Engine(model_path=str(MODEL), device=device, dtype="float32", max_total_tokens=2048) as one:
        expected = one.generate(**ask)
    for got, want in zip(replies, expected, strict=True):
        assert got["output_ids"] == want["output_ids"]
        for key in ("input_token_logprobs", "output_token_logprobs"):
            values, references = (
                [entry[0] for entry in reply["meta_info"][key] if entry[0] is not None] for reply in (got, want)
            )
            assert values == pytest.approx(references, abs=1e-4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("node", [0, 1])
def test_a_killed_rank_of_either_node_ends_both(tmp_path: Path, node: int, device: str) -> None:
    ranks = 2
    with two_nodes(MODEL, tmp_path, device, ranks, *ARGUMENTS) as servers:
        processes = rank_processes(servers[node].process.pid)
        processes[-1].kill()
        assert [server.process.wait(20) for server in servers] == [1, 1]
        rank = (node + 1) * ranks // 2 - 1
        words = f"The scheduler process TP{rank} was killed by signal 9."
        assert all(words in server.log and "Traceback" not in server.log for server in servers)
        assert f"node {node}: {words}" in servers[1 - node].log
        psutil.wait_procs(processes, timeout=10)
        assert not any(process.is_running() for process in processes)
