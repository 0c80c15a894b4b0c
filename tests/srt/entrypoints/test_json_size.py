"""Bodies that would take long to decode are refused before."""

import json
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang.srt.entrypoints import json_size
from sglang.srt.entrypoints.json_size import JsonSize

TEXT = st.text(st.sampled_from('a,[]{}:"\\é\n'), max_size=6)
VALUES = st.recursive(
    st.integers() | st.booleans() | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
)


def counts(value: Any) -> tuple[int, int, int]:
    """Commas, lists and objects, strings."""
    if isinstance(value, str):
        return 0, 0, 1
    if not isinstance(value, list | dict):
        return 0, 0, 0
    names = len(value) if isinstance(value, dict) else 0
    inner = [counts(one) for one in (value.values() if isinstance(value, dict) else value)]
    commas, opened, strings = (sum(column) for column in zip(*inner, strict=True)) if inner else (0, 0, 0)
    return commas + max(len(value) - 1, 0), opened + 1, strings + names


@given(VALUES, st.booleans(), st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_what_is_counted(value: Any, ascii_only: bool, lengths: list[int]) -> None:
    commas, opened, strings = counts(value)
    data, size, position = json.dumps(value, ensure_ascii=ascii_only).encode(), JsonSize(), 0
    while position < len(data):
        length = lengths[position % len(lengths)]
        size.feed(data[position : position + length])
        position += length
    assert (size.values, size.texts) == (commas + opened, opened + strings)


@pytest.mark.parametrize(
    ("value", "refused"),
    [
        ([5] * 2000, False), ([5] * 2100, True), ([[5]] * 90, False), ([[5]] * 110, True), (["a"] * 90, False),
        (["a"] * 110, True), ("a," * 5000, False), (["a," * 500] * 40, False),
    ],
)  # fmt: skip
def test_too_many_values_are_a_413(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch, value: Any, refused: bool
) -> None:
    monkeypatch.setattr(json_size, "MAX_VALUES", 2010)
    monkeypatch.setattr(json_size, "MAX_TEXTS", 100)
    response = http.post("/generate", json={"no such field": value})
    assert response.status_code == (413 if refused else 400)
    message = response.json()["error"]["message"]
    assert ("several requests" if refused else "no such field") in message
