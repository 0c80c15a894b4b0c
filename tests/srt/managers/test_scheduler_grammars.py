"""Requests with grammars in a scheduler with a real model (random weights, a vocabulary of 512)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fake_model
import jsonschema
import pytest
import torch
from fake_model import FakeChannel

from gloo_ranks import GlooRanks
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.constrained import xgrammar_backend
from sglang.srt.constrained.grammar_manager import GrammarManager
from sglang.srt.constrained.vocab_mask import VocabMask
from sglang.srt.constrained.xgrammar_backend import GrammarSource
from sglang.srt.distributed import TensorParallelGroup
from sglang.srt.managers.detokenizer import TokenDecoder
from sglang.srt.managers.hf_tokenizer import get_tokenizer
from sglang.srt.managers.io_struct import (
    BatchTokenIDOutput,
    LoadGrammarReq,
    LoadVocabularyReq,
    TokenizedGenerateReqInput,
)
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs

MODEL = Path(__file__).parents[2] / "fixtures" / "tiny-llama-bf16"
ARGS = ServerArgs(model_path=str(MODEL), device="cpu", dtype="float32", max_total_tokens=2000, random_seed=1)
CONFIG = ModelConfig.from_server_args(ARGS)
DECODER = TokenDecoder(get_tokenizer(str(MODEL)))
EOS = max(CONFIG.eos_token_ids)
PROMPT = list(range(40, 90))
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": -5, "maximum": 120}, "s": {"type": "string", "maxLength": 3}},
    "required": ["n", "s"],
}
SOURCES = {
    "schema": GrammarSource("json_schema", json.dumps(SCHEMA), any_whitespace=False),
    "regex": GrammarSource("regex", "[a-c]{3,6}(x|yz)"),
    "ends": GrammarSource("regex", "ab"),
    "long": GrammarSource("regex", "([a-c]{4}-){12}"),
    "impossible": GrammarSource("regex", r"ab[^\s\S]"),
}
NUMBERS = {name: number for number, name in enumerate(SOURCES)}


@pytest.fixture(scope="module")
def runner() -> Iterator[ModelRunner]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield ModelRunner(ARGS, CONFIG)
    torch.set_num_threads(threads)


def new_scheduler(runner: ModelRunner, **changes: Any) -> Scheduler:
    scheduler = Scheduler(replace(ARGS, **changes), CONFIG, runner, FakeChannel())
    scheduler.enable_overlap = fake_model.OVERLAP
    vocabulary = GrammarManager(DECODER, CONFIG.vocab_size, CONFIG.eos_token_ids)._make_vocabulary()
    scheduler.channel.inbox.append(LoadVocabularyReq(vocabulary=vocabulary))  # type: ignore[attr-defined]
    for name, source in SOURCES.items():
        load = LoadGrammarReq(number=NUMBERS[name], source=source)
        scheduler.channel.inbox.append(load)  # type: ignore[attr-defined]
    return scheduler


def request(
    rid: str, grammar: str | int | None = None, prompt: list[int] = PROMPT, **params: Any
) -> TokenizedGenerateReqInput:
    return TokenizedGenerateReqInput(
        rid=rid,
        input_ids=prompt,
        sampling_params=SamplingParams(**{"max_new_tokens": 60, **params}),
        grammar=NUMBERS[grammar] if isinstance(grammar, str) else grammar,
    )


def generate(scheduler: Scheduler, *requests: TokenizedGenerateReqInput) -> dict[str, tuple[list[int], dict[str, Any]]]:
    """Tokens and finish reason of each request; they arrive one a step."""
    channel: Any = scheduler.channel
    waiting = list(requests)
    while waiting or scheduler.num_unfinished_reqs():
        channel.inbox += waiting[:1]
        del waiting[:1]
        scheduler.step()
    assert not scheduler.step()
    ids: dict[str, list[int]] = {each.rid: [] for each in requests}
    reasons: dict[str, dict[str, Any]] = {}
    for message in channel.sent:
        for out in message.outputs if isinstance(message, BatchTokenIDOutput) else ():
            assert out.rid not in reasons
            ids[out.rid] += out.output_ids
            if out.finish_reason is not None:
                reasons[out.rid] = out.finish_reason
    channel.sent.clear()
    return {rid: (ids[rid], reasons[rid]) for rid in ids}


def text(ids: list[int]) -> str:
    return DECODER.decode(ids)


def mixed() -> list[TokenizedGenerateReqInput]:
    """Every kind of request, of prompts of different lengths, each with a seed of its own."""
    kinds = ["schema", None, "regex", "schema", "ends"]
    return [
        request(f"{kind}{i}", kind, PROMPT[: 20 + i], sampling_seed=i, ignore_eos=kind is None)
        for i, kind in enumerate(kinds * 4)
    ]


def check(results: dict[str, tuple[list[int], dict[str, Any]]]) -> None:
    stopped = {"type": "stop", "matched": EOS}
    for rid, (ids, reason) in results.items():
        if rid.startswith("None"):
            assert reason == {"type": "length", "length": 60}
            continue
        assert reason == stopped and ids[-1] == EOS, (rid, text(ids))
        if rid.startswith("schema"):
            jsonschema.validate(json.loads(text(ids)), SCHEMA)
        else:
            assert re.fullmatch("[a-c]{3,6}(x|yz)" if rid.startswith("regex") else "ab", text(ids))


@pytest.mark.usefixtures("each_loop")
def test_outputs_follow_their_grammars_whatever_else_is_computed(runner: ModelRunner) -> None:
    alone = new_scheduler(runner, disable_radix_cache=True)
    want = {each.rid: generate(alone, each)[each.rid] for each in mixed()}
    check(want)
    assert len({text(ids) for rid, (ids, _) in want.items() if rid.startswith("schema")}) > 5
    assert generate(new_scheduler(runner), *mixed()) == want
    assert generate(new_scheduler(runner, chunked_prefill_size=7), *mixed()) == want


@pytest.mark.usefixtures("each_loop")
def test_a_retracted_request_goes_on_in_its_grammar(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [
        request(f"{kind}{i}", kind, [i, *PROMPT[:9]], sampling_seed=i, ignore_eos=kind is None)
        for i, kind in enumerate(["long", None] * 3, start=100)
    ]
    want = generate(new_scheduler(runner), *requests)
    assert all(re.fullmatch("([a-c]{4}-){12}", text(ids)) for rid, (ids, _) in want.items() if rid.startswith("long"))
    monkeypatch.setattr(runner, "max_total_num_tokens", 110)
    tight = new_scheduler(runner)
    tight.new_token_ratio = 0.0  # a hopeful estimate
    retracted: list[Req] = []
    choose = ScheduleBatch.reqs_to_retract
    monkeypatch.setattr(
        ScheduleBatch, "reqs_to_retract", lambda batch: retracted.extend(found := choose(batch)) or found
    )
    assert generate(tight, *requests) == want
    assert any(req.grammar is not None and req.output_ids for req in retracted)


def test_a_grammar_that_allows_what_would_come_anyway_changes_nothing(runner: ModelRunner) -> None:
    scheduler = new_scheduler(runner)
    for i in range(20):
        prompt = PROMPT[: 10 + i]
        ids, reason = generate(scheduler, request("x", prompt=prompt, temperature=0.0, max_new_tokens=8))["x"]
        if "\ufffd" not in text(ids) and not DECODER.special_ids.intersection(ids):
            break
    literal = "".join(f"\\u{ord(char):04x}" for char in text(ids))
    load = LoadGrammarReq(number=99, source=GrammarSource("ebnf", f'root ::= "{literal}" [a-z]*'))
    scheduler.channel.inbox.append(load)  # type: ignore[attr-defined]
    got = generate(scheduler, request("x", 99, prompt, temperature=0.0, max_new_tokens=8))["x"]
    assert got == (ids, reason)


@pytest.mark.usefixtures("each_loop")
def test_the_ends_of_an_output(runner: ModelRunner) -> None:
    results = generate(
        new_scheduler(runner),
        request("short", "schema", max_new_tokens=4),
        request("nothing", "schema", max_new_tokens=0),
        request("ignored", "ends", ignore_eos=True),
        request("text", "regex", stop_token_ids=(DECODER_ID["a"], DECODER_ID["b"], DECODER_ID["c"])),
    )
    ids, reason = results["short"]
    assert len(ids) == 4 and reason == {"type": "length", "length": 4}
    assert results["nothing"] == ([], {"type": "length", "length": 0})
    assert text(results["ignored"][0]) == "ab" and results["ignored"][1] == {"type": "stop", "matched": EOS}
    # A token of text that the request wants to stop at is allowed as text, and ends the output.
    assert len(results["text"][0]) <= 6 and results["text"][1]["type"] == "stop"


DECODER_ID = {char: next(i for i in range(CONFIG.vocab_size) if DECODER.pieces[i] == char.encode()) for char in "abc"}
ABORT = {"type": "abort", "status_code": 400}


@pytest.mark.usefixtures("each_loop")
def test_an_output_that_can_not_go_on_ends_alone(runner: ModelRunner) -> None:
    scheduler = new_scheduler(runner)
    results = generate(
        scheduler,
        request("impossible", "impossible"),
        request("contradiction", "ends", min_new_tokens=10),
        request("mate", "regex", sampling_seed=3),
    )
    want = "The grammar can't be followed: no token of the vocabulary can come next."
    assert results["impossible"][1] == {**ABORT, "message": want}
    assert text(results["impossible"][0]) == "ab"
    message = results["contradiction"][1]["message"]
    assert re.fullmatch(r"The grammar can't be followed: it ends after \d tokens, but min_new_tokens is 10\.", message)
    assert results["mate"] == generate(new_scheduler(runner), request("mate", "regex", sampling_seed=3))["mate"]
    scheduler.pools.check_integrity()


def test_a_token_that_the_grammar_refuses_ends_its_request(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(VocabMask, "apply", lambda self, logits: None)
    scheduler = new_scheduler(runner)
    mate = request("mate", ignore_eos=True, max_new_tokens=5)
    results = generate(scheduler, request("x", "ends", logit_bias={"300": 1e6}), mate)
    words = "Internal error: token 300 was sampled, which the grammar does not allow."
    assert results["x"][1] == {"type": "abort", "message": words, "status_code": 500}
    assert results["mate"][1] == {"type": "length", "length": 5}
    scheduler.pools.check_integrity()


def test_a_grammar_that_is_not_there(runner: ModelRunner, caplog: pytest.LogCaptureFixture) -> None:
    scheduler = new_scheduler(runner)
    bad = LoadGrammarReq(number=7, source=GrammarSource("regex", "("), forget=[NUMBERS["ends"]])
    scheduler.channel.inbox.append(bad)  # type: ignore[attr-defined]
    results = generate(scheduler, request("bad", 7), request("forgotten", "ends"), request("good", "regex"))
    for rid in ("bad", "forgotten"):
        assert results[rid][1]["status_code"] == 500 and "there is no grammar" in results[rid][1]["message"]
    assert results["good"][1]["type"] == "stop"
    assert "A grammar that was tried can't be compiled" in caplog.text


def on_a_rank(tp: TensorParallelGroup, impatient: int) -> Any:
    scheduler = new_scheduler(ModelRunner(replace(ARGS, tp_size=tp.size), CONFIG, tp))
    patience = xgrammar_backend.MAX_MASK_SECONDS
    xgrammar_backend.MAX_MASK_SECONDS = -1.0 if tp.rank == impatient else patience
    kinds = ("regex", "ends", "schema", "impossible")
    requests = [request(kind, kind, sampling_seed=5) for kind in kinds]
    results = generate(scheduler, *requests, request("None", max_new_tokens=12, ignore_eos=True))
    xgrammar_backend.MAX_MASK_SECONDS = patience
    return results


def test_ranks_agree_and_only_the_first_one_looks_at_its_clock(tmp_path: Path) -> None:
    ranks = GlooRanks(tmp_path)
    try:
        patient, same = ranks.run(2, on_a_rank, 1)
        impatient, other = ranks.run(2, on_a_rank, 0)
    finally:
        ranks.close()
    assert patient == same
    assert patient.pop("impossible")[1]["status_code"] == 400
    assert patient.pop("None") == impatient.pop("None") == other.pop("None")
    check(patient)
    assert all("which other requests would wait for" in reason["message"] for _, reason in impatient.values())
    assert all(ids == [] and reason["type"] == "abort" for ids, reason in other.values())
