"""The GSM8K runners against a scripted server: prompts, extraction and arithmetic, to the last digit."""

import http.server
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import huggingface_hub
import pytest

from sglang.srt.errors import ArgumentError, StartupError
from sglang.test import few_shot_gsm8k, run_eval
from sglang.test.gsm8k import INVALID, last_number, load_problems

DATA = Path(__file__).parents[1] / "fixtures" / "gsm8k_small.jsonl"
LINES = [json.loads(line) for line in DATA.read_text().splitlines()]


class ScriptedServer:
    """Answers a prompt with what the script has for its last question, and 7 tokens; keeps what it was asked."""

    def __init__(self) -> None:
        self.script: dict[str, str] = {}
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.refuse = ""
        self.most_at_once = self._at_once = 0
        self._lock = threading.Lock()
        owner = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                status, reply = owner.answer(self.path, body)
                payload = json.dumps(reply).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(payload)))
                self.end_headers()
                self.wfile.write(payload)

            def log_message(self, *args: Any) -> None:
                pass

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.http.server_address[1]

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        with self._lock:
            self.asked.append((path, body))
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        prompt = body["text"] if path == "/generate" else body["prompt"]
        question = prompt.rpartition("Question: ")[2].removesuffix("\nAnswer:")
        time.sleep(0.02 * (len(question) % 3))  # answers come back in another order
        with self._lock:
            self._at_once -= 1
        if question.startswith(self.refuse or "\0"):
            return 400, {"error": {"message": "no such thing"}}
        text = self.script[question]
        if path == "/generate":
            return 200, {"text": text, "meta_info": {"completion_tokens": 7}}
        return 200, {"choices": [{"text": text}], "usage": {"completion_tokens": 7}}


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    server = ScriptedServer()
    thread = threading.Thread(target=server.http.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield server
    server.http.shutdown()
    server.http.server_close()
    thread.join()


def script(*answers: str) -> dict[str, str]:
    return {line["question"]: answer for line, answer in zip(LINES, answers, strict=False)}


# -------------------------------------------------------------------------------------------------------- /generate
def few_shot(server: ScriptedServer, **options: Any) -> dict[str, float]:
    options = {"data_path": str(DATA), "host": "http://127.0.0.1", "port": server.port, **options}
    return few_shot_gsm8k.run_eval(SimpleNamespace(**options))


def test_accuracy_and_invalid_are_counted(server: ScriptedServer, capsys: pytest.CaptureFixture[str]) -> None:
    # Right: plainly; after other numbers; with a comma in the label. Wrong: another number. Invalid: no number.
    server.script = script(
        " 3 apples.\n#### 3", "7 and 14", " 26", " I do not know.", "It has 30 seats", "seven", "1,200", "#### 72"
    )
    metrics = few_shot(server, num_questions=8, num_shots=2, max_new_tokens=64, parallel=4)
    assert set(metrics) == {"accuracy", "invalid", "latency", "output_throughput"}
    assert metrics["accuracy"] == 5 / 8 and metrics["invalid"] == 2 / 8
    assert metrics["output_throughput"] == pytest.approx(8 * 7 / metrics["latency"])
    printed = capsys.readouterr().out
    assert printed.startswith("Accuracy: 0.625\nInvalid: 0.250\nLatency: ") and "\nOutput throughput: " in printed


def test_what_is_asked(server: ScriptedServer) -> None:
    server.script = script(*["1"] * 12)
    few_shot(server, num_questions=1319, num_shots=2, max_new_tokens=64, parallel=3, temperature=0.5, host="127.0.0.1")
    shots = "".join(f"Question: {line['question']}\nAnswer: {line['answer']}\n\n" for line in LINES[:2])
    # As many questions as there are, the shots among them.
    prompts = {body["text"] for _, body in server.asked}
    assert prompts == {f"{shots}Question: {line['question']}\nAnswer:" for line in LINES}
    assert len(server.asked) == 12 and server.most_at_once <= 3
    for path, body in server.asked:
        assert path == "/generate" and set(body) == {"text", "sampling_params"}
        stop = ["Question", "Assistant:", "<|separator|>"]
        assert body["sampling_params"] == {"temperature": 0.5, "max_new_tokens": 64, "stop": stop}


def test_as_many_at_once_as_asked_for(server: ScriptedServer) -> None:
    server.script = script(*["1"] * 12)
    few_shot(server, parallel=12)
    assert server.most_at_once > 3


def test_defaults_are_upstreams() -> None:
    assert few_shot_gsm8k.Options() == few_shot_gsm8k.Options(
        num_shots=5,
        data_path=None,
        num_questions=200,
        max_new_tokens=512,
        parallel=128,
        host="http://127.0.0.1",
        port=30000,
        temperature=0.0,
    )


def test_command_line(server: ScriptedServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.script = script("3", "13", "25")
    flags = f"--num-questions 3 --num-shots 1 --max-new-tokens 9 --parallel 2 --host 127.0.0.1 --port {server.port}"
    few_shot_gsm8k.main([*flags.split(), "--data-path", str(DATA), "--temperature", "0"])
    assert "Accuracy: 0.667" in capsys.readouterr().out
    assert server.asked[0][1]["sampling_params"]["max_new_tokens"] == 9


# ------------------------------------------------------------------------------------------------- /v1/completions
def completions(server: ScriptedServer, **options: Any) -> dict[str, float]:
    url = f"http://127.0.0.1:{server.port}"
    args = {"base_url": url, "model": "m", "eval_name": "gsm8k", "api": "completion", "gsm8k_data_path": str(DATA)}
    return run_eval.run_eval(SimpleNamespace(**{**args, **options}))


def test_score(server: ScriptedServer, capsys: pytest.CaptureFixture[str]) -> None:
    # Five shots, which are not asked. Right: 6. and 1,200; wrong: a sign, a fraction, nothing.
    server.script = script("", "", "", "", "", "6.", "so 1,200", "-72", "40.5", "none")
    metrics = completions(server, max_tokens=512, num_examples=5, num_threads=200)
    assert metrics["score"] == 2 / 5
    assert metrics["score:std"] == pytest.approx((2 / 5 * 3 / 5) ** 0.5)
    assert metrics["output_throughput"] == pytest.approx(5 * 7 / metrics["latency"])
    assert set(metrics) == {"score", "score:std", "latency", "output_throughput"}
    assert "Score: 0.400\n" in capsys.readouterr().out
    shots = "".join(f"Question: {line['question']}\nAnswer: {line['answer']}\n\n" for line in LINES[:5])
    prompts = {body.pop("prompt") for _, body in server.asked}
    assert prompts == {f"{shots}Question: {line['question']}\nAnswer:" for line in LINES[5:10]}
    stop = ["Question", "Assistant:", "<|separator|>"]
    common = {"model": "m", "max_tokens": 512, "temperature": 0.0, "top_p": 1.0, "stop": stop}
    assert all(asked == ("/v1/completions", common) for asked in server.asked)


def test_all_examples_by_default(server: ScriptedServer) -> None:
    server.script = script(*["1"] * 12)
    completions(server, num_shots=3)
    assert len(server.asked) == 9


def test_other_evaluations_are_refused() -> None:
    for name, api in (("mmlu", "completion"), ("gsm8k", "chat")):
        with pytest.raises(ArgumentError, match=f"eval_name='{name}' with api='{api}' is not supported"):
            run_eval.run_eval(SimpleNamespace(eval_name=name, api=api))
    with pytest.raises(ArgumentError, match="no problem of 12 is left"):
        run_eval.run_eval(SimpleNamespace(eval_name="gsm8k", api="completion", num_shots=12, gsm8k_data_path=str(DATA)))


# ------------------------------------------------------------------------------------------------------------- both
def test_unknown_and_missing_options_are_refused(server: ScriptedServer) -> None:
    with pytest.raises(ArgumentError, match="return_logprob is not supported by this runner; known: num_shots, "):
        few_shot(server, return_logprob=True)
    with pytest.raises(ArgumentError, match="eval_name is required"):
        run_eval.run_eval(SimpleNamespace(api="completion"))
    with pytest.raises(ArgumentError, match="--num-shots 13: the data has 12 problems"):
        few_shot(server, num_shots=13)
    assert not server.asked


def test_a_failed_request_ends_the_run(server: ScriptedServer) -> None:
    server.script = script(*["1"] * 12)
    server.refuse = "Omar read"
    with pytest.raises(StartupError, match="answered with status 400: .*no such thing"):
        few_shot(server, parallel=1)
    assert 4 <= len(server.asked) < 12


def test_nobody_there(server: ScriptedServer) -> None:
    with pytest.raises(StartupError, match=r"no answer from http://127.0.0.1:1/generate: .*refused"):
        few_shot(server, port=1)


@pytest.mark.parametrize(
    ("text", "whole", "signed"),
    [
        ("#### 18", 18, 18),
        ("1,234,567 in all", 1234567, 1234567),
        ("first 3, then -4", 4, -4),
        ("3.50", 50, 3.5),
        ("ends with 18.", 18, 18),
        ("nothing", INVALID, INVALID),
        ("agent 007", INVALID, INVALID),
    ],
)
def test_last_number(text: str, whole: float, signed: float) -> None:
    assert last_number(text, r"\d+") == whole
    assert last_number(text, run_eval.NUMBER) == signed


# ------------------------------------------------------------------------------------------------------------- data
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"question": "q", "answer": "1"}\n\n{"question": "q"}\n', "line 3: expected"),
        ('{"question": "q", "answer": "none"}\n', 'line 1: expected {"question": text, "answer": text with a number}'),
        ("[1]\n", "line 1"),
        ("not JSON\n", "line 1"),
        ('{"question": 1, "answer": "2"}\n', "line 1"),
        ("\n", "has no problems"),
    ],
)
def test_bad_data_is_named(content: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text(content)
    with pytest.raises(ArgumentError) as caught:
        load_problems(str(file))
    assert str(file) in str(caught.value) and message in str(caught.value)


def test_a_missing_file_is_one_line_and_status_2(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sglang.test.few_shot_gsm8k", "--data-path", str(tmp_path / "none.jsonl")]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "python")}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr.startswith(f"error: --data-path {tmp_path}/none.jsonl: ")
    assert "Traceback" not in done.stderr


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SGLANG_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "gsm8k" / "test.jsonl"


@pytest.fixture
def parquet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands in for pyarrow, which is no dependency: the "Parquet" file is the JSON lines."""
    module: Any = ModuleType("pyarrow.parquet")
    table = SimpleNamespace(to_pylist=lambda: LINES)
    module.read_table = lambda path, columns: table if (path, columns) == (DATA, ["question", "answer"]) else None
    monkeypatch.setitem(sys.modules, "pyarrow", ModuleType("pyarrow"))
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", module)


def test_fetched_once_and_kept(cache: Path, parquet: None, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def download(*args: str, **kwargs: str) -> Path:
        asked.append((args, kwargs))
        return DATA

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    problems = load_problems(None)
    assert [(problem.question, problem.answer) for problem in problems] == [
        (line["question"], line["answer"]) for line in LINES
    ]
    assert load_problems(None) == problems
    assert asked == [(("openai/gsm8k", "main/test-00000-of-00001.parquet"), {"repo_type": "dataset"})]
    assert [path.name for path in cache.parent.iterdir()] == ["test.jsonl"]


def test_offline_it_says_what_to_do(cache: Path, parquet: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache.parent / "hub"))
    with pytest.raises(StartupError, match=r"can't fetch openai/gsm8k .*or give --data-path FILE"):
        load_problems(None)
    assert not cache.exists()


def test_without_pyarrow_it_says_what_to_do(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(StartupError, match=r"pip install pyarrow, or give --data-path FILE"):
        load_problems(None)
