"""``/generate``: what of sampling and its log-probabilities is done on this side of the scheduler."""

import httpx
from test_generate_endpoint import TOKENIZER, generate

from fake_scheduler import logprob


def test_logprobs_of_chosen_tokens(http: httpx.Client) -> None:
    """One list for every prompt, or one each."""
    body = {"input_ids": [[0, 70], [80, 90]], "return_logprob": True, "logprob_start_len": 0}
    first, second = generate(http, **body, token_ids_logprob=[9, 4])
    for out in (first, second):
        assert out["meta_info"]["output_token_ids_logprobs"] == [[[logprob(9), 9, None], [logprob(4), 4, None]]] * 5
    first, second = generate(http, **body, token_ids_logprob=[None, [7]], return_text_in_logprobs=True)
    assert "output_token_ids_logprobs" not in first["meta_info"]
    one = [[logprob(7), 7, TOKENIZER.decode([7])]]
    assert second["meta_info"]["output_token_ids_logprobs"] == [one] * 5
    assert second["meta_info"]["input_token_ids_logprobs"] == [None, one]


def test_stop_regex_and_no_stop_trim(http: httpx.Client) -> None:
    """The fake scheduler repeats "abc" for ever; a pattern ends it behind the token that completes a match."""
    params = {"temperature": 0, "max_new_tokens": 500}
    ids = TOKENIZER("abc", add_special_tokens=False).input_ids
    whole = generate(http, input_ids=ids, sampling_params=params)["text"]
    out = generate(http, input_ids=ids, sampling_params={**params, "stop_regex": ["zz", "c.{3,5}b"]})
    assert out["meta_info"]["finish_reason"] == {"type": "stop", "matched": "c.{3,5}b"}
    assert out["text"] == whole[: len("abcabcab")]
    out = generate(http, input_ids=ids, sampling_params={**params, "stop": "bca"})
    assert out["text"] == "a"
    out = generate(http, input_ids=ids, sampling_params={**params, "stop": "bca", "no_stop_trim": True})
    assert out["text"] == "abca"
    out = generate(http, input_ids=ids, sampling_params={**params, "stop_token_ids": [ids[1]], "no_stop_trim": True})
    assert out["text"] == "ab"
    out = generate(http, input_ids=ids, sampling_params={**params, "stop_token_ids": [ids[1]]})
    assert out["text"] == "a"


def test_samples_of_a_prompt_are_neighbours(http: httpx.Client) -> None:
    params = {"temperature": 0, "max_new_tokens": 2, "n": 2}
    outs = generate(http, input_ids=[[7, 8], [9, 10]], sampling_params=params, rid=["a", "b"])
    assert [out["output_ids"] for out in outs] == [[7, 8], [7, 8], [9, 10], [9, 10]]
    assert [out["meta_info"]["id"] for out in outs] == ["a_0", "a_1", "b_0", "b_1"]
