"""--log-requests and the files of --ssl-*."""

import json
import logging
import re
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme

from http_server_thread import FIXTURE, serve
from sglang.srt.entrypoints.http_server import launch_server
from sglang.srt.errors import StartupError
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.request_logger import RequestLogger

# --log-requests


@pytest.mark.parametrize("level", range(4))
def test_log_requests(level: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "sglang.srt.utils.request_logger")
    text = "hello " * 40
    with serve(log_requests=True, log_requests_level=level) as url:
        body = {"text": text, "rid": "r1", "sampling_params": {"max_new_tokens": 3, "temperature": 0.25}}
        assert httpx.post(f"{url}/generate", json=body).status_code == 200
        httpx.get(f"{url}/health_generate")
    lines = [r.getMessage() for r in caplog.records if r.name == "sglang.srt.utils.request_logger"]
    assert [line.partition(":")[0] for line in lines] == ["Receive", "Finish"]
    assert all("rid='r1'" in line and "\n" not in line for line in lines)
    assert ("0.25" in lines[0]) == (level >= 1)
    assert ("hello" in lines[0]) == ("'text':" in lines[1]) == (level >= 2)
    assert re.search(r"'completion_tokens': 3", lines[1])


def test_what_is_streamed_does_not_depend_on_the_log() -> None:
    body = {"model": "default", "prompt": "hello", "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    texts = []
    for logged in (False, True):
        with serve(log_requests=logged) as url:
            whole = httpx.post(f"{url}/v1/completions", json=body).json()["choices"][0]["text"]
            lines = httpx.post(f"{url}/v1/completions", json=body | {"stream": True}).text.splitlines()
        chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        texts += [whole, "".join(chunk["choices"][0]["text"] for chunk in chunks)]
    assert texts == texts[:1] * 4 and texts[0]


def test_logged_text_is_cut_at_level_2_only(caplog: pytest.LogCaptureFixture) -> None:
    for level, cut in ((2, True), (3, False)):
        shown = RequestLogger(level)._cut({"text": "x" * 5000})
        assert ("..." in shown) == cut and (len(shown) < 2200) == cut


# TLS


def test_tls(tmp_path: Path) -> None:
    authority, other = trustme.CA(), trustme.CA()
    pair = authority.issue_cert("127.0.0.1")
    pair.private_key_pem.write_to_path(tmp_path / "key.pem")
    pair.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    other.issue_cert("127.0.0.1").cert_chain_pems[0].write_to_path(tmp_path / "other.pem")

    taken = socket.create_server(("127.0.0.1", 0))
    port = taken.getsockname()[1]

    def start(**files: str) -> None:
        arguments: Any = {"model_path": str(FIXTURE), "device": "cpu", "port": port}
        with pytest.raises(StartupError) as caught:
            launch_server(ServerArgs(**arguments, **{k: str(tmp_path / v) for k, v in files.items()}))
        errors.append(str(caught.value))

    errors: list[str] = []
    start(ssl_certfile="other.pem", ssl_keyfile="key.pem")
    start(ssl_certfile="absent.pem", ssl_keyfile="key.pem")
    start(ssl_certfile="cert.pem", ssl_keyfile="key.pem", ssl_ca_certs="key.pem")
    assert all("--ssl-certfile" in error for error in errors)
    start(ssl_certfile="cert.pem", ssl_keyfile="key.pem")
    assert "--ssl-certfile" not in errors[-1] and "in use" in errors[-1]
    taken.close()
