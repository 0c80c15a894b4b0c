"""What a client may ask of sampling (SGLang's ``sampling_params``), validated once at the door."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from sglang.srt.errors import RequestError
from sglang.srt.request_validation import convert, select_supported

# Fields that SGLang knows and this server does not act on yet, with the value that asks for nothing.
# Any other value is refused by name: a parameter is never accepted and ignored.
NEUTRAL_VALUES: dict[str, Any] = {
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_new_tokens": 0,
    "n": 1,
    "json_schema": None,
    "regex": None,
    "ebnf": None,
    "structural_tag": None,
    "logit_bias": None,
    "sampling_seed": None,
    "custom_params": None,
    "stop_regex": None,
    "no_stop_trim": False,
    "stream_interval": None,
}

# SGLang's spelling of "the whole vocabulary" beside -1, and its smallest temperature that is not greedy.
TOP_K_ALL = 1 << 30
SAMPLING_EPS = 1e-6


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling of one request. Names and defaults are SGLang's; ``stop`` is always a tuple here.

    ``temperature`` 0 means greedy. ``top_k`` -1 means the whole vocabulary. ``max_new_tokens`` None means as many
    as the context has room for.
    """

    max_new_tokens: int | None = 128
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0 or self.top_k == 1


_NEUTRAL = {name: (value,) for name, value in NEUTRAL_VALUES.items()}

_RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "max_new_tokens": (lambda v: v is None or v >= 0, "at least 0"),
    "temperature": (lambda v: math.isfinite(v) and v >= 0.0, "a non-negative finite number"),
    "top_p": (lambda v: 0.0 < v <= 1.0, "in (0, 1]"),
    "top_k": (lambda v: v == -1 or v >= 1, "-1 (disabled) or at least 1"),
    "min_p": (lambda v: 0.0 <= v <= 1.0, "in [0, 1]"),
    "stop": (lambda v: "" not in v, "non-empty strings"),
    "stop_token_ids": (lambda v: all(0 <= i < 1 << 31 for i in v), "token ids (not negative)"),
    # A fast tokenizer never puts spaces between special tokens, so there is nothing that False could switch off.
    "spaces_between_special_tokens": (lambda v: v is True, "true"),
}


def parse_sampling_params(params: Mapping[str, Any]) -> SamplingParams:
    """A client's ``sampling_params`` dictionary, validated. A field that is null has its default.

    Raises:
        RequestError: unknown field, wrong type or out of range; ``param`` names the field.
    """
    if not isinstance(params, Mapping):
        raise RequestError(f"'sampling_params' must be an object, got {type(params).__name__}.", "sampling_params")
    given = select_supported(params, SamplingParams.__struct_fields__, _NEUTRAL)
    given = {name: value for name, value in given.items() if value is not None or name == "max_new_tokens"}
    if isinstance(given.get("stop"), str):
        given["stop"] = (given["stop"],)
    parsed = convert(given, SamplingParams)
    for name in given:
        valid, wanted = _RANGES.get(name, (None, ""))
        if valid is not None and not valid(getattr(parsed, name)):
            raise RequestError(f"{name} must be {wanted}, got {given[name]!r}.", name)
    if parsed.temperature < SAMPLING_EPS:
        parsed = msgspec.structs.replace(parsed, temperature=0.0)
    if parsed.top_k >= TOP_K_ALL:
        parsed = msgspec.structs.replace(parsed, top_k=-1)
    return parsed
