"""``/update_weights_from_disk`` of a real server: afterwards it is one that was started with the new checkpoint, or, if
that is broken, the one it was."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from launched_server import FIXTURES, Server, launched
from safetensors.torch import load_file

from second_checkpoint import BROKEN, NVFP4, copy_with, make_second_checkpoint

EXPECTED = load_file(FIXTURES / "expected.safetensors")
PROMPT = EXPECTED["prompt1"].tolist()


@pytest.fixture(scope="module")
def second(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_second_checkpoint(tmp_path_factory.mktemp("second"))


@pytest.fixture(scope="module")
def server(second: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with launched(second, tmp_path_factory.mktemp("server"), "--dtype", "float32") as server:
        yield server


@pytest.fixture(scope="module")
def fresh(server: Server) -> list[Any]:
    """What the server gave before its first update."""
    return outputs(server)


def outputs(server: Server) -> list[Any]:
    """What a prompt gives, to the last bit."""
    params = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
    reply: Any = server.generate(
        input_ids=PROMPT, sampling_params=params, return_logprob=True, logprob_start_len=0, top_logprobs_num=3
    )
    meta = reply["meta_info"]
    names = ("input_token_logprobs", "input_top_logprobs", "output_token_logprobs", "output_top_logprobs")
    return [reply["output_ids"], *(meta[name] for name in names)]


def assert_of_the_fixture(found: list[Any]) -> None:
    """``found`` is what was computed in float64 from the fixture's bytes."""
    log_probs = torch.log_softmax(EXPECTED["modelopt-nvfp4.w4a4.prompt1"].double(), dim=-1)
    wanted = log_probs[:-1].gather(1, torch.tensor(PROMPT)[1:, None])[:, 0]
    got = torch.tensor([pair[0] for pair in found[1][1:]], dtype=torch.float64)
    assert (got - wanted).abs().max() < 1e-3
    assert found[0][0] == int(log_probs[-1].argmax())


def cached_tokens(server: Server) -> int:
    reply: Any = server.generate(input_ids=PROMPT, sampling_params={"temperature": 0, "max_new_tokens": 1})
    return int(reply["meta_info"]["cached_tokens"])


def update(server: Server, folder: Path, **fields: Any) -> httpx.Response:
    return server.post("/update_weights_from_disk", model_path=str(folder), **fields)


def test_back_and_forth(server: Server, second: Path, fresh: list[Any]) -> None:
    firsts: list[Any] = []
    for folder in (NVFP4, NVFP4, second, second, NVFP4, second):
        assert cached_tokens(server) > 0
        reply = update(server, folder, weight_version=folder.name)
        assert reply.status_code == 200
        message = f"Succeeded to update model weights. Weight version updated to {folder.name}."
        assert reply.json() == {"success": True, "message": message, "num_paused_requests": 0}
        if folder == second:
            assert outputs(server) == fresh
        else:
            firsts.append(outputs(server))
        info = server.get("/get_model_info").json()
        assert (info["model_path"], info["weight_version"]) == (str(folder), folder.name)
    assert_of_the_fixture(firsts[0])
    assert firsts[0] == firsts[1] == firsts[2] != fresh


def test_a_broken_checkpoint_leaves_the_old_one_serving(server: Server, fresh: list[Any], tmp_path: Path) -> None:
    info = server.get("/get_model_info").json()
    cached = cached_tokens(server)
    for reason, (how, words) in BROKEN.items():
        reply = update(server, copy_with(NVFP4, tmp_path / reason, **how), weight_version="broken")
        assert reply.status_code == 400, reason
        assert reply.json()["success"] is False and words in reply.json()["message"], reason
        assert words in server.log, reason
    assert server.get("/get_model_info").json() == info
    assert cached_tokens(server) == cached, "the prefix cache is still right, and still there"
    assert server.post("/flush_cache").status_code == 200
    assert outputs(server) == fresh


def test_while_requests_run(server: Server, second: Path, fresh: list[Any]) -> None:
    """A running request ends with the weights that it began with, or at once; the next one has the new ones."""

    def start(tokens: int) -> Future[Any]:
        params = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        future = threads.submit(server.generate, input_ids=PROMPT, sampling_params=params)
        while server.get("/get_server_info").json()["internal_states"][0]["#running"] == 0:
            assert not future.done()
        return future

    with ThreadPoolExecutor(1) as threads:
        alone = start(1200).result()
        running = start(1200)
        assert update(server, NVFP4).status_code == 200
        assert running.result()["output_ids"] == alone["output_ids"]
        assert_of_the_fixture(outputs(server))
        running = start(1500)
        assert update(server, second, abort_all_requests=True).status_code == 200
        assert running.result()["meta_info"]["finish_reason"]["type"] == "abort"
        assert outputs(server) == fresh
