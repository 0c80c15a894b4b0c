"""Keys that must not be told, bytes that must not be run, sockets that nobody else may open."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator

import psutil
from rows import Row, none_of
from servers import ROOT, Setup, running

PACKAGE = ROOT / "python" / "sglang"
KEY, ADMIN_KEY, WRONG = "sesame-7f3a", "barley-91c2", "oats-55d0"


def secrets(setup: Setup) -> Iterator[Row]:
    yield from _keys(setup)
    yield from _sockets(setup)
    sys.path.insert(0, str(ROOT / "tests" / "srt"))
    from test_no_pickle import findings  # type: ignore[import-not-found]

    found = [
        f"{path.relative_to(ROOT)}: {name}" for path in PACKAGE.rglob("*.py") for name in findings(path.read_text())
    ]
    yield none_of("no pickle", found, "Imports and calls in the package that unpickle or evaluate.")


def comparisons(source: str) -> tuple[list[str], int]:
    """In a module: comparisons of anything with a key's variables, and calls of hmac.compare_digest."""
    tree = ast.parse(source)
    compared = [
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Compare)
        and any(isinstance(op, ast.Eq | ast.NotEq | ast.In | ast.NotIn) for op in node.ops)
        and {"wanted", "token", "api_key", "admin_api_key"}
        & {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}
    ]
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return compared, sum(ast.unparse(call.func) == "hmac.compare_digest" for call in calls)


def _keys(setup: Setup) -> Iterator[Row]:
    check = "API key"
    compared, digests = comparisons((PACKAGE / "srt" / "entrypoints" / "auth.py").read_text())
    yield none_of(check, compared, "Comparisons of keys whose time depends on how much of them is right.")
    yield Row(check, digests, 1, "calls", "Comparisons by hmac.compare_digest.", at_least=True)
    flags = ("--api-key", KEY, "--admin-api-key", ADMIN_KEY, "--enable-metrics")
    told: list[str] = []
    wrong: list[str] = []
    with running(setup, *flags, "--log-level", "debug", "--log-requests", "--log-requests-level", "3") as server:
        body = {"text": "hello", "sampling_params": {"max_new_tokens": 2}}
        keys = {None: 401, WRONG: 401, KEY: 200, KEY[:-1]: 401, KEY + "x": 401, ADMIN_KEY: 401}
        paths = (
            "/server_info",
            "/get_server_info",
            "/model_info",
            "/v1/models",
            "/v1/loads",
            "/metrics",
            "/openapi.json",
        )
        for key, status in keys.items():
            headers = {"authorization": f"Bearer {key}"} if key else {}
            answers = [server.post("/generate", body, headers=headers)]
            if answers[0].status_code != status:
                wrong.append(f"{key}: {answers[0].status_code}")
            answers += [server.get(path, headers=headers) for path in (*paths, f"/no/{key}"[:4])]
            answers.append(server.post("/flush_cache", body, headers=headers))
            if answers[-1].status_code != (200 if key == ADMIN_KEY else 401):
                wrong.append(f"/flush_cache with {key}: {answers[-1].status_code}")
            texts = [answer.text + str(answer.headers) for answer in answers]
            told += [text[:200] for text in texts if any(secret in text for secret in (KEY, ADMIN_KEY, WRONG))]
        server.terminate()
        told += [line for line in server.log.splitlines() if any(secret in line for secret in (KEY, ADMIN_KEY, WRONG))]
    yield none_of(check, wrong, "Answers to no key, wrong, cut, longer and right keys that are not as they must be.")
    yield none_of(check, told, "Answers and lines of the log (all levels, requests logged) in which a key is.")


def _sockets(setup: Setup) -> Iterator[Row]:
    check = "sockets"
    with running(setup, "--tp-size", "2") as server:
        open_paths = [
            f"{path}: {path.stat().st_mode:o}"
            for path in server.sockets.iterdir()
            if path.is_dir() and path.stat().st_mode & 0o077
        ]
        sockets = [path for path in server.sockets.rglob("*") if path.is_socket()]
        listening = [
            f"{process.name()} listens on {connection.laddr}"
            for process in server.processes()
            for connection in process.net_connections(kind="inet")
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port != server.port
            and not connection.laddr.ip.startswith("127.") and connection.laddr.ip != "::1"
        ]  # fmt: skip
        answer = server.post("/generate", {"text": "hello", "sampling_params": {"max_new_tokens": 2}})
    yield Row(check, len(sockets), 2, "sockets", "Between the processes of a server with two ranks.", at_least=True)
    yield none_of(check, open_paths, "Folders of sockets that others than their owner may enter.")
    yield none_of(check, listening, "Sockets beside the HTTP port that listen on more than the loopback interface.")
    yield none_of(check, [] if answer.status_code == 200 else [answer.text], "Two ranks do not answer.")
