"""What recorders of steps have in common: sizes, and what is said while they are recorded and where that fails."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch

from sglang.srt.errors import StartupError
from sglang.srt.model_executor.memory_plan import GB
from sglang.srt.platforms import available_memory, release_unused_memory
from sglang.srt.utils.progress import progress_of

logger = logging.getLogger(__name__)


class BaseCudaGraphRunner(ABC):
    """Records steps of some sizes at the start, and replays them.

    Attributes:
        sizes: what is recorded, ascending. A larger step is not for graphs.
        kind, log_name, unit: what they are called: on the progress bar, and as SGLang's log does with their sizes.
        step: such a step, with {} for its size.
        smaller, off: flags with which the largest size is a smaller one, and with which there are no graphs.
    """

    kind: ClassVar[str]
    log_name: ClassVar[str]
    unit: ClassVar[str]
    step: ClassVar[str]
    smaller: ClassVar[str]
    off: ClassVar[str]
    sizes: Sequence[int]

    @abstractmethod
    def record(self, size: int) -> object:
        """Record one size.

        Raises:
            GraphUnavailable: it can't be recorded here.
            RuntimeError: the device failed at it.
        """

    def record_all(self, sizes: Sequence[int] | None = None, show_progress: bool = True) -> None:
        """Record ``sizes`` (default: every one), the largest first: the others fit into its memory.

        Raises:
            StartupError: one could not be recorded; the text says which, why and what to do.
        """
        ordered = sorted(self.sizes if sizes is None else sizes, reverse=True)
        for size in progress_of(ordered, f"Capturing {self.kind} graphs", show=show_progress):
            try:
                self.record(size)
            except RuntimeError as error:
                raise StartupError(
                    f"{self.step.format(size)} could not be captured in a CUDA graph: {error}\n"
                    f"If memory is short, reduce {self.smaller} or --mem-fraction-static; {self.off} serves without "
                    "graphs, more slowly"
                ) from error

    def record_logged(self, device: torch.device, show_progress: bool) -> None:
        """Record every size on a GPU, with SGLang's lines in the log.

        Raises:
            StartupError: as :meth:`record_all`.
        """
        before, started = available_memory(device), time.perf_counter()
        name = self.log_name
        logger.info("Capture %s begin. This can take up to several minutes. avail mem=%.2f GB", name, before / GB)
        logger.info("Capture %s %s %s", name, self.unit, list(self.sizes))
        self.record_all(show_progress=show_progress)
        release_unused_memory(device)
        after = available_memory(device)
        logger.info(
            "Capture %s end. Time elapsed: %.2f s. mem usage=%.2f GB. avail mem=%.2f GB.",
            name, time.perf_counter() - started, (before - after) / GB, after / GB,
        )  # fmt: skip
