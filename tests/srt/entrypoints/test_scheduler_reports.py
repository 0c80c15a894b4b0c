"""What the HTTP process reads of its children."""

import multiprocessing
import os
import struct
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Connection

import uvloop

from sglang.srt.entrypoints.scheduler_process import _readable


def test_a_report_that_comes_in_pieces() -> None:
    """The server's event loop says that it can be read when its beginning has come."""
    reader, writer = multiprocessing.Pipe(duplex=False)
    text = b"x" * 5000

    def send() -> None:
        time.sleep(0.05)  # after the loop has begun to watch
        os.write(writer.fileno(), struct.pack("!i", len(text)) + text[:1000])
        time.sleep(0.2)
        os.write(writer.fileno(), text[1000:])

    async def receive() -> list[Connection]:
        return await _readable(reader)

    loop = uvloop.new_event_loop()
    thread = threading.Thread(target=send)
    thread.start()
    assert loop.run_until_complete(receive()) == [reader]
    assert reader.recv_bytes() == text
    thread.join()
    loop.close()


def test_a_scheduler_process_begins_without_torch() -> None:
    """What it reads first; that a scheduler needs more is the scheduler's affair, and tests have one that does not."""
    code = "import sys, sglang.srt.entrypoints.scheduler_process; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
