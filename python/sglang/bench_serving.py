"""``python -m sglang.bench_serving``: see :mod:`sglang.benchmark.serving`."""

from sglang.benchmark.serving import main
from sglang.srt.utils.cli import run_main

if __name__ == "__main__":
    run_main(main)
