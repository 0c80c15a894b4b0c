"""The fields of the server's arguments: what their annotations say, and the checks that follow from it."""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterable
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from sglang.srt.errors import ArgumentError
from sglang.srt.upstream_flags import REFUSED_VALUES

HIDDEN = "***"


@dataclass(frozen=True)
class Flag:
    """What the command line says about one field.

    ``names`` are its spellings, the first one is used in messages; empty means ``--`` and the field's name. Bounds
    are inclusive, except ``above`` (exclusive). ``bare`` is the value of a flag that is given without one. The value of
    a ``secret`` flag is never shown.
    """

    help: str
    names: tuple[str, ...] = ()
    minimum: int | None = None
    maximum: int | None = None
    above: int | None = None
    bare: str | None = None
    secret: bool = False


@dataclass(frozen=True)
class FieldSpec:
    """A field of :class:`ServerArgs` with everything its annotation says."""

    name: str
    flag: Flag
    type: type
    choices: tuple[str, ...]
    optional: bool
    required: bool
    default: Any  # None where it is computed
    several: bool = False  # a tuple of values of ``type``

    @property
    def names(self) -> tuple[str, ...]:
        return self.flag.names or ("--" + self.name.replace("_", "-"),)

    def check(self, value: Any) -> None:
        """Raise :class:`ArgumentError` unless ``value`` is of the field's type, a choice of it and in its range."""
        name = self.names[0]
        if value is None and self.optional:
            return
        if self.several:
            if not isinstance(value, tuple) or not value:
                raise ArgumentError(f"{name} must be one or several values, not {value!r}")
            for one in value:
                replace(self, several=False).check(one)
            return
        accepted = (int, float) if self.type is float else (self.type,)
        right_type = isinstance(value, accepted) and (self.type is bool or not isinstance(value, bool))
        if not right_type:
            kind = {int: "an integer", float: "a number", bool: "True or False", str: "a string"}[self.type]
            raise ArgumentError(f"{name} must be {kind}, not {HIDDEN if self.flag.secret else repr(value)}")
        if self.choices and value not in self.choices:
            refused = REFUSED_VALUES.get(self.name, {}).get(value)
            valid = ", ".join(self.choices)
            if refused:
                raise ArgumentError(f"{name} {value} {refused}; valid: {valid}")
            raise ArgumentError(
                f"{name}: unknown value {value!r}{suggestion(str(value), self.choices)}; valid: {valid}"
            )
        if self.type is str and not value.strip():
            raise ArgumentError(f"{name} must not be empty")
        if self.type in (int, float):
            self._check_range(name, value)

    def _check_range(self, name: str, value: float) -> None:
        low, high, above = self.flag.minimum, self.flag.maximum, self.flag.above
        # Written so that NaN fails every comparison.
        if low is not None and not value >= low:
            raise ArgumentError(f"{name} must be {low} or more, not {value}")
        if above is not None and not value > above:
            raise ArgumentError(f"{name} must be more than {above}, not {value}")
        if high is not None and not value <= high:
            raise ArgumentError(f"{name} must be {high} or less, not {value}")


def specs_of(arguments: type) -> tuple[FieldSpec, ...]:
    """The fields of a dataclass in the order of their declaration; each is annotated with a :class:`Flag`."""
    hints = get_type_hints(arguments, include_extras=True)
    specs = []
    for item in fields(arguments):
        inner, flag = get_args(hints[item.name])
        members = get_args(inner) if get_origin(inner) in (Union, types.UnionType) else (inner,)
        kinds = [member for member in members if member is not type(None)]
        choices = tuple(get_args(kinds[0])) if get_origin(kinds[0]) is Literal else ()
        several = get_origin(kinds[0]) is tuple
        kind = str if choices else get_args(kinds[0])[0] if several else kinds[0]
        missing = item.default is MISSING
        specs.append(
            FieldSpec(
                name=item.name,
                flag=flag,
                type=kind,
                choices=choices,
                optional=len(kinds) < len(members),
                required=missing and item.default_factory is MISSING,
                default=None if missing else item.default,
                several=several,
            )
        )
    return tuple(specs)


def suggestion(word: str, known: Iterable[str]) -> str:
    """``" (did you mean 'x'?)"`` for the nearest of ``known``; empty where none is near."""
    close = difflib.get_close_matches(word.lower(), list(known), n=1, cutoff=0.6)
    return f" (did you mean {close[0]!r}?)" if close else ""
