"""The checks of benchmark/reliability, small, against a real server with the smallest model."""

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmark" / "reliability"))

import check_crowd
import check_odd
from servers import Server, Setup, running

MODEL = Path(__file__).parents[1] / "fixtures" / "tiny-llama-bf16"
SMALL = ("--max-total-tokens", "3000", "--max-running-requests", "8", "--chunked-prefill-size", "128")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Prompts come in chunks, the KV cache is full, requests queue."""
    with running(Setup(MODEL, "cpu", 0.0, 0), *SMALL) as one:
        yield one
        assert one.faults_in_log() == []
        assert one.terminate() == 0


def test_good_and_bad_clients_together(server: Server) -> None:
    answers, wrong = asyncio.run(check_crowd._crowd(server, good=20, bad=30, seed=3))
    assert wrong == [] and len(answers) == 20
    assert server.left_behind() == []


def test_names_used_again_and_clients_that_leave(server: Server) -> None:
    assert asyncio.run(check_odd._interleaved(server, rounds=4)) == []
    assert server.left_behind() == []


def test_raw_bytes(server: Server) -> None:
    assert check_odd._raw_bytes(server) == []
    assert server.left_behind() == []
