"""Models by folder or by hub id."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from sglang.srt.errors import CheckpointError

logger = logging.getLogger(__name__)

CONFIG_PATTERNS = ("*.json", "*.jinja", "*.model", "*.txt")
WEIGHT_PATTERNS = ("*.safetensors",)
CODE_PATTERNS = ("*.py",)
# Files of sub-folders are other formats of the same model; Mistral's consolidated files repeat the weights.
_UNWANTED = ("*/*", "consolidated*")


def resolve_folder(path: str, revision: str | None, patterns: Sequence[str], flag: str = "--model-path") -> Path:
    """The local folder that ``path`` means: itself, or the hub's snapshot of that id, downloaded if needed.

    Args:
        path: a folder, or a hub id such as ``organisation/name``.
        revision: branch, tag or commit on the hub; None for the default branch.
        patterns: files of a hub repository that are wanted.
        flag: what the user wrote it behind, for messages.

    Raises:
        CheckpointError: no such folder, no such hub id, or the hub can't be reached.
    """
    local = Path(path).expanduser()
    if local.is_dir():
        return local.resolve()
    if local.exists():
        raise CheckpointError(f"{flag} {path} is a file; give the folder of a Hugging Face checkpoint")

    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )
    from huggingface_hub.utils._validators import validate_repo_id

    missing = f"{flag} {path}: there is no such folder"
    try:
        validate_repo_id(path)
    except HFValidationError:
        raise CheckpointError(f"{missing}, and it can't be a model id of the Hugging Face hub") from None
    logger.info("%s %s is no local folder; asking the Hugging Face hub", flag, path)
    try:
        return Path(
            snapshot_download(path, revision=revision, allow_patterns=list(patterns), ignore_patterns=list(_UNWANTED))
        )
    except GatedRepoError:
        reason = "the hub's model needs permission; accept its terms and set HF_TOKEN"
    except RevisionNotFoundError:
        reason = f"the hub's model has no revision {revision!r}"
    except RepositoryNotFoundError:
        reason = "the hub has no such model, or it is private and HF_TOKEN is not set"
    except LocalEntryNotFoundError:
        reason = "the Hugging Face hub can't be reached and the model is not in its local cache"
    except Exception as error:  # which HTTP library's errors they are differs between versions of huggingface_hub
        lines = str(error).strip().splitlines()
        reason = f"the download from the Hugging Face hub failed ({lines[0] if lines else type(error).__name__})"
    raise CheckpointError(f"{missing}, and {reason}")
