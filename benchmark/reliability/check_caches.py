"""Cache folders that can't be written, and one that two servers fill at once."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from rows import Row, none_of
from servers import Server, Setup, end, launch, running, wait_ready

TUNING = "--fp4-gemm-autotune=on"
BODY = {"text": "Once upon a time", "sampling_params": {"max_new_tokens": 16, "temperature": 0, "ignore_eos": True}}


@contextlib.contextmanager
def _full() -> Iterator[Path | None]:
    """A file system of 64 KiB; None where it may not be mounted."""
    folder = Path(tempfile.mkdtemp(prefix="reliability-full-"))
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True).returncode:
        yield None
        return
    try:
        (folder / "filler").write_bytes(bytes(48 << 10))
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@contextlib.contextmanager
def _read_only() -> Iterator[Path | None]:
    """A folder in which nothing can be made, root's rights or not: files stand in the places of its folders."""
    folder = Path(tempfile.mkdtemp(prefix="reliability-read-only-"))
    for name in ("kernels", "fp4_autotune"):
        (folder / name).write_text("")
    folder.chmod(0o555)
    yield folder


@contextlib.contextmanager
def _no_rights() -> Iterator[Path | None]:
    """Where the kernel lets nobody make a folder."""
    yield Path("/proc/sglang-cache")


def _complaints(server: Server, folder: Path) -> list[str]:
    return [line for line in server.log.splitlines() if str(folder) in line and "can't be" in line]


def _text(server: Server) -> str:
    answer = server.post("/generate", BODY)
    return answer.json()["text"] if answer.status_code == 200 else f"{answer.status_code} {answer.text}"


def caches_unusable(setup: Setup) -> Iterator[Row]:
    check = "cache folder"
    with running(setup, TUNING) as server:
        wanted = _text(server)
    kinds: tuple[tuple[str, Callable[[], contextlib.AbstractContextManager[Path | None]]], ...] = (
        ("full", _full), ("read-only", _read_only), ("without rights", _no_rights),
    )  # fmt: skip
    for name, make in kinds:
        with make() as folder:
            if folder is None:
                continue
            try:
                with running(setup, TUNING, SGLANG_CACHE_DIR=str(folder)) as server:
                    text = _text(server)
                    warnings = _complaints(server, folder)
                    faults = server.faults_in_log()
            except RuntimeError as error:
                yield none_of(check, [str(error)[-600:]], f"A server whose cache folder is {name} does not start.")
                continue
        yield none_of(check, [] if text == wanted else [text], f"{name}: another text than with a good one.")
        what = f"{name}: warnings that name it.{' The first: ' + warnings[0][-250:] if warnings else ''}"
        yield Row(check, len(warnings), 1, "warnings", what, at_least=True)
        yield Row(check, len(warnings), 1, "warnings", f"{name}: no more than one.")
        yield none_of(check, faults, f"{name}: errors in the log.")


def caches_shared(setup: Setup) -> Iterator[Row]:
    check = "two servers, one empty cache"
    folder = Path(tempfile.mkdtemp(prefix="reliability-cache-"))
    servers = [launch(setup, TUNING, SGLANG_CACHE_DIR=str(folder)) for _ in range(2)]
    try:
        for server in servers:
            wait_ready(server)
        texts = [_text(server) for server in servers]
        faults = [line for server in servers for line in server.faults_in_log()]
    finally:
        for server in servers:
            end(server)
    files = _files(folder)
    with running(setup, TUNING, SGLANG_CACHE_DIR=str(folder)) as server:
        texts.append(_text(server))
        complaints = _complaints(server, folder)
    yield Row(check, len(files), 1, "files", "Kept by two first starts at the same time.", at_least=True)
    yield none_of(check, sorted(set(texts))[1:], "Texts that differ between the two, or from a third one's.")
    changed = [f"{path}" for path, state in _files(folder).items() if files.get(path) != state]
    yield none_of(check, changed, "Files that a third start made or replaced.")
    yield none_of(check, complaints + faults, "Warnings of the third, errors of the two.")
    scraps = [str(path) for path in files if path.suffix == ".tmp"]
    yield none_of(check, scraps, "Temporary files that are left.")


def _files(folder: Path) -> dict[Path, bytes]:
    paths = [Path(root) / name for root, _, names in os.walk(folder) for name in names if not name.endswith(".lock")]
    return {path: path.read_bytes() for path in paths}
