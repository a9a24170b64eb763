"""The model that a run starts from if it is on the Hub or in a bucket: a verified copy under the root.

Its revision is recorded when it is first asked for, so that everything under the root starts from the same model, also
offline. Configuration and vocabulary are copied first: settings that do not fit are refused before weights are copied.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

from t5train.data.download.hub_model import HubModel
from t5train.data.download.kept_downloads import locked
from t5train.errors import InputError, RecordError, StorageError
from t5train.files.atomic import write_json
from t5train.files.confined import child
from t5train.files.os_errors import explain
from t5train.model.starting_model import CONFIG, INDEX, WEIGHTS, listed_files
from t5train.progress import Progress, silent
from t5train.records.digests import FileDigest
from t5train.records.identity import fingerprint
from t5train.records.locations import hub_model
from t5train.records.stage_records import Publication, StartingModelFiles
from t5train.records.start_copy import START_NOTE, STARTS, is_awaited
from t5train.release.certificate import CERTIFICATE
from t5train.release.fetching import copy_files, require_names_for
from t5train.release.object_store.bucket import BucketFolder
from t5train.release.verification import manifest_in, require_certified

_SMALL = (
    *(CONFIG, "generation_config.json", INDEX),
    *("spiece.model", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
)


class _Source(Protocol):
    """A model at one revision."""

    @property
    def revision(self) -> str: ...

    @property
    def names(self) -> Sequence[str]: ...

    @property
    def url(self) -> str: ...

    @property
    def folder_name(self) -> str: ...

    def copy(self, names: Sequence[str], folder: Path, progress: Progress) -> Mapping[str, FileDigest]: ...

    def without_weights(self) -> InputError: ...


class _InBucket(NamedTuple):
    """A publication in a bucket."""

    bucket: BucketFolder
    published: Publication

    @classmethod
    def at(cls, url: str, revision: str) -> Self:
        """Read what is published there. ``revision`` is its fingerprint; empty: whatever it is.

        Raises RecordError, PublicationError or DigestMismatch if it is no certified publication, or another one.
        """
        bucket = BucketFolder(url)
        published = manifest_in(bucket)
        if not isinstance(published, Publication):
            raise RecordError(f"model.start_from is {bucket.url}, a {published.kind}. Name the folder of a publication")
        if revision not in {"", published.fingerprint}:
            raise InputError(
                f"model.start_from is {bucket.url}, which now holds the publication {published.fingerprint[:12]}, but "
                f"runs under this root start from {revision[:12]}. Publish that one again, or choose another root"
            )
        require_certified(published, bucket.read(published.name_beside_manifest(CERTIFICATE)) or b"", bucket.url)
        return cls(bucket, published)

    @property
    def revision(self) -> str:
        return self.published.fingerprint

    @property
    def names(self) -> Sequence[str]:
        return [*self.published.files]

    @property
    def url(self) -> str:
        return self.bucket.url

    @property
    def folder_name(self) -> str:
        return f"{self.url.rpartition('/')[2]}@{self.published.fingerprint[:12]}"

    def without_weights(self) -> InputError:
        return InputError(f"model.start_from is {self.url}, which has no {WEIGHTS}. Name another model")

    def copy(self, names: Sequence[str], folder: Path, progress: Progress) -> Mapping[str, FileDigest]:
        require_names_for(folder, self.published, self.bucket)
        try:
            with locked(folder):
                copy_files(self.bucket, self.published, names, folder, progress)
        except OSError as error:
            raise StorageError(f"{folder} cannot be written: {explain(error)}") from error
        return {name: self.published.files[name] for name in names}


def begin(start: str, root: Path, progress: Progress = silent) -> Path:
    """Return the folder under a root that a remote model is copied to; its configuration and vocabulary are there.

    Asks nobody if they have been copied before. Raises InputError if there is no such model, if it has no safetensors
    or if the Hub must not be asked, and the errors of stores and disks.
    """
    starts = root.absolute() / STARTS
    pin = starts / f".{hashlib.sha256(start.encode()).hexdigest()[:16]}.json"
    pinned = _read(pin) if pin.exists() else {}
    # Of a commit of the Hub, the name of the folder is known. No folder has a name as long as URLs can be.
    name = pinned.get("folder") or start.removeprefix("hf://").replace("/", "--").encode()[:200].decode(errors="ignore")
    if (starts / name / START_NOTE).exists():
        return child(starts, name, str(pin), InputError)
    source = _source(start, pinned.get("revision", ""))
    if not {WEIGHTS, INDEX} & {*source.names}:
        raise source.without_weights()
    folder = child(starts, source.folder_name, source.url, InputError)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    small = [name for name in _SMALL if name in source.names]
    source.copy(small, folder, progress)
    weights = [WEIGHTS] if WEIGHTS in source.names else [*listed_files(folder)]
    if missing := [name for name in weights if name not in source.names]:
        raise InputError(
            f"{source.url} lacks the weight file {missing[0]}, which its {INDEX} names. Name another model"
        )
    note = {"start": start, "revision": source.revision}
    write_json(folder / START_NOTE, note | {"files": [*small, *weights]})
    write_json(pin, note | {"folder": folder.name})
    return folder


def complete(folder: Path, progress: Progress = silent) -> None:
    """Copy the weights to a folder that ``begin`` has made, and record the digests of all files.

    A copy that was interrupted continues. Does nothing if the copy is complete, or for any other folder: the digests of
    a complete copy are compared when its weights are read.
    """
    if not is_awaited(folder):
        return
    note = _read(folder / START_NOTE)
    source = _source(note["start"], note["revision"])
    files = source.copy(note["files"], folder, progress)
    inputs = {"revision": note["revision"]}
    identity = fingerprint({"kind": "starting-model", "files": {name: each.sha256 for name, each in files.items()}})
    StartingModelFiles(path=folder, fingerprint=identity, inputs=inputs, files=dict(files)).commit()


def _source(start: str, revision: str) -> _Source:
    if (named := hub_model(start)) is not None:
        return HubModel.at(named[0], revision or named[1])
    return _InBucket.at(start, revision)


def _read(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_bytes())
    except ValueError as error:
        raise InputError(f"{path} is damaged ({error}). Remove {path.parent}, and start again") from None
    return found
