"""What every choice of a backend has in common: names, reasons, priorities, and the words for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import ClassVar, Generic, Protocol, TypeVar


class Named(Protocol):
    """A backend's class, as far as the registry looks at it."""

    name: ClassVar[str]
    aliases: ClassVar[tuple[str, ...]]


B = TypeVar("B", bound=Named)


class BackendRegistry(Generic[B]):
    """The classes of one kind of backend.

    Attributes:
        kind: "FP4 GEMM" where the log says "FP4 GEMM backend: ...".
        names: every name and alias, and the class it stands for, in the order of registration.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.names: dict[str, type[B]] = {}

    def add(self, backend: type[B]) -> None:
        """Called for every new subclass; one without a ``name`` of its own is a base or a variation of another.

        Raises:
            TypeError: a name or an alias is taken ("auto" always is).
        """
        if "name" not in vars(backend):
            return
        names = (backend.name, *backend.aliases)
        for name in names:
            other = self.names.get(name)
            if name == "auto" or other is not None:
                taker = f"{self.kind} backend name {name!r} of {backend.__module__}"
                raise TypeError(f"{taker} is taken by {other or 'auto'}")
        self.names.update(dict.fromkeys(names, backend))

    def backends(self) -> dict[str, type[B]]:
        """The registered classes by name, in the order of registration."""
        return {name: backend for name, backend in self.names.items() if name == backend.name}

    def choice(self, name: str, asked: str, reasons: Mapping[str, str]) -> str:
        """What the log says of a choice.

        Args:
            name: the backend that was chosen.
            asked: what was requested, and where.
            reasons: the backends that can't run.
        """
        names_by_reason: dict[str, list[str]] = {}
        for other, reason in reasons.items():
            names_by_reason.setdefault(reason, []).append(other)
        passed_over = "; ".join(f"{', '.join(names)}: {reason}" for reason, names in names_by_reason.items())
        text = f"{self.kind} backend: {name} (requested: {asked})"
        return f"{text}. Not here: {passed_over}" if passed_over else text

    def refusal(self, asked: str, target: object, reasons: Mapping[str, str], names: Iterable[str]) -> str:
        """What is said of a named backend that can't run: every one of ``names`` with its reason."""
        lines = "\n".join(f"  {name}: {reasons.get(name, 'can run here')}" for name in names)
        return f"{asked} can't run on {target}. {self.kind} backends:\n{lines}"


def ranked(backends: Iterable[type[B]], priority: Callable[[type[B]], int]) -> list[type[B]]:
    """``backends`` in the order in which "auto" tries them: a higher priority first, a negative one never."""
    return sorted((one for one in backends if priority(one) >= 0), key=lambda one: -priority(one))
