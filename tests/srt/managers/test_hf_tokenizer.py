"""Text to token ids while others work."""

import threading
import time

from http_server_thread import FIXTURE
from sglang.srt.managers.hf_tokenizer import encode, get_tokenizer

TOKENIZER = get_tokenizer(str(FIXTURE))


def test_ids_are_those_of_the_tokenizer() -> None:
    for text in ("hello world", "", "Ünïcode \U0001f600 \x00 text\n\n", "a" * 500):
        for special in (True, False):
            want = TOKENIZER.encode(text, add_special_tokens=special)
            assert encode(TOKENIZER, text, add_special_tokens=special) == want


def test_other_threads_run_meanwhile() -> None:
    """With the GIL held they could not, and one long prompt would stop the whole server."""
    turns = 0
    counted: list[int] = []

    def work() -> None:
        before = turns
        encode(TOKENIZER, "hello world " * 20_000)
        counted.append(turns - before)

    thread = threading.Thread(target=work)
    thread.start()
    while thread.is_alive():
        turns += 1
        time.sleep(0.001)
    thread.join()
    assert counted[0] > 10
