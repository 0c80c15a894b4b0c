"""A device that the host has to wait for."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import pytest
import torch

from sglang.srt.layers import logits_processor
from sglang.srt.managers import batch_result


class SlowDevice(threading.local):
    """A device that the host has to wait for: what is copied from it is nonsense until the copy's event is waited for.
    Each thread has its own.

    Attributes:
        log: ("launch", i) and ("read", i) of the i-th step, as they happened.
    """

    def __init__(self) -> None:
        self.log: list[tuple[str, int]] = []
        self._launched = 0
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def attach(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Stand behind the functions by which results reach the host."""
        monkeypatch.setattr(batch_result, "record_event", self.record_event)
        for module in (batch_result, logits_processor):
            monkeypatch.setattr(module, "to_host", self.to_host)

    def to_host(self, x: torch.Tensor) -> torch.Tensor:
        copy = torch.full_like(x, 10**6)
        self._copies.append((copy, x.clone()))
        return copy

    def record_event(self, device: torch.device) -> SlowEvent:
        event = SlowEvent(self, self._launched, self._copies)
        self.log.append(("launch", self._launched))
        self._launched, self._copies = self._launched + 1, []
        return event


@dataclass
class SlowEvent:
    device: SlowDevice
    step: int
    copies: list[tuple[torch.Tensor, torch.Tensor]]

    def synchronize(self) -> None:
        self.device.log.append(("read", self.step))
        for copy, values in self.copies:
            copy.copy_(values)
