"""What a client may ask of sampling (SGLang's ``sampling_params``), validated once at the door."""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from sglang.srt.errors import RequestError
from sglang.srt.request_validation import convert, select_supported
from sglang.srt.sampling.stop_regex import MAX_PATTERNS, compile_stop_regex

# Fields that SGLang knows and this server does not act on, with the value that asks for nothing.
# Any other value is refused by name: a parameter is never accepted and ignored.
NEUTRAL_VALUES: dict[str, Any] = {
    "custom_params": None,
    "stream_interval": None,
}

# At most one of them may be set; they say what the output has to look like.
GRAMMAR_FIELDS = ("json_schema", "regex", "ebnf", "structural_tag")

# SGLang's spelling of "the whole vocabulary" beside -1, and its smallest temperature that is not greedy.
TOP_K_ALL = 1 << 30
SAMPLING_EPS = 1e-6
# Sequences that one call may ask for with n; each is a request of its own.
MAX_PARALLEL_SAMPLES = 16384
# Every character of an output is compared with each of them.
MAX_STOPS, MAX_STOP_CHARS = 128, 1 << 16
# Smaller factors and larger biases leave float32, and the row would count as broken.
SMALLEST_REPETITION_PENALTY = 1e-6
LARGEST_LOGIT_BIAS = 1e30
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling of one request. Names and defaults are SGLang's; ``stop`` and ``stop_regex`` are always tuples here.

    ``temperature`` 0 means greedy. ``top_k`` -1 means the whole vocabulary. ``max_new_tokens`` None means as many
    as the context has room for. ``n`` is 1 in what is sent to the scheduler: see :meth:`sample`.
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
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    n: int = 1
    logit_bias: dict[str, float] | None = None
    sampling_seed: int | None = None
    no_stop_trim: bool = False
    stop_regex: tuple[str, ...] = ()
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0 or self.top_k == 1

    @property
    def has_penalties(self) -> bool:
        """Some penalty depends on what was generated."""
        return (self.frequency_penalty, self.presence_penalty, self.repetition_penalty) != (0.0, 0.0, 1.0)

    def sample(self, index: int) -> "SamplingParams":
        """The parameters of sequence ``index`` of ``n``: each has a seed of its own, the first one the request's."""
        seed = self.sampling_seed
        if seed is not None:
            seed = (seed + index + (1 << 63)) % (1 << 64) - (1 << 63)
        return msgspec.structs.replace(self, n=1, sampling_seed=seed)


_NEUTRAL = {name: (value,) for name, value in NEUTRAL_VALUES.items()}

_RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "max_new_tokens": (lambda v: v is None or v >= 0, "at least 0"),
    "temperature": (lambda v: math.isfinite(v) and v >= 0.0, "a non-negative finite number"),
    "top_p": (lambda v: 0.0 < v <= 1.0, "in (0, 1]"),
    "top_k": (lambda v: v == -1 or v >= 1, "-1 (disabled) or at least 1"),
    "min_p": (lambda v: 0.0 <= v <= 1.0, "in [0, 1]"),
    "stop": (
        lambda v: "" not in v and len(v) <= MAX_STOPS and sum(map(len, v)) <= MAX_STOP_CHARS,
        f"at most {MAX_STOPS} non-empty strings, together of at most {MAX_STOP_CHARS} characters",
    ),
    "stop_regex": (lambda v: "" not in v and len(v) <= MAX_PATTERNS, f"at most {MAX_PATTERNS} non-empty patterns"),
    "stop_token_ids": (lambda v: all(0 <= i < 1 << 31 for i in v), "token ids (not negative)"),
    "frequency_penalty": (lambda v: -2.0 <= v <= 2.0, "in [-2, 2]"),
    "presence_penalty": (lambda v: -2.0 <= v <= 2.0, "in [-2, 2]"),
    "repetition_penalty": (
        lambda v: SMALLEST_REPETITION_PENALTY <= v <= 2.0,
        f"in (0, 2] (1.0 = no penalty) and at least {SMALLEST_REPETITION_PENALTY:g}",
    ),
    "min_new_tokens": (lambda v: v >= 0, "at least 0"),
    "n": (lambda v: 1 <= v <= MAX_PARALLEL_SAMPLES, f"at least 1 and at most {MAX_PARALLEL_SAMPLES}"),
    "sampling_seed": (lambda v: -(1 << 63) <= v < 1 << 63, "an integer of 64 bits"),
    "logit_bias": (
        lambda v: all(_TOKEN_ID.fullmatch(key) and abs(bias) <= LARGEST_LOGIT_BIAS for key, bias in v.items()),
        f"an object that maps token ids (as text) to numbers of at most {LARGEST_LOGIT_BIAS:g} either way",
    ),
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
    for name in ("stop", "stop_regex"):
        if isinstance(given.get(name), str):
            given[name] = (given[name],)
    if isinstance(given.get("logit_bias"), Mapping):  # Python callers have integer keys
        given["logit_bias"] = {str(token_id): bias for token_id, bias in given["logit_bias"].items()}
    parsed = convert(given, SamplingParams)
    for name in given:
        valid, wanted = _RANGES.get(name, (None, ""))
        if valid is not None and not valid(getattr(parsed, name)):
            raise RequestError(f"{name} must be {wanted}, got {_shortened(given[name])}.", name)
    if parsed.max_new_tokens is not None and parsed.min_new_tokens > parsed.max_new_tokens:
        raise RequestError(
            f"min_new_tokens must be in [0, max_new_tokens({parsed.max_new_tokens})], got {parsed.min_new_tokens}.",
            "min_new_tokens",
        )
    if len(grammars := [name for name in GRAMMAR_FIELDS if getattr(parsed, name) is not None]) > 1:
        raise RequestError(f"Only one of {', '.join(GRAMMAR_FIELDS)} can be set, got {grammars}.", grammars[1])
    for pattern in parsed.stop_regex:
        compile_stop_regex(pattern)
    if parsed.temperature < SAMPLING_EPS:
        parsed = msgspec.structs.replace(parsed, temperature=0.0)
    if parsed.top_k >= TOP_K_ALL:
        parsed = msgspec.structs.replace(parsed, top_k=-1)
    return parsed


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
