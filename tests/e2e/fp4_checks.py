"""What a server with a named FP4 GEMM backend is measured by, over ``/generate``."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from launched_server import FIXTURES, Server, launched
from safetensors.torch import load_file, save_file

from sglang.demo_model import make_demo_model
from sglang.srt.errors import ArgumentError
from sglang.srt.layers.quantization.fp4_utils import (
    Fp4GemmRunnerBackend,
    Target,
    backends,
    normalize_backend_name,
)
from sglang.srt.platforms import resolve_device
from sglang.test.few_shot_gsm8k import run_eval

ANCHORS = json.loads((FIXTURES / "smollm2_anchors.json").read_text())
ITEMS = [json.loads(line) for line in (FIXTURES / "multiple_choice.jsonl").read_text().splitlines()]
EXPECTED = load_file(FIXTURES / "expected.safetensors")


def _marked(member: Fp4GemmRunnerBackend) -> object:
    marks = [pytest.mark.blackwell] if member.is_flashinfer() else []
    marks += [pytest.mark.cuda] if member is Fp4GemmRunnerBackend.W4A16 else []
    return pytest.param(member.value, marks=marks)


BACKENDS = [_marked(member) for member in Fp4GemmRunnerBackend if member.value not in ("auto", "external")]
# Those that a large model is worth trying with: quick enough.
ON_GPU = [pytest.param("auto", marks=pytest.mark.blackwell), *(case for case in BACKENDS if case.marks)]
# What every server gets: a KV cache that leaves room for others.
SMALL_CACHE = ("--max-total-tokens", "8192")


def skip_unless_it_runs(backend: str, weight_only: bool) -> None:
    """Skip with the registry's own reason. ``auto`` always runs."""
    if backend == "auto":
        return
    try:
        name = normalize_backend_name(backend)
    except ArgumentError as error:  # reserved for a later version
        pytest.skip(str(error))
    reason = backends()[name].unsupported_reason(replace(Target.current(resolve_device()), weight_only=weight_only))
    if reason is not None:
        pytest.skip(f"{backend}: {reason}")


def served(
    model: str | Path, folder: Path, *arguments: str, env: Mapping[str, str] | None = None
) -> AbstractContextManager[Server]:
    """The server on this machine's device, ready; afterwards it must end with status 0 on SIGTERM."""
    return launched(model, folder, "--device", resolve_device().type, *arguments, **(env or {}))


@dataclass(frozen=True)
class Scheme:
    """A checkpoint of the demo model, and what correct backends get with it.

    Attributes:
        nll, tolerance: mean negative log-likelihood of the anchor's text, by other code, and the largest relative
            difference. Weight-only: a scale that is 2 % off makes 0.6 %, 16-bit rounding 0.02 %. W4A4: codes flip at
            rounding boundaries and the flips spread, so that correct runs lie between -1.7 and -0.3 %.
        right: least number of right choices. Correct runs give 32 of 32, chance 8.
    """

    weight_only: bool
    nll: float
    tolerance: float
    right: int


_NLL = ANCHORS["mean_nll_first_1024"]
SCHEMES = {
    "w4a16": Scheme(weight_only=True, nll=_NLL["w4a16"], tolerance=0.001, right=31),
    "w4a4": Scheme(weight_only=False, nll=_NLL["w4a4"], tolerance=0.03, right=29),
}


def make_w4a4_demo_model(folder: Path, bf16_folder: Path) -> None:
    """The demo model with the input scales that the anchor was computed with."""
    make_demo_model(folder, "nvfp4", bf16_folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for layer, scale in ANCHORS["input_scales"].items():
        assert f"{layer}.input_scale" in tensors
        tensors[f"{layer}.input_scale"] = torch.tensor(scale)
    save_file(tensors, file, {"format": "pt"})


def check_resolution(server: Server, backend: str) -> None:
    """``/get_server_info`` says that ``backend`` was asked for and multiplies. For ``auto`` it names one that can run,
    and both it and the log have a reason for each that can't."""
    state = server.get("/get_server_info").json()["internal_states"][0]
    resolution = state["fp4_gemm_backend"]
    name, reasons = resolution["resolved"], resolution["unsupported"]
    used = {label.partition("/")[0] for by_rows in state["fp4_gemm_choices"].values() for label in by_rows.values()}
    assert resolution["requested"] == backend and used
    assert name in backends() and name not in reasons and all(reasons.values())
    if backend == "auto":
        assert not used & set(reasons)
        assert f"FP4 GEMM backend: {name} (requested: auto)" in server.log
        assert all(reason in server.log for reason in reasons.values())
    else:
        assert name == backend and used == {backend}


def input_logprobs(server: Server, **prompts: object) -> list[list[float]]:
    """Log-probability of every token behind the first, of every prompt (``text=`` or ``input_ids=``, lists)."""
    replies = server.generate(
        **prompts, sampling_params={"temperature": 0, "max_new_tokens": 1}, return_logprob=True, logprob_start_len=0
    )
    return [[pair[0] for pair in reply["meta_info"]["input_token_logprobs"][1:]] for reply in replies]


def mean_nll(server: Server) -> float:
    """Mean negative log-likelihood of the anchor's text."""
    (values,) = input_logprobs(server, input_ids=[ANCHORS["token_ids"]])
    assert len(values) == len(ANCHORS["token_ids"]) - 1
    return -sum(values) / len(values)


def right_choices(server: Server) -> int:
    """How often the most probable of an item's choices is the answer. The question's own probability is the same for
    all of them, so that whole texts compare."""
    texts = [f"{item['question']} {choice}" for item in ITEMS for choice in item["choices"]]
    scores = iter([sum(values) for values in input_logprobs(server, text=texts)])
    right = 0
    for item in ITEMS:
        own = [next(scores) for _ in item["choices"]]
        right += own.index(max(own)) == item["answer"]
    return right


def greedy_texts(server: Server) -> list[str]:
    """How the model continues eight questions."""
    parameters = {"temperature": 0, "max_new_tokens": 32, "ignore_eos": True}
    replies = server.generate(text=[item["question"] for item in ITEMS[:8]], sampling_params=parameters)
    return [reply["text"] for reply in replies]


def gsm8k(server: Server, **options: object) -> dict[str, float]:
    """The few-shot runner against ``server``, with its host and port."""
    host, _, port = server.url.rpartition(":")
    return run_eval(SimpleNamespace(host=host, port=int(port), **options))


def fixture_logprob_rms(server: Server) -> float:
    """Root mean square difference of the W4A4 fixture's prompt log-probabilities from float64 arithmetic."""
    prompts = [EXPECTED[f"prompt{index}"] for index in range(3)]
    found = input_logprobs(server, input_ids=[ids.tolist() for ids in prompts])
    differences = []
    for index, ids in enumerate(prompts):
        log_probs = torch.log_softmax(EXPECTED[f"modelopt-nvfp4.w4a4.prompt{index}"].double(), dim=-1)
        wanted = log_probs[:-1].gather(1, ids[1:, None])[:, 0]
        differences.append(torch.tensor(found[index], dtype=torch.float64) - wanted)
    return float(torch.cat(differences).square().mean().sqrt())


def hub_environment() -> dict[str, str]:
    """Lets a server fetch its model, unless the caller is offline."""
    return {"HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "0")}
