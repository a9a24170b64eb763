"""The commit of a dataset of the Hugging Face Hub that its text is read from.

A branch of the Hub may move, also during a long download. So the commit is asked for once and recorded under the root,
beside the downloads. All that is downloaded later comes from it.
"""

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

from t5train.data.download.kept_downloads import locked
from t5train.data.download.remote_reading import Backoff, is_interrupted, message_of, status_of
from t5train.errors import InputError, T5TrainError
from t5train.files.atomic import write_json
from t5train.records.locations import redacted, without_queries

_OFFLINE, _TRUE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"), {"1", "ON", "YES", "TRUE"}
_SHOWN_CHARACTERS = 500
_FILES = re.compile(r"hf://datasets/([^/@]+/[^/@]+)/.+")


def offline_switch() -> str | None:
    """Return the environment variable that forbids to ask the Hub; None if it may be asked."""
    return next((each for each in _OFFLINE if os.environ.get(each, "").upper() in _TRUE), None)


def require_online(source: str) -> None:
    """Raise InputError if a text of the Hub would have to be downloaded and the Hub must not be asked."""
    if (switch := offline_switch()) is not None:
        raise InputError(
            f"corpus.source {redacted(source)!r} is not on this machine, and {switch} does not allow downloading it. "
            f"Unset {switch}, or run `t5-pretrain corpus` with the same text and root where it is not set"
        )


def recorded_commit(repository: str, revision: str, root: Path) -> str | None:
    """Return the commit that the downloads of a dataset under a root come from; None if none is recorded."""
    record = _record(repository, revision, root)
    try:
        return str(json.loads(record.read_bytes())["commit"])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{record} is damaged ({error}), so the commit of the downloads of hf://{repository} is unknown. Remove "
            "the file, and set corpus.revision to the commit that you want"
        ) from None


def record_commit(repository: str, revision: str, root: Path) -> str:
    """Return the recorded commit of a dataset, or ask the Hub which one ``revision`` is, and record it."""
    record = _record(repository, revision, root)
    record.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with locked(record.parent):
        if (commit := recorded_commit(repository, revision, root)) is None:
            commit = commit_of(repository, revision)
            write_json(record, {"repository": repository, "revision": revision or "main", "commit": commit})
    return commit


def _record(repository: str, revision: str, root: Path) -> Path:
    name = f"{repository.replace('/', '--')}@{quote(revision or 'main', safe='')}.json"
    return root.absolute() / "cache" / "hub-commits" / name


def commit_of(repository: str, revision: str) -> str:
    """Ask the Hub for the commit of a branch or tag; that of main if ``revision`` is empty.

    Raises InputError if the Hub must not be asked.
    """
    from huggingface_hub import HfApi  # slow to import

    require_online(f"hf://{repository}")
    with explained_by_hub(repository, revision):
        asked = Backoff().retried(
            lambda: HfApi().dataset_info(repository, revision=revision or None, timeout=100.0),
            f"hf://{repository}",
            is_interrupted,
        )
    if not asked.sha:
        raise InputError(
            f"hf://{repository}: the Hub does not say which commit {revision or 'main'} is. Try again later"
        )
    return asked.sha


def files_at(location: str, repository: str, commit: str) -> str:
    """Return the URL of files of a dataset with the commit in it."""
    return location.replace(f"/{repository}/", f"/{repository}@{commit}/", 1)


def repository_of(location: str) -> str | None:
    """Return OWNER/NAME of the dataset of the Hub that a URL names files of; None for any other."""
    found = _FILES.fullmatch(location)
    return found[1] if found else None


@contextmanager
def explained_by_hub(repository: str, revision: str) -> Iterator[None]:
    """Convert errors of the Hub's client."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        yield
    except T5TrainError:
        raise
    except GatedRepoError:
        raise InputError(gated(repository)) from None
    except RevisionNotFoundError:
        raise InputError(
            f"corpus.revision is {revision!r}, but hf://{repository} has no such commit, tag or branch. See "
            f"{_page(repository)}/commits/main, or leave corpus.revision out to use the newest commit"
        ) from None
    except RepositoryNotFoundError:
        raise InputError(
            f"corpus.source 'hf://{repository}': the Hugging Face Hub has no such dataset, or it is private. Check the "
            "name; for a private dataset, set HF_TOKEN to a token that may read it"
        ) from None
    except Exception as error:
        if (known := unreachable(repository, error)) is None:
            raise
        raise known from None


def unreachable(repository: str, error: Exception) -> InputError | None:
    """Return what to do about an error of the network or the Hub; None for any other error."""
    if not is_interrupted(error) and status_of(error) is None:
        return None
    return InputError(
        f"hf://{repository} cannot be read: {message_of(error)}. Check whether this machine reaches the Hugging Face "
        "Hub (HF_ENDPOINT, proxy), and start again: what has arrived is kept"
    )


def gated(repository: str) -> str:
    """Return what to do about a dataset that the Hub gives only to those whom its owner lets."""
    return (
        f"corpus.source 'hf://{repository}' is a gated dataset: its owner decides who may download it. Ask for access "
        f"on {_page(repository)}, and set HF_TOKEN to a token of your account"
    )


def _page(repository: str) -> str:
    """Return the address of a dataset's page."""
    return f"https://huggingface.co/datasets/{repository}"


@contextmanager
def explained_by_datasets(repository: str, commit: str) -> Iterator[None]:
    """Convert the errors of ``datasets`` and of the Hub's client: those of reading data files share no base."""
    try:
        with explained_by_hub(repository, commit):
            yield
    except T5TrainError:
        raise
    except Exception as error:
        said = without_queries(" ".join(str(error).split()))[:_SHOWN_CHARACTERS] or type(error).__name__
        raise InputError(f"hf://{repository} cannot be read by datasets: {said}. {by_files(repository)}") from None


def by_files(repository: str) -> str:
    """Return how to read a dataset that ``datasets`` cannot read."""
    return (
        f"See {_page(repository)}/tree/main, and name its files by their path: "
        f"corpus.source=hf://datasets/{repository}/PATH"
    )
