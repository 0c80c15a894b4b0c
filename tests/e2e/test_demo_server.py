"""The demo model served: a real instruct model with NVFP4 weights, held to the anchor and to itself."""

import concurrent.futures
import json
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from launched_server import FIXTURES, Server, launched

ANCHORS = json.loads((FIXTURES / "smollm2_anchors.json").read_text())
QUESTIONS = [
    "What is the capital of France?",
    "Name three colours.",
    "Write one sentence about the sea.",
    "What is 12 plus 30?",
    "Who wrote Hamlet?",
    "Give me a recipe for tea.",
    "Translate 'good morning' into Spanish.",
    "Why is the sky blue?",
]


@pytest.fixture(scope="module")
def server(demo_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("demo")
    with launched(demo_model_dir, folder, "--constrained-json-disable-any-whitespace") as running:
        yield running


def nll(server: Server) -> float:
    """Mean negative log-likelihood of positions 1.. of the anchor's text."""
    ids = ANCHORS["token_ids"]
    reply = server.generate(
        input_ids=ids,
        sampling_params={"temperature": 0, "max_new_tokens": 1},
        return_logprob=True,
        logprob_start_len=0,
    )
    pairs = reply["meta_info"]["input_token_logprobs"][1:]
    assert [pair[1] for pair in pairs] == ids[1:]
    return -sum(pair[0] for pair in pairs) / len(pairs)


def test_anchor(server: Server) -> None:
    assert nll(server) == pytest.approx(ANCHORS["mean_nll_first_1024"]["w4a16"], rel=0.003)


def test_bf16_checkpoint_quantised_while_it_loads(demo_bf16_dir: Path, tmp_path: Path) -> None:
    with launched(demo_bf16_dir, tmp_path, "--quantization", "w4a16_nvfp4") as running:
        assert nll(running) == pytest.approx(ANCHORS["mean_nll_first_1024"]["w4a16"], rel=0.003)


def test_capital_of_france(server: Server) -> None:
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none")
    model = client.models.list().data[0].id
    reply = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": QUESTIONS[0]}], temperature=0, max_tokens=64
    )
    assert "Paris" in reply.choices[0].message.content
    assert reply.choices[0].finish_reason == "stop"


def test_json_on_one_line(server: Server) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": {"enum": [1]}, "minItems": 3}}}
    params = {"temperature": 0, "max_new_tokens": 32, "json_schema": json.dumps({**schema, "required": ["a"]})}
    lines = '{\n  "a": [\n    1,\n    1,\n    1\n  ]\n}\n'
    text = server.generate(text=lines * 3, sampling_params=params)["text"]
    assert str(text).startswith('{"a": [1, 1, 1')


def test_concurrent_requests_give_the_texts_of_single_ones(server: Server) -> None:
    prompts = [f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n" for text in QUESTIONS]
    prompts += [prompt + "Well, " for prompt in prompts]

    def ask(prompt: str) -> dict[str, object]:
        return server.generate(
            text=prompt,
            sampling_params={"temperature": 0, "max_new_tokens": 48},
            return_logprob=True,
            top_logprobs_num=2,
        )

    single = [ask(prompt) for prompt in prompts]
    assert server.post("/flush_cache").status_code == 200
    with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
        together = list(pool.map(ask, prompts))
    for alone, among in zip(single, together, strict=True):
        first = next(
            (i for i, (a, b) in enumerate(zip(alone["output_ids"], among["output_ids"], strict=False)) if a != b), None
        )
        if first is None:
            assert alone["text"] == among["text"]
            continue
        best, second = (entry[0] for entry in alone["meta_info"]["output_top_logprobs"][first])
        assert best - second < 0.05, f"token {first} differs though the best two are {best - second} apart"
    assert "#running-req: 1" in server.log or "#running-req: 2" in server.log
