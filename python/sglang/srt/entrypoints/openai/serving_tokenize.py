"""``/tokenize`` and ``/detokenize``."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from sglang.srt.entrypoints.openai.protocol import DEFAULT_MODEL_NAME
from sglang.srt.errors import RequestError
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.request_validation import convert, select_supported


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """SGLang's request with a ``prompt``. With ``messages`` instead, it is a chat completion's."""

    prompt: str | list[str]
    model: str = DEFAULT_MODEL_NAME
    add_special_tokens: bool = True


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """SGLang's request: the tokens of one text or of several."""

    tokens: list[int | list[int]]
    model: str = DEFAULT_MODEL_NAME
    skip_special_tokens: bool = True


async def tokenize(manager: TokenizerManager, request: TokenizeRequest) -> dict[str, Any]:
    """SGLang's answer: ``tokens``, ``count`` (lists of them for several prompts), ``max_model_len``."""
    texts = [request.prompt] if isinstance(request.prompt, str) else request.prompt
    ids = [await manager.encode(text, "prompt", add_special_tokens=request.add_special_tokens) for text in texts]
    return tokens_answer(manager, ids[0] if isinstance(request.prompt, str) else ids)


def tokens_answer(manager: TokenizerManager, tokens: list[int] | list[list[int]]) -> dict[str, Any]:
    counts = [len(item) for item in tokens if isinstance(item, list)]
    several = bool(counts) or not tokens
    return {"tokens": tokens, "count": counts if several else len(tokens), "max_model_len": manager.context_len}


async def detokenize(manager: TokenizerManager, request: DetokenizeRequest) -> dict[str, Any]:
    """SGLang's answer: ``text``, a list for several.

    Raises:
        RequestError: the list mixes tokens and lists, or has a token that the vocabulary has not.
    """
    lists = [item for item in request.tokens if isinstance(item, list)]
    if lists and len(lists) < len(request.tokens):
        raise RequestError("'tokens' mixes token ids and lists of token ids.", "tokens")
    several = lists or [[item for item in request.tokens if isinstance(item, int)]]
    for ids in several:
        manager.check_token_ids(ids, "tokens")
    skip = request.skip_special_tokens
    texts = await asyncio.to_thread(
        lambda: [manager.tokenizer.decode(ids, skip_special_tokens=skip) for ids in several]
    )
    return {"text": texts if lists else texts[0]}


R = TypeVar("R", TokenizeRequest, DetokenizeRequest)


def parse_request(body: Mapping[str, Any], target: type[R]) -> R:
    """Raises RequestError naming the field that is wrong or unknown."""
    given = {name: value for name, value in body.items() if value is not None}
    return convert(select_supported(given, target.__struct_fields__, {}), target)
