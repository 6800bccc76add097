"""Getting a checkpoint from the Hugging Face hub, at a commit, and showing that it came whole (model environment)."""

import fcntl
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from httpx2 import HTTPError
from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import filter_repo_objects

from aerie.errors import BadInput, Failed, Retryable
from aerie.serving.checkpoint_files import verify_checkpoint

OTHER_FORMS = (
    "*.bin", "*.gguf", "*.h5", "*.msgpack", "*.onnx", "*.pt", "*.pth", "original/*", "metal/*"
)  # fmt: skip
"""The same weights in forms that SGLang is not asked to load; some repositories have them beside safetensors."""

DOWNLOADS = ".cache/huggingface/download"
"""Where the hub's client keeps what is not whole yet, inside the folder."""

Report = Callable[[str], None]


def fetch_checkpoint(repository: str, revision: str, folder: Path, report: Report) -> None:
    """Download what is missing of a checkpoint into ``folder``, and verify it.

    Files that are there whole are kept, so that a download that was interrupted goes on. The token of a gated
    repository comes from ``HF_TOKEN`` or the hub's own login.

    Args:
        repository: owner and name.
        revision: the commit, 40 hexadecimal digits.
        folder: where the files go; made if it is not there.
        report: told what happens.

    Raises:
        BadInput: there is no such repository or commit, it is gated, or the folder or the disk does not do.
        Retryable: the connection failed; the same command goes on.
        Failed: it came, and is not whole; the message names the files.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"{folder}: cannot be made ({error.strerror}): choose a folder that you may write") from error
    with _alone(folder), _explained(repository, revision):
        sizes = _wanted_sizes(repository, revision)
        missing = _drop_partial(folder, sizes)
        _require_space(folder, sum(missing.values()))
        report(
            f"{repository} at {revision}: {len(sizes)} files, {_gb(sizes.values())}, of which "
            f"{_gb(missing.values())} are to be downloaded"
        )
        snapshot_download(repository, revision=revision, local_dir=folder, ignore_patterns=list(OTHER_FORMS))
    problems = [*_wrong_sizes(folder, sizes), *verify_checkpoint(folder)]
    if problems:
        raise Failed(
            f"{repository} is not whole: {'; '.join(problems)}. Delete what is named, and run the command again"
        )
    report(f"{folder}: whole; every file is as long as the hub says, and every shard of the index is there")


def _wanted_sizes(repository: str, revision: str) -> Mapping[str, int]:
    """Bytes of each file of the repository that is wanted, by path."""
    tree = HfApi().list_repo_tree(repository, recursive=True, revision=revision)
    sizes = {entry.path: entry.size for entry in tree if isinstance(entry, RepoFile)}
    return {path: sizes[path] for path in filter_repo_objects(sizes, ignore_patterns=list(OTHER_FORMS))}


def _drop_partial(folder: Path, sizes: Mapping[str, int]) -> Mapping[str, int]:
    """Remove what is there in part, which the hub's client would take for whole, and return what is missing."""
    # Each try of the client downloads under a new name and leaves it when it is killed.
    for abandoned in (folder / DOWNLOADS).rglob("*.incomplete"):
        abandoned.unlink()
    missing = {path: size for path, size in sizes.items() if _size(folder / path) != size}
    for path in missing:
        (folder / path).unlink(missing_ok=True)
    return missing


def _wrong_sizes(folder: Path, sizes: Mapping[str, int]) -> Iterator[str]:
    for path, size in sizes.items():
        found = _size(folder / path)
        if found is None:
            yield f"{folder / path}: missing"
        elif found != size:
            yield f"{folder / path}: {found:,} bytes, the hub says {size:,}"


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


def _require_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise BadInput(
            f"{folder}: {needed / 1e9:,.1f} GB are to be downloaded and {free / 1e9:,.1f} GB are free: free disk, or "
            "choose a folder elsewhere (AERIE_MODELS, or --to)"
        )


def _gb(sizes: Iterable[int]) -> str:
    return f"{sum(sizes) / 1e9:,.1f} GB"


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One download into a folder at a time."""
    with (folder / ".aerie-fetch.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BadInput(f"{folder}: another fetch-model is at work here; wait for it") from error
        yield


@contextmanager
def _explained(repository: str, revision: str) -> Iterator[None]:
    """Errors of the hub as ours."""
    try:
        yield
    except OfflineModeIsEnabled as error:
        raise BadInput(f"{repository}: HF_HUB_OFFLINE is set, so nothing can be downloaded: unset it") from error
    except GatedRepoError as error:
        raise BadInput(
            f"{repository} is gated: accept its terms at https://huggingface.co/{repository}, then give a token of "
            "that account in HF_TOKEN, or log in with hf auth login"
        ) from error
    except RevisionNotFoundError as error:
        raise BadInput(f"{repository} has no revision {revision}: its page lists its commits") from error
    except RepositoryNotFoundError as error:
        raise BadInput(
            f"{repository}: the hub knows no such repository, or it is private and HF_TOKEN is of nobody who may see it"
        ) from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403):
            raise BadInput(f"{repository}: the hub refuses the token ({status}): check HF_TOKEN") from error
        raise Retryable(f"{repository}: the hub answers {status}; run the same command again, it goes on") from error
    except (OSError, HTTPError) as error:
        raise Retryable(
            f"{repository}: the download stopped ({error}); run the same command again, it goes on"
        ) from error
