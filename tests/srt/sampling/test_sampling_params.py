from typing import Any

import pytest

from sglang.srt.errors import RequestError
from sglang.srt.sampling.sampling_params import GRAMMAR_FIELDS, NEUTRAL_VALUES, SamplingParams, parse_sampling_params


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
        "frequency_penalty": -2,
        "presence_penalty": 2.0,
        "repetition_penalty": 1.5,
        "min_new_tokens": 7,
        "n": 3,
        "logit_bias": {"0": -100, "4294967295": 1.5},
        "sampling_seed": -(2**63),
        "no_stop_trim": True,
        "stop_regex": ["a+b", "c$"],
    }
    for grammar in GRAMMAR_FIELDS:
        parsed = parse_sampling_params({**given, grammar: "x"})
        for name, value in {**given, grammar: "x"}.items():
            assert getattr(parsed, name) == (tuple(value) if isinstance(value, list) else value)
    assert {*given, *GRAMMAR_FIELDS} == set(SamplingParams.__struct_fields__)


def test_spellings_of_the_same_wish() -> None:
    assert parse_sampling_params({}) == SamplingParams()
    assert parse_sampling_params({"stop": "x"}).stop == ("x",)
    assert parse_sampling_params({"stop_regex": "x+"}).stop_regex == ("x+",)
    assert parse_sampling_params({"logit_bias": {7: 1}}).logit_bias == {"7": 1.0}
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
        ("frequency_penalty", 2.1),
        ("frequency_penalty", float("nan")),
        ("presence_penalty", -2.1),
        ("repetition_penalty", 0),
        ("repetition_penalty", 1e-40),
        ("repetition_penalty", 2.1),
        ("min_new_tokens", -1),
        ("min_new_tokens", 129),
        ("n", 0),
        ("n", True),
        ("n", 1 << 20),
        ("sampling_seed", 1 << 63),
        ("sampling_seed", 1.5),
        ("logit_bias", {"a": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"05": 1}),
        ("logit_bias", {"5": float("inf")}),
        ("logit_bias", {"5": float("nan")}),
        ("logit_bias", {"5": "1"}),
        ("logit_bias", [5]),
        ("no_stop_trim", 1),
        ("stop_regex", ""),
        ("stop_regex", "(a"),
        ("stop_regex", "(?=a)"),
        ("stop_regex", "(a{100}){100}"),
        ("stop_regex", "\ud800"),
        ("stop_regex", ["a"] * 17),
        ("regex", 5),
        ("custom_params", {"a": 1}),
        ("stream_interval", 2),
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


def test_one_grammar_at_most() -> None:
    with pytest.raises(RequestError, match="Only one of.*'regex', 'ebnf'"):
        parse_sampling_params({"ebnf": "x", "regex": "y"})


def test_samples_have_seeds_of_their_own() -> None:
    params = parse_sampling_params({"n": 3, "sampling_seed": 2**63 - 2, "top_p": 0.5})
    assert [params.sample(i).sampling_seed for i in range(3)] == [2**63 - 2, 2**63 - 1, -(2**63)]
    assert params.sample(0) == parse_sampling_params({"sampling_seed": 2**63 - 2, "top_p": 0.5})
    assert parse_sampling_params({"n": 2}).sample(1) == SamplingParams()


def test_not_an_object() -> None:
    with pytest.raises(RequestError, match="sampling_params"):
        parse_sampling_params([])  # type: ignore[arg-type]
