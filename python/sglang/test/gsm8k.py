"""GSM8K as few-shot text completion: the problems, the prompts, the number in an answer, and the options of a run."""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import os
import re
import tempfile
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

from sglang.srt.environ import envs
from sglang.srt.errors import ArgumentError, StartupError
from sglang.srt.utils.cli import ArgumentParser

# The value of an answer without a number; no label has it.
INVALID = -9999999
# Where the model would go on with a problem of its own.
STOP = ["Question", "Assistant:", "<|separator|>"]

DATASET = "openai/gsm8k"
DATASET_FILE = "main/test-00000-of-00001.parquet"

T = TypeVar("T")


@dataclass(frozen=True)
class Problem:
    """One line of the data set; ``answer`` ends in the number that counts."""

    question: str
    answer: str

    def asked(self) -> str:
        return f"Question: {self.question}\nAnswer:"

    def solved(self) -> str:
        return f"{self.asked()} {self.answer}\n\n"


def few_shot_prefix(problems: Sequence[Problem], shots: int) -> str:
    """The first ``shots`` problems, solved.

    Raises:
        ArgumentError: there are fewer.
    """
    if not 0 <= shots <= len(problems):
        raise ArgumentError(f"--num-shots {shots}: the data has {len(problems)} problems")
    return "".join(problem.solved() for problem in problems[:shots])


def last_number(text: str, pattern: str) -> float:
    """The last match of ``pattern`` in ``text`` without thousands separators, as a number; ``INVALID`` if there is
    none, or one that Python does not write so (007)."""
    numbers = re.findall(pattern, text.replace(",", ""))
    try:
        value: float = ast.literal_eval(numbers[-1])
    except (IndexError, SyntaxError):
        return INVALID
    return value


def load_problems(data_path: str | None) -> list[Problem]:
    """The problems in ``data_path`` (JSON lines with ``question`` and ``answer``); None: GSM8K's test split, fetched
    from the Hugging Face hub at the first time and kept below ``SGLANG_CACHE_DIR``.

    Raises:
        ArgumentError: the file can't be read; the text names its line.
        StartupError: the data set can't be fetched.
    """
    if data_path is not None:
        return _read(Path(data_path))
    cached = envs.SGLANG_CACHE_DIR.get() / "gsm8k" / "test.jsonl"
    if not cached.exists():
        _fetch(cached)
    return _read(cached)


def _read(path: Path) -> list[Problem]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"--data-path {path}: {error}") from None
    problems = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except ValueError:
            entry = None
        question, answer = (entry.get("question"), entry.get("answer")) if isinstance(entry, dict) else (None, None)
        if not isinstance(question, str) or not isinstance(answer, str) or last_number(answer, r"\d+") == INVALID:
            raise ArgumentError(
                f'--data-path {path}, line {number}: expected {{"question": text, "answer": text with a number}}'
            )
        problems.append(Problem(question, answer))
    if not problems:
        raise ArgumentError(f"--data-path {path} has no problems")
    return problems


def _fetch(path: Path) -> None:
    instead = 'or give --data-path FILE, JSON lines {"question": ..., "answer": ...}'
    try:
        parquet: Any = importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise StartupError(f"GSM8K's file on the hub is Parquet: pip install pyarrow, {instead}") from None
    from huggingface_hub import hf_hub_download

    try:
        source = hf_hub_download(DATASET, DATASET_FILE, repo_type="dataset")
    except Exception as error:  # the hub's client raises many types
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise StartupError(f"can't fetch {DATASET} from the hub ({reason}): check the network, {instead}") from error
    rows = parquet.read_table(source, columns=["question", "answer"]).to_pylist()
    path.parent.mkdir(parents=True, exist_ok=True)
    # Under its name it is complete, whatever ends this process.
    handle, part = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    Path(part).replace(path)


def take_options(kind: type[T], args: object) -> T:
    """``kind``, a dataclass, with the attributes of ``args`` (a namespace) where it has them.

    Raises:
        ArgumentError: ``args`` has one that ``kind`` has not, or lacks one without a default.
    """
    given = vars(args)
    known = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    for name in given:
        if name not in known:
            raise ArgumentError(f"{name} is not supported by this runner; known: {', '.join(known)}")
    for name, field in known.items():
        if field.default is MISSING and name not in given:
            raise ArgumentError(f"{name} is required")
    return kind(**given)


def parse_options(prog: str, description: str, kind: type, argv: Sequence[str] | None) -> argparse.Namespace:
    """A command line with a flag for each field of ``kind``, a dataclass; what was not given is absent."""
    parser = ArgumentParser(prog, description)
    hints = get_type_hints(kind)
    for field in fields(kind):
        required = field.default is MISSING
        text = "required" if required else f"default: {field.default}"
        members = get_args(hints[field.name]) or (hints[field.name],)  # of "int | None" or "int"
        flag = "--" + field.name.replace("_", "-")
        parser.add_argument(flag, type=members[0], default=argparse.SUPPRESS, required=required, help=text)
    return parser.parse_args(argv)
