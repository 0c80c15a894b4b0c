"""``/generate`` and ``Engine.generate``: SGLang's request object, single or batched, as a list of plain requests."""

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from sglang.srt.errors import RequestError
from sglang.srt.request_validation import convert, select_supported
from sglang.srt.sampling.sampling_params import MAX_PARALLEL_SAMPLES, SamplingParams, parse_sampling_params

T = TypeVar("T")

MAX_RID_CHARS = 1024

# Values that ask for nothing; the first is proposed to clients, and false is no value of most fields.
NOTHING: tuple[Any, ...] = ([], {}, False)
NOTHING_OF_FLAG: tuple[Any, ...] = (False, [], {})
# Fields of SGLang's request that this server does not act on, with what asks for nothing.
NEUTRAL_FIELDS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        (
            "input_embeds",
            "image_data",
            "video_data",
            "audio_data",
            "modalities",
            "lora_path",
            "lora_id",
            "custom_logit_processor",
            "session_id",
            "session_params",
            "bootstrap_host",
            "bootstrap_port",
            "bootstrap_room",
            "routed_dp_rank",
            "data_parallel_rank",
            "priority",
            "extra_key",
            "cache_salt",
        ),
        NOTHING,
    ),
    **dict.fromkeys(
        (
            "return_hidden_states",
            "return_routed_experts",
            "return_entropy",
            "return_prompt_token_ids",
            "require_reasoning",
            "background",
            "no_logs",
            "return_bytes",
        ),
        NOTHING_OF_FLAG,
    ),
    "log_metrics": (True,),
}


class GenerateReqInput(msgspec.Struct, kw_only=True):
    """The fields that are acted on, as JSON has them."""

    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None
    rid: str | list[str] | None = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: int | list[int] | None = None
    top_logprobs_num: int | list[int] | None = None
    token_ids_logprob: list[int | list[int] | None] | None = None
    return_text_in_logprobs: bool = False
    stream: bool = False
    model: str | None = None


@dataclass(frozen=True, kw_only=True)
class GenerateRequest:
    """One sequence to generate. Exactly one of ``text`` and ``input_ids`` is set.

    Attributes:
        rid: the client's name for it.
        max_new_tokens_given: the client chose ``max_new_tokens``; a default is cut to what the context has room for,
            a choice that doesn't fit is refused.
        logprob_start_len: first prompt position whose log-probability is wanted; -1 for none.
        token_ids_logprob: tokens whose log-probability is wanted at every position whose own is.
        return_text_in_logprobs: log-probabilities carry the token's text.
        add_special_tokens: tokenising ``text`` adds what the tokenizer puts around a prompt (BOS).
    """

    rid: str
    sampling_params: SamplingParams
    text: str | None = None
    input_ids: list[int] | None = None
    max_new_tokens_given: bool = False
    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: int = 0
    token_ids_logprob: Sequence[int] = ()
    return_text_in_logprobs: bool = False
    add_special_tokens: bool = True


@dataclass(frozen=True, kw_only=True)
class GenerateBatch:
    """The sequences of one call.

    Attributes:
        is_single: the answer is one object, not a list.
        model: the model that is asked for, if any is.
    """

    requests: list[GenerateRequest]
    is_single: bool = True
    stream: bool = False
    model: str | None = None


def new_rid() -> str:
    return uuid.uuid4().hex


def parse_generate_request(body: Mapping[str, Any], max_prompts: int | None = None) -> GenerateBatch:
    """SGLang's ``GenerateReqInput`` as JSON.

    ``sampling_params["n"]`` > 1 makes n sequences of every prompt, neighbours in the answer. More than ``max_prompts``
    are refused.

    Raises:
        RequestError: naming the field that is wrong.
    """
    fields = convert(select_supported(body, GenerateReqInput.__struct_fields__, NEUTRAL_FIELDS), GenerateReqInput)
    prompts, is_single = _prompts(fields)
    size = len(prompts)
    if max_prompts is not None and size > max_prompts:
        raise RequestError(f"One request may have {max_prompts} prompts, not {size}; send them in several requests.")
    given = _each("sampling_params", fields.sampling_params, {}, size)
    params = [parse_sampling_params(one) for one in given]
    n = _parallel_samples(params)
    is_single = is_single and n == 1
    rids = _rids(fields.rid, size, n, is_single)
    return_logprob = _each("return_logprob", fields.return_logprob, False, size)
    starts = _each("logprob_start_len", fields.logprob_start_len, -1, size)
    tops = _each("top_logprobs_num", fields.top_logprobs_num, 0, size)
    chosen = _chosen_ids(fields.token_ids_logprob, size)
    requests = []
    for i, prompt in enumerate(prompts):
        _check_logprob_fields(return_logprob[i], starts[i], tops[i], chosen[i])
        for sample in range(n):
            requests.append(
                GenerateRequest(
                    rid=rids[i * n + sample],
                    text=prompt if isinstance(prompt, str) else None,
                    input_ids=prompt if isinstance(prompt, list) else None,
                    sampling_params=params[i].sample(sample),
                    max_new_tokens_given=given[i].get("max_new_tokens") is not None,
                    return_logprob=return_logprob[i],
                    logprob_start_len=starts[i],
                    top_logprobs_num=tops[i],
                    token_ids_logprob=chosen[i],
                    return_text_in_logprobs=fields.return_text_in_logprobs,
                )
            )
    return GenerateBatch(requests=requests, is_single=is_single, stream=fields.stream, model=fields.model)


def _prompts(fields: GenerateReqInput) -> tuple[list[str | list[int]], bool]:
    if (fields.text is None) == (fields.input_ids is None):
        raise RequestError("Exactly one of 'text' and 'input_ids' should be provided.", "text")
    if fields.text is not None:
        if isinstance(fields.text, str):
            return [fields.text], True
        if not fields.text:
            raise RequestError("'text' is an empty list.", "text")
        return list(fields.text), False
    assert fields.input_ids is not None
    return split_token_prompts(fields.input_ids, "input_ids")


def split_token_prompts(ids: list[int | list[int]], name: str) -> tuple[list[str | list[int]], bool]:
    """Token ids of one prompt, or a list of prompts; and whether it is one."""
    single = [item for item in ids if isinstance(item, int)]
    if len(single) == len(ids):
        return [single], True
    batch: list[str | list[int]] = [item for item in ids if isinstance(item, list)]
    if len(batch) != len(ids):
        raise RequestError(f"'{name}' mixes token ids and lists of token ids.", name)
    return batch, False


def _each(name: str, value: T | list[T] | None, default: T, size: int) -> list[T]:
    """``value`` for every prompt."""
    if value is None:
        return [default] * size
    if not isinstance(value, list):
        return [value] * size
    if len(value) != size:
        raise RequestError(f"'{name}' has {len(value)} entries for {size} prompts.", name)
    return value


def _chosen_ids(value: list[int | list[int] | None] | None, size: int) -> list[list[int]]:
    """``token_ids_logprob`` of every prompt: one list for all, or one each (null for none)."""
    if value is None:
        return [[]] * size
    ids = [item for item in value if isinstance(item, int)]
    if len(ids) == len(value):
        return [ids] * size
    lists = [item or [] for item in value if not isinstance(item, int)]
    if len(lists) != len(value):
        raise RequestError("'token_ids_logprob' mixes token ids and lists of token ids.", "token_ids_logprob")
    return _each("token_ids_logprob", lists, [], size)


def _parallel_samples(params: list[SamplingParams]) -> int:
    n = params[0].n
    if any(other.n != n for other in params):
        raise RequestError("'n' must be the same in all 'sampling_params' of a batch.", "n")
    if n > 1 and n * len(params) > MAX_PARALLEL_SAMPLES:
        raise RequestError(
            f"{len(params)} prompts with n {n} are {n * len(params)} sequences; one request may ask for "
            f"{MAX_PARALLEL_SAMPLES}.",
            "n",
        )
    return n


def check_rid(rid: str | list[str] | None) -> None:
    """Raise RequestError if a name, of which every sequence gets a copy, is very long."""
    longest = max(map(len, rid), default=0) if isinstance(rid, list) else len(rid or "")
    if longest > MAX_RID_CHARS:
        raise RequestError(f"'rid' may have {MAX_RID_CHARS} characters, not {longest}.", "rid")


def _rids(rid: str | list[str] | None, size: int, n: int, is_single: bool) -> list[str]:
    check_rid(rid)
    count = size * n
    if rid is None:
        return [new_rid() for _ in range(count)]
    if isinstance(rid, str):
        return [rid] if is_single else [f"{rid}_{i}" for i in range(count)]
    if len(rid) != size:
        raise RequestError(f"'rid' has {len(rid)} entries for {size} prompts.", "rid")
    rids = rid if n == 1 else [f"{name}_{sample}" for name in rid for sample in range(n)]
    if len(set(rids)) != len(rids):
        raise RequestError("'rid' has duplicate entries.", "rid")
    return rids


def _check_logprob_fields(return_logprob: bool, start: int, top: int, chosen: Sequence[int]) -> None:
    if start < -1:
        raise RequestError(f"logprob_start_len must be at least -1, got {start}.", "logprob_start_len")
    if top < 0:
        raise RequestError(f"top_logprobs_num must be at least 0, got {top}.", "top_logprobs_num")
    if not return_logprob and (start != -1 or top or chosen):
        name = "top_logprobs_num" if top else "token_ids_logprob" if chosen else "logprob_start_len"
        raise RequestError(f"'{name}' asks for log-probabilities, but 'return_logprob' is not true.", name)
