"""What the HTTP process reads of its children."""

import multiprocessing
import os
import struct
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
