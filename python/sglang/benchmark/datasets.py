"""Requests to benchmark with. Nothing is downloaded: prompts are random tokens, or come from a file that is given."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sglang.srt.errors import ArgumentError

ASSISTANT_SUFFIX = "Assistant:"

DATASETS = ("sharegpt", "random", "random-ids", "generated-shared-prefix")
REFUSED_DATASETS = (
    "agentic-trace", "custom", "image", "longbench_v2", "mmmu", "mooncake", "openai", "speed-bench",
)  # fmt: skip


@dataclass(frozen=True)
class DatasetRow:
    """One request. ``prompt`` is text or token ids; the lengths are tokens, ``output_len`` the most new ones."""

    prompt: str | list[int]
    prompt_len: int
    output_len: int


def get_dataset(args: argparse.Namespace, tokenizer: Any, rng: np.random.RandomState) -> list[DatasetRow]:
    """The requests that ``--dataset-name`` and its flags ask for; the same for the same seed.

    Raises:
        ArgumentError: a file is missing, unreadable or has too few conversations, or flags contradict each other.
    """
    load: Callable[[argparse.Namespace, Any, np.random.RandomState], list[DatasetRow]] = {
        "sharegpt": _sharegpt,
        "generated-shared-prefix": _generated_shared_prefix,
    }.get(args.dataset_name, _random)
    rows = load(args, tokenizer, rng)
    print(f"#Input tokens: {sum(row.prompt_len for row in rows)}")
    print(f"#Output tokens: {sum(row.output_len for row in rows)}")
    return rows


def _random_lens(rng: np.random.RandomState, full_len: int, range_ratio: float, num: int) -> list[int]:
    lens: list[int] = rng.randint(max(int(full_len * range_ratio), 1), full_len + 1, size=num).tolist()
    return lens


def _random(args: argparse.Namespace, tokenizer: Any, rng: np.random.RandomState) -> list[DatasetRow]:
    count, as_text = args.num_prompts, not args.tokenize_prompt
    input_lens = _random_lens(rng, args.random_input_len, args.random_range_ratio, count)
    output_lens = _random_lens(rng, args.random_output_len, args.random_range_ratio, count)
    if as_text:  # the server adds its special tokens
        special = int(tokenizer.num_special_tokens_to_add())
        input_lens = [max(1, n - special) for n in input_lens]
    if args.dataset_name == "random" and args.dataset_path:
        texts = [prompt for prompt, _ in _conversations(args.dataset_path, rng)]
        sources = [ids for ids in (tokenizer.encode(text) for text in texts) if ids][:count]
        if len(sources) < count:
            raise ArgumentError(
                f"--dataset-path {args.dataset_path} has {len(sources)} usable conversations, --num-prompts asks for "
                f"{count}"
            )
        prompts = [(ids * (n // len(ids) + 1))[:n] for ids, n in zip(sources, input_lens, strict=True)]
    else:
        if args.dataset_name == "random":
            print("No --dataset-path: the prompts are made of token ids of the vocabulary, as with random-ids.")
        size = int(tokenizer.vocab_size)
        offsets = rng.randint(0, size, size=count).tolist()
        prompts = [[(offsets[i] + i + j) % size for j in range(n)] for i, n in enumerate(input_lens)]
    return [
        DatasetRow(tokenizer.decode(ids) if as_text else ids, prompt_len, output_len)
        for ids, prompt_len, output_len in zip(prompts, input_lens, output_lens, strict=True)
    ]


def _conversations(path: str, rng: np.random.RandomState) -> list[tuple[str, str]]:
    """First prompt and first answer of each conversation in a ShareGPT file, in random order."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        turns = [each.get("conversations", each.get("conversation", [])) for each in data]
        found = [(str(turn[0]["value"]), str(turn[1]["value"])) for turn in turns if len(turn) >= 2]
    except OSError as error:
        raise ArgumentError(f"--dataset-path {path} can't be read: {error.strerror}") from None
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise ArgumentError(
            f"--dataset-path {path} is no ShareGPT file, which is a JSON list of objects with a list 'conversations' "
            f"of objects with 'value': {type(error).__name__}: {error}"
        ) from None
    order = rng.permutation(len(found)).tolist()
    return [found[i] for i in order]


def _sharegpt(args: argparse.Namespace, tokenizer: Any, rng: np.random.RandomState) -> list[DatasetRow]:
    if not args.dataset_path:
        raise ArgumentError(
            "--dataset-name sharegpt needs --dataset-path with a ShareGPT JSON file, this command downloads nothing; "
            "--dataset-name random works without a file"
        )
    rows: list[DatasetRow] = []
    for text, answer in _conversations(args.dataset_path, rng):
        if len(rows) == args.num_prompts:
            break
        prompt = text
        if args.prompt_suffix:
            prompt = prompt.removesuffix(ASSISTANT_SUFFIX) + args.prompt_suffix + ASSISTANT_SUFFIX
        if args.apply_chat_template:
            messages = [{"role": "user", "content": prompt}]
            prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            # The server adds it again.
            prompt = prompt.replace(tokenizer.bos_token, "") if tokenizer.bos_token else prompt
        ids = tokenizer.encode(prompt)
        output_len = args.sharegpt_output_len or len(tokenizer.encode(answer))
        # SGLang's limits: what is too short to time, or too long for the model.
        if len(ids) < 2 or output_len < 2:
            continue
        if args.sharegpt_context_len and len(ids) + output_len > args.sharegpt_context_len:
            continue
        rows.append(DatasetRow(ids if args.tokenize_prompt else prompt, len(ids), output_len))
    if not rows:
        raise ArgumentError(f"--dataset-path {args.dataset_path} has no conversation that can be used")
    return rows


def _generated_shared_prefix(args: argparse.Namespace, tokenizer: Any, rng: np.random.RandomState) -> list[DatasetRow]:
    """``--gsp-num-groups`` system prompts, each in front of ``--gsp-prompts-per-group`` questions."""
    vocabulary = np.array(sorted(tokenizer.get_vocab().values()))

    def draw(length: int) -> list[int]:
        ids: list[int] = vocabulary[rng.randint(0, len(vocabulary), size=length)].tolist()
        return ids

    def lens(full_len: int, num: int) -> list[int]:
        return _random_lens(rng, full_len, args.gsp_range_ratio, num)

    groups, each = args.gsp_num_groups, args.gsp_prompts_per_group
    systems = [draw(n) for n in lens(args.gsp_system_prompt_len, groups)]
    questions = [draw(n) for n in lens(args.gsp_question_len, groups * each)]
    rows = []
    for i, output_len in enumerate(lens(args.gsp_output_len, groups * each)):
        system, question = systems[i // each], questions[i]
        if args.tokenize_prompt:
            rows.append(DatasetRow(system + question, len(system) + len(question), output_len))
        else:
            text = f"{tokenizer.decode(system)}\n\n{tokenizer.decode(question)}"
            rows.append(DatasetRow(text, len(tokenizer.encode(text)), output_len))
    if not args.gsp_ordered:
        rows = [rows[i] for i in rng.permutation(len(rows)).tolist()]
    return rows
