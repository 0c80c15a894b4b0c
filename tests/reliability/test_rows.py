"""benchmark/reliability: what its rows and judgements say of good and of bad figures."""

import ast
import random
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "benchmark" / "reliability"
sys.path.insert(0, str(SCRIPTS))

import check_memory  # noqa: E402
import check_secrets  # noqa: E402
from clients import Answer, bad_client, good_client, unexpected  # noqa: E402
from odd_requests import odd_requests  # noqa: E402
from rows import Row, none_of  # noqa: E402


def test_a_row_is_ok_if_its_figure_keeps_the_bound() -> None:
    assert Row("x", 2.0, 2.0, "s", "y").ok and not Row("x", 2.1, 2.0, "s", "y").ok
    assert Row("x", 2.0, 2.0, "s", "y", at_least=True).ok and not Row("x", 1.9, 2.0, "s", "y", at_least=True).ok
    assert not Row("x", float("nan"), 2.0, "s", "y").ok
    assert none_of("x", [], "y").ok
    row = none_of("x", ["a", "b", "c", "d"], "y.")
    assert not row.ok and row.as_dict()["figure"] == 4 and row.what == "y. Seen: a; b; c"


def test_slope() -> None:
    assert check_memory.slope([(t, 500.0 + 0.25 * t) for t in range(100)]) == pytest.approx(0.25)
    assert check_memory.slope([(0.0, 1.0), (1.0, 3.0), (2.0, 1.0)]) == pytest.approx(0.0)


@pytest.mark.parametrize(
    ("kind", "status", "text", "right"),
    [
        ("grammar", 200, '{"text": "{}"}', True),
        ("grammar", 400, "{}", False),
        ("too long", 400, "{}", True),
        ("too long", 200, "{}", False),
        ("hangs up", 0, "", True),
        ("hangs up", 500, "", False),
        ("several samples", 200, 'data: {"error": 1}\n\ndata: [DONE]\n\n', False),
    ],
)
def test_answers_to_bad_clients(kind: str, status: int, text: str, right: bool) -> None:
    assert (unexpected(kind, Answer(status, 1.0, text)) is None) is right


def test_a_stream_without_its_end_is_not_complete() -> None:
    assert Answer(200, 1.0, "data: {}\n\ndata: [DONE]\n\n").complete
    assert not Answer(200, 1.0, "data: {}\n\n").complete and not Answer(0, 1.0, "").complete


def test_a_seed_gives_the_same_clients() -> None:
    def kinds(seed: int) -> list[str]:
        rng = random.Random(seed)
        good_client(rng)
        return [bad_client(rng, too_long=100)[0] for _ in range(40)]

    assert kinds(1) == kinds(1) != kinds(2)
    assert len(set(kinds(1))) >= 8


def test_odd_requests_have_names_of_their_own() -> None:
    names = [odd.name for odd in odd_requests(320)]
    assert len(names) == len(set(names)) > 70


def test_the_search_for_comparisons_of_keys_finds_them() -> None:
    assert check_secrets.comparisons("if token == wanted: pass")[0] == ["token == wanted"]
    assert check_secrets.comparisons("ok = hmac.compare_digest(token, wanted)") == ([], 1)


def test_every_check_is_in_the_table() -> None:
    tree = ast.parse((SCRIPTS / "__main__.py").read_text())
    imported = {alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names}
    assert {path.stem for path in SCRIPTS.glob("check_*.py")} <= imported
