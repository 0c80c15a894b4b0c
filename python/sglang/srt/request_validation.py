"""Turning a decoded JSON object into a typed request, with errors that name the offending field.

The rule everywhere: a field is acted on, or it is known and asks for nothing, or the request is refused by name.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

import msgspec

from sglang.srt.errors import RequestError
from sglang.srt.upstream_flags import UPSTREAM_FIELDS

T = TypeVar("T")

_UPSTREAM = frozenset[str]().union(*UPSTREAM_FIELDS.values())

_ERROR_WITH_PATH = re.compile(r"(?P<what>.*?)(?: - at `\$\.?(?P<path>.*)`)?", re.DOTALL)


def convert(value: object, target: type[T]) -> T:
    """``value`` (what a JSON decoder returns) as ``target``.

    Raises:
        RequestError: a wrong type or a missing field; ``param`` is the path to it.
    """
    try:
        return msgspec.convert(value, target)
    except msgspec.ValidationError as error:
        match = _ERROR_WITH_PATH.fullmatch(str(error))
        assert match is not None  # the pattern matches any text
        what, path = match["what"], match["path"] or None
        raise RequestError(f"'{path}': {what}" if path else what, path) from None


def select_supported(
    body: Mapping[str, Any], supported: Collection[str], neutral: Mapping[str, tuple[Any, ...]]
) -> dict[str, Any]:
    """The fields of ``body`` that are acted on.

    Args:
        supported: names of those fields.
        neutral: known fields that are not acted on, each with the values that ask for nothing (null always does); of
            SGLang's other fields only null does. The first is what a refusal proposes, or null if it is a container.

    Raises:
        RequestError: a known field asks for something, or a field is unknown.
    """
    kept: dict[str, Any] = {}
    for name, value in body.items():
        if name in supported:
            kept[name] = value
        elif name not in neutral and name not in _UPSTREAM:
            raise RequestError(f"Unrecognized request argument supplied: {name}", name)
        elif value is not None and value not in neutral.get(name, ()):
            first = next(iter(neutral.get(name, ())), None)
            accepted = "null" if first in (None, [], {}) else repr(first)
            raise RequestError(f"'{name}' is not supported by this server: leave it out or send {accepted}.", name)
    return kept


def decode_json_object(data: bytes) -> dict[str, Any]:
    """The JSON object in a request body.

    Raises:
        RequestError: not JSON, or JSON but not an object.
    """
    try:
        body = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"The request body is not valid JSON: {error}") from None
    except RecursionError:
        raise RequestError("The request body is nested too deeply.") from None
    if not isinstance(body, dict):
        raise RequestError(f"The request body must be a JSON object, got {type(body).__name__}.")
    return body
