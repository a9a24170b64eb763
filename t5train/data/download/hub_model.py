"""A model of the Hugging Face Hub: which commit a revision is, and the download of its files."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Self

from t5train.data.download.downloads import Wanted, download
from t5train.data.download.hub_commit import offline_switch, unreachable
from t5train.data.download.kept_downloads import download_places, read_note
from t5train.data.download.remote_reading import Backoff, filesystem_of, is_interrupted
from t5train.errors import DigestMismatch, InputError, T5TrainError
from t5train.files.output_folder import DOWNLOADED
from t5train.progress import Progress
from t5train.records.digests import FileDigest


class HubModel(NamedTuple):
    """A model at one commit, and the names of its files there."""

    repository: str
    revision: str
    names: Sequence[str]

    @classmethod
    def at(cls, repository: str, revision: str) -> Self:
        """Ask the Hub for the commit of a branch, tag or commit (main if empty), and for its files.

        Raises InputError if there is no such model, or if the Hub must not or cannot be asked.
        """
        from huggingface_hub import HfApi  # slow to import

        if (switch := offline_switch()) is not None:
            raise InputError(
                f"model.start_from is hf://{repository}, which is not on this machine, and {switch} does not allow "
                f"downloading it. Unset {switch}, or set model.start_from to a folder with the model"
            )
        with _explained(repository, revision):
            asked = Backoff().retried(
                lambda: HfApi().model_info(repository, revision=revision or None, timeout=100.0),
                f"hf://{repository}",
                is_interrupted,
            )
        if not asked.sha:
            raise InputError(
                f"hf://{repository}: the Hub does not say which commit {revision or 'main'} is. Try again later"
            )
        return cls(repository, asked.sha, [each.rfilename for each in asked.siblings or []])

    @property
    def url(self) -> str:
        """The model with its commit, as a setting names it."""
        return f"hf://{self.repository}@{self.revision}"

    @property
    def folder_name(self) -> str:
        """The name of a folder for it. No name on the Hub has ``--``."""
        return f"{self.repository.replace('/', '--')}@{self.revision}"

    def without_weights(self) -> InputError:
        """Return the error for a model that has no safetensors."""
        page = f"https://huggingface.co/{self.repository}"
        return InputError(
            f"model.start_from is {self.url}, which has no model.safetensors. Other weights, such as "
            f"pytorch_model.bin, can run code when they are loaded, so only safetensors are read. If a pull request on "
            f"{page}/discussions adds them, name its revision: hf://{self.repository}@refs/pr/NUMBER. If you trust the "
            "model, load it with from_pretrained of transformers, save it with save_pretrained to a folder, and set "
            "model.start_from to that folder"
        )

    def copy(self, names: Sequence[str], folder: Path, progress: Progress) -> dict[str, FileDigest]:
        """Download files to a folder, and return their digests. Complete ones are verified and kept.

        Large files are compared with the sha256 that the Hub states, and others with the id of their Git blob. Raises
        InputError or DigestMismatch if they differ or cannot be transferred, StorageError if the disk is too small.
        """
        places = download_places(folder, list(names), self.url)
        filesystem, top = filesystem_of(self.url)
        with _explained(self.repository, self.revision):
            wanted = [Wanted(f"{top}/{name}", place) for name, place in zip(names, places, strict=True)]
            download(filesystem, folder, wanted, progress)
            for name, place in zip(names, places, strict=True):
                _require_blob(filesystem.info(f"{top}/{name}"), place, f"{self.url}/{name}")
        return {name: _noted(place) for name, place in zip(names, places, strict=True)}


def _noted(place: Path) -> FileDigest:
    note = read_note(place)
    if note is None:
        raise InputError(f"{place} was changed while it was downloaded. Start again")
    return note.content


def _require_blob(info: Mapping[str, Any], place: Path, shown: str) -> None:
    """Raise DigestMismatch, and remove the copy, if a file that Git stores itself has another content than its blob."""
    if info.get("lfs"):
        return  # its sha256 was compared
    content = place.read_bytes()
    found = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
    if found != info["blob_id"]:
        place.with_name(f"{place.name}{DOWNLOADED}").unlink()  # otherwise, the digest in the note would be expected
        place.unlink()
        raise DigestMismatch(
            f"{shown} arrived with the Git blob id {found}, but the Hub states {info['blob_id']}. Start again, and if "
            "this happens again, check the proxy or mirror between this machine and the Hub (HF_ENDPOINT)"
        )


@contextmanager
def _explained(repository: str, revision: str) -> Iterator[None]:
    """Convert errors of the Hub's client."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    named, page = f"model.start_from is hf://{repository}", f"https://huggingface.co/{repository}"
    try:
        yield
    except T5TrainError:
        raise
    except GatedRepoError:
        raise InputError(
            f"{named}, a gated model: its owner decides who may download it. Ask for access on {page}, and set "
            "HF_TOKEN to a token of your account"
        ) from None
    except RevisionNotFoundError:
        raise InputError(
            f"{named}@{revision}, but the model has no such commit, tag or branch. See {page}/commits/main, or leave "
            "the revision out to use the newest commit"
        ) from None
    except RepositoryNotFoundError:
        raise InputError(
            f"{named}, but the Hugging Face Hub has no such model, or it is private. Check the name; for a private "
            "model, set HF_TOKEN to a token that may read it"
        ) from None
    except Exception as error:
        if (known := unreachable(repository, error)) is None:
            raise
        raise known from None
