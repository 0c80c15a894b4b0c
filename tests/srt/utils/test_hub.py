import httpx
import huggingface_hub
import pytest
from huggingface_hub import errors

from sglang.srt.errors import CheckpointError
from sglang.srt.utils.hub import CONFIG_PATTERNS, WEIGHT_PATTERNS, resolve_folder


@pytest.fixture
def hub(monkeypatch):
    """Replace the download; ``hub.result`` is returned or raised, ``hub.calls`` records what was asked for."""

    class Hub:
        def __init__(self):
            self.calls = []
            self.result = None

        def snapshot_download(self, repo_id, **options):
            self.calls.append((repo_id, options))
            if isinstance(self.result, Exception):
                raise self.result
            return self.result

    fake = Hub()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake.snapshot_download)
    return fake


def http_error(kind, status):
    response = httpx.Response(status, request=httpx.Request("GET", "https://hub.invalid/x"))
    return kind("first line\nsecond line", response=response)


def test_folder_is_itself(hub, tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve_folder("model", None, CONFIG_PATTERNS) == tmp_path / "model"
    assert not hub.calls


def test_file_is_refused(tmp_path):
    file = tmp_path / "model.gguf"
    file.touch()
    with pytest.raises(CheckpointError, match=r"model\.gguf is a file; give the folder"):
        resolve_folder(str(file), None, CONFIG_PATTERNS)


@pytest.mark.parametrize("path", ["/no/such/folder", "./model", "a/b/c", "~/nothing-here", "models/"])
def test_missing_folder_never_asks_the_hub(hub, path):
    with pytest.raises(CheckpointError) as caught:
        resolve_folder(path, None, CONFIG_PATTERNS)
    assert path in str(caught.value)
    assert "there is no such folder" in str(caught.value)
    assert not hub.calls


def test_hub_id_downloads_only_what_is_wanted(hub, tmp_path):
    hub.result = str(tmp_path)
    wanted = (*CONFIG_PATTERNS, *WEIGHT_PATTERNS)
    assert resolve_folder("org/name", "v1", wanted) == tmp_path
    ((repo_id, options),) = hub.calls
    assert (repo_id, options["revision"]) == ("org/name", "v1")
    files = ["config.json", "model-00001-of-00002.safetensors", "tokenizer.json", "consolidated.safetensors"]
    files += ["original/params.json", "pytorch_model.bin", "model.gguf", "modeling.py", "chat_template.jinja"]
    kept = huggingface_hub.utils.filter_repo_objects(
        files, allow_patterns=options["allow_patterns"], ignore_patterns=options["ignore_patterns"]
    )
    assert set(kept) == {
        "config.json",
        "model-00001-of-00002.safetensors",
        "tokenizer.json",
        "chat_template.jinja",
    }


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (http_error(errors.GatedRepoError, 403), "needs permission"),
        (http_error(errors.RepositoryNotFoundError, 404), "no such model"),
        (http_error(errors.RevisionNotFoundError, 404), "no revision 'v9'"),
        (errors.LocalEntryNotFoundError("offline"), "can't be reached"),
        (http_error(errors.HfHubHTTPError, 500), "failed (first line"),
        (ConnectionError("no route"), "failed (no route)"),
        (RuntimeError("what an HTTP library raises"), "failed (what an HTTP library raises)"),
        (OSError(28, "No space left on device"), "No space left"),
    ],
)
def test_every_failure_is_one_line(hub, error, words):
    hub.result = error
    with pytest.raises(CheckpointError) as caught:
        resolve_folder("org/name", "v9", CONFIG_PATTERNS, flag="--tokenizer-path")
    message = str(caught.value)
    assert message.startswith("--tokenizer-path org/name: there is no such folder, and ")
    assert words in message
    assert "\n" not in message
