from typing import Any

import pytest

from sglang.srt.errors import RequestError
from sglang.srt.sampling.sampling_params import NEUTRAL_VALUES, SamplingParams, parse_sampling_params


def test_every_field_is_taken() -> None:
    given = {
        "max_new_tokens": 7,
        "stop": ["a", "b"],
        "stop_token_ids": [3, 4],
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "ignore_eos": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": True,
    }
    assert set(given) == set(SamplingParams.__struct_fields__)
    parsed = parse_sampling_params(given)
    for name, value in given.items():
        assert getattr(parsed, name) == (tuple(value) if isinstance(value, list) else value)


def test_spellings_of_the_same_wish() -> None:
    assert parse_sampling_params({}) == SamplingParams()
    assert parse_sampling_params({"stop": "x"}).stop == ("x",)
    assert parse_sampling_params({"temperature": 0}).is_greedy
    assert parse_sampling_params({"temperature": 1e-9}).temperature == 0.0
    assert parse_sampling_params({"top_k": 1}).is_greedy
    assert parse_sampling_params({"top_k": 1 << 30}).top_k == -1
    assert parse_sampling_params({"max_new_tokens": None}).max_new_tokens is None
    nulls = dict.fromkeys(set(SamplingParams.__struct_fields__) - {"max_new_tokens"})
    assert parse_sampling_params(nulls) == SamplingParams()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", "hot"),
        ("temperature", True),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", 0),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", -0.1),
        ("min_p", 2),
        ("max_new_tokens", -1),
        ("max_new_tokens", "4"),
        ("stop", 3),
        ("stop", [""]),
        ("stop", ""),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", ["a"]),
        ("ignore_eos", 1),
        ("skip_special_tokens", "no"),
        ("spaces_between_special_tokens", False),
        ("max_tokens", 3),
        ("best_of", 2),
        ("frequency_penalty", 0.5),
        ("regex", "a+"),
        ("n", 2),
        ("no_stop_trim", True),
    ],
)
def test_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        parse_sampling_params({field: value})
    assert field in str(caught.value)
    assert caught.value.param is not None
    assert caught.value.param.split(".")[0].split("[")[0] == field


def test_neutral_values_ask_for_nothing() -> None:
    assert parse_sampling_params(dict(NEUTRAL_VALUES)) == SamplingParams()
    assert parse_sampling_params(dict.fromkeys(NEUTRAL_VALUES)) == SamplingParams()


def test_not_an_object() -> None:
    with pytest.raises(RequestError, match="sampling_params"):
        parse_sampling_params([])  # type: ignore[arg-type]
