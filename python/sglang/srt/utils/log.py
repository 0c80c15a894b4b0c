"""Logging in SGLang's format."""

import logging


def configure_logging(level: str, prefix: str = "") -> None:
    """Send every logger's records to stderr as ``[2026-01-01 00:00:00] text``.

    Args:
        level: debug, info, warning, error or critical.
        prefix: put behind the time, inside the brackets; a tensor-parallel rank passes ``" TP0"``.
    """
    logging.basicConfig(
        level=level.upper(),
        # A prefix is literal text, the format is %-style.
        format=f"[%(asctime)s{prefix.replace('%', '%%')}] %(message)s",
        datefmt="%Y-%m-%d %H:%M:%S",
        force=True,
    )
