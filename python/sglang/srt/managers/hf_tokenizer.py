"""Loading a model's tokenizer, and text to token ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sglang.srt.errors import CheckpointError

_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")


def get_tokenizer(path: str, *, trust_remote_code: bool = False, revision: str | None = None) -> Any:
    """The transformers tokenizer in ``path`` (a folder or a hub id); always a fast one, so that it has a
    ``backend_tokenizer``.

    Raises:
        CheckpointError: there is none, or it can't be used.
    """
    from transformers import AutoTokenizer

    folder = Path(path)
    if folder.is_dir() and not any((folder / name).is_file() for name in _FILES):
        raise CheckpointError(
            f"{path} has no tokenizer (none of {', '.join(_FILES)}). Copy the tokenizer files of the original model "
            "there, or name their folder with --tokenizer-path."
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code, revision=revision)
    except Exception as error:  # transformers raises whatever its readers meet
        raise CheckpointError(f"The tokenizer in {path} can't be loaded: {type(error).__name__}: {error}") from error
    if not tokenizer.is_fast:
        raise CheckpointError(
            f"The tokenizer in {path} ({type(tokenizer).__name__}) has no fast form (tokenizer.json), which this "
            "server needs. Convert it, or name another one with --tokenizer-path."
        )
    # Both may be stored in tokenizer.json; a server must neither cut nor fill prompts.
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    return tokenizer


def encode(tokenizer: Any, text: str, *, add_special_tokens: bool = True) -> list[int]:
    """Token ids of ``text``. Thread-safe. Without the GIL while it works, which of the backend's methods only those for
    batches are; the fast one computes no offsets."""
    (encoding,) = tokenizer.backend_tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    ids: list[int] = encoding.ids
    return ids
