"""The tokenizer manager's way to a scheduler that a test plays."""

from collections.abc import Callable
from typing import Any

from sglang.srt.managers.io_struct import ToTokenizer


class FakeChannel:
    """Keeps what is sent; ``receive`` takes what the scheduler says."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def start(self, receive: Callable[[ToTokenizer], None]) -> None:
        self.receive = receive

    def send(self, message: Any) -> None:
        self.sent.append(message)
