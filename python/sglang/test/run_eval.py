"""GSM8K through ``/v1/completions``, as SGLang's newer tests ask for it:
``python -m sglang.test.run_eval --eval-name gsm8k --api completion --port 30000``.

Other evaluations of SGLang's module of this name, and its chat mode, are refused. As there, the problems that serve as
shots are not asked. Unlike there, a request that fails ends the run instead of counting as a wrong answer.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from sglang.srt.errors import ArgumentError
from sglang.srt.utils.cli import run_main
from sglang.test.client import post_all
from sglang.test.gsm8k import STOP, few_shot_prefix, last_number, load_problems, parse_options, take_options

NUMBER = r"-?\d+\.?\d*"


@dataclass(frozen=True)
class Options:
    """``base_url`` wins over ``host`` and ``port``; ``num_examples`` None: all; ``model`` None: what is served."""

    eval_name: str
    api: str = "chat"
    base_url: str | None = None
    host: str = "127.0.0.1"
    port: int = 30000
    model: str | None = None
    num_examples: int | None = None
    num_threads: int = 512
    num_shots: int = 5
    gsm8k_data_path: str | None = None
    max_tokens: int = 2048
    temperature: float = 0.0
    top_p: float = 1.0


def run_eval(args: object) -> dict[str, float]:
    """Run the evaluation that ``args`` names and print the result.

    Args:
        args: a namespace with fields of :class:`Options`.

    Returns:
        ``score`` (part of the answers that are right) and ``score:std``, ``latency`` in seconds, ``output_throughput``
        in tokens per second.

    Raises:
        ArgumentError: an unknown field or evaluation, or data that can't be used.
        StartupError: the server does not answer, or the data can't be fetched.
    """
    options = take_options(Options, args)
    if (options.eval_name, options.api) != ("gsm8k", "completion"):
        raise ArgumentError(
            f"eval_name={options.eval_name!r} with api={options.api!r} is not supported; there is eval_name='gsm8k' "
            "with api='completion'"
        )
    problems = load_problems(options.gsm8k_data_path)
    prefix = few_shot_prefix(problems, options.num_shots)
    asked = problems[options.num_shots :][: options.num_examples]
    if not asked:
        raise ArgumentError(f"--num-shots {options.num_shots}: no problem of {len(problems)} is left to ask")
    common = {
        "model": options.model or "default",
        "max_tokens": options.max_tokens,
        "temperature": options.temperature,
        "top_p": options.top_p,
        "stop": STOP,
    }
    base_url = options.base_url or f"http://{options.host}:{options.port}"

    begin = time.perf_counter()
    bodies = [{"prompt": prefix + problem.asked(), **common} for problem in asked]
    replies = post_all(f"{base_url}/v1/completions", bodies, options.num_threads)
    latency = time.perf_counter() - begin

    scores = [
        float(last_number(reply["choices"][0]["text"], NUMBER) == last_number(problem.answer, NUMBER))
        for reply, problem in zip(replies, asked, strict=True)
    ]
    tokens = sum(reply["usage"]["completion_tokens"] for reply in replies)
    metrics = {
        "score": statistics.fmean(scores),
        "score:std": statistics.pstdev(scores),
        "latency": latency,
        "output_throughput": tokens / latency,
    }
    print(f"Total latency: {latency:.3f} s")
    print(f"Score: {metrics['score']:.3f}")
    print(f"Output throughput: {metrics['output_throughput']:.3f} token/s")
    return metrics


def main(argv: Sequence[str] | None = None) -> None:
    """The command line; ``argv`` defaults to the process's."""
    run_eval(parse_options("python -m sglang.test.run_eval", __doc__ or "", Options, argv))


if __name__ == "__main__":
    run_main(main)
