"""``python -m sglang.bench_one_batch``: see :mod:`sglang.benchmark.one_batch`."""

from sglang.benchmark.one_batch import main
from sglang.srt.utils.cli import run_main

if __name__ == "__main__":
    run_main(main)
