"""What a client may ask of sampling (SGLang's ``sampling_params``), validated once at the door."""

from typing import Any

import msgspec

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
}


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling of one request. Names and defaults are SGLang's; ``stop`` is always a tuple here.

    ``temperature`` 0 means greedy. ``top_k`` -1 means the whole vocabulary.
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
