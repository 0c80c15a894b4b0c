"""What SGLang's own tests import from ``sglang.srt.utils``."""

import contextlib
import time

import psutil

KILL_TIMEOUT = 30.0


def get_device_sm() -> int:
    """Compute capability of the GPU as SGLang's tests compare it: 90 for 9.0, 100 for 10.0; 0 without a GPU."""
    from sglang.srt.platforms import device_capability, resolve_device

    major, minor = device_capability(resolve_device()) or (0, 0)
    return 10 * major + minor


def kill_process_tree(parent_pid: int, include_parent: bool = True) -> None:
    """End a process and all that descend from it by SIGKILL, and wait until none of them runs: their port and their
    memory are free then. A process that has ended already is none.

    Raises:
        RuntimeError: some still run ``KILL_TIMEOUT`` seconds later.
    """
    try:
        parent = psutil.Process(parent_pid)
        victims = parent.children(recursive=True)
    except psutil.NoSuchProcess:
        return
    if include_parent:
        victims.insert(0, parent)  # first: it could start others
    for victim in victims:
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.kill()
    deadline = time.monotonic() + KILL_TIMEOUT
    while running := [victim.pid for victim in victims if _runs(victim)]:
        if time.monotonic() > deadline:
            raise RuntimeError(f"processes {running} still run {KILL_TIMEOUT:g} s after SIGKILL")
        time.sleep(0.02)


def _runs(process: psutil.Process) -> bool:
    try:
        # A zombie is left to its parent: whoever reaped it here would take its status from subprocess.Popen. Until its
        # last thread has ended, it keeps its port.
        zombie = process.status() == psutil.STATUS_ZOMBIE and process.num_threads() <= 1
        return bool(process.is_running()) and not zombie
    except psutil.NoSuchProcess:
        return False
