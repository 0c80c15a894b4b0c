"""Few-shot GSM8K against a running server: ``python -m sglang.test.few_shot_gsm8k --port 30000``.

Prompts, stop strings, the extraction of answers and the keys of the result are SGLang's, so that accuracies compare.
As there, the problems that serve as shots are asked too.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from sglang.srt.utils.cli import run_main
from sglang.test.client import post_all
from sglang.test.gsm8k import INVALID, STOP, few_shot_prefix, last_number, load_problems, parse_options, take_options


@dataclass(frozen=True)
class Options:
    """``host`` with or without ``http://``; ``data_path``: see :func:`~sglang.test.gsm8k.load_problems`."""

    num_shots: int = 5
    data_path: str | None = None
    num_questions: int = 200
    max_new_tokens: int = 512
    parallel: int = 128
    host: str = "http://127.0.0.1"
    port: int = 30000
    temperature: float = 0.0


def run_eval(args: object) -> dict[str, float]:
    """Ask the first ``num_questions`` problems (all, where there are fewer) through ``/generate`` and print the result.

    Args:
        args: a namespace with fields of :class:`Options`.

    Returns:
        ``accuracy`` and ``invalid`` (answers without a number) as parts of all questions, ``latency`` in seconds,
        ``output_throughput`` in tokens per second.

    Raises:
        ArgumentError: an unknown field, or data that can't be used.
        StartupError: the server does not answer, or the data can't be fetched.
    """
    options = take_options(Options, args)
    problems = load_problems(options.data_path)
    prefix = few_shot_prefix(problems, options.num_shots)
    asked = problems[: options.num_questions]
    params = {"temperature": options.temperature, "max_new_tokens": options.max_new_tokens, "stop": STOP}
    bodies = [{"text": prefix + problem.asked(), "sampling_params": params} for problem in asked]
    host = options.host if "://" in options.host else f"http://{options.host}"

    begin = time.perf_counter()
    replies = post_all(f"{host}:{options.port}/generate", bodies, options.parallel)
    latency = time.perf_counter() - begin

    found = [last_number(reply["text"], r"\d+") for reply in replies]
    right = sum(value == last_number(problem.answer, r"\d+") for value, problem in zip(found, asked, strict=True))
    tokens = sum(reply["meta_info"]["completion_tokens"] for reply in replies)
    metrics = {
        "accuracy": right / len(asked),
        "invalid": found.count(INVALID) / len(asked),
        "latency": latency,
        "output_throughput": tokens / latency,
    }
    print(f"Accuracy: {metrics['accuracy']:.3f}")
    print(f"Invalid: {metrics['invalid']:.3f}")
    print(f"Latency: {latency:.3f} s")
    print(f"Output throughput: {metrics['output_throughput']:.3f} token/s")
    return metrics


def main(argv: Sequence[str] | None = None) -> None:
    """The command line; ``argv`` defaults to the process's."""
    run_eval(parse_options("python -m sglang.test.few_shot_gsm8k", __doc__ or "", Options, argv))


if __name__ == "__main__":
    run_main(main)
