"""Progress of what takes long at the start: a bar on a terminal, now and then a line in a log file."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Collection, Iterator
from typing import TypeVar

from tqdm import tqdm

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Between two lines of a log file.
_INTERVAL = 10.0


def progress_of(items: Collection[T], description: str, *, show: bool = True) -> Iterator[T]:
    """``items``, one by one. Nothing is shown unless ``show`` (only one rank should)."""
    if not show or sys.stderr.isatty():
        yield from tqdm(items, desc=description, disable=not show)
        return
    told = time.monotonic()
    for done, item in enumerate(items):
        if time.monotonic() - told >= _INTERVAL:
            told = time.monotonic()
            logger.info("%s: %d of %d", description, done, len(items))
        yield item
