"""The record of a stage: a folder of files, and the manifest that describes them.

``manifest.json`` is written last, by an atomic rename after fsync, and is the only sign of success. A result may be
reused if its manifest is present, its fingerprint is the requested one and its files verify. A damaged result that can
be made again is moved aside.
"""

import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    field_validator,
    model_serializer,
)

from t5train.errors import DigestMismatch, RecordError, UnknownVersion
from t5train.files.atomic import rename_aside, write_text
from t5train.files.confined import child, confined
from t5train.files.presence import ABSENT, is_there, reading
from t5train.progress import Progress, silent
from t5train.records.digests import FileDigest, SafetensorsDigest, verify_file
from t5train.records.identity import Provenance, current_provenance, fingerprint, is_sealed

MANIFEST = "manifest.json"
SCHEMA_VERSION: Literal[1] = 1
_log = logging.getLogger(__name__)


class Record(BaseModel):
    """The record of a finished stage: the files that hold its result for one fingerprint.

    Names in ``files`` are relative to ``path``; a kind with ``may_use_files_in_place`` can also list absolute paths.
    ``seal`` covers what the files' digests do not: the counts and fingerprints that the next stages rely on.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    may_use_files_in_place: ClassVar[bool] = False
    kind: str
    schema_version: Literal[1] = SCHEMA_VERSION
    path: Path
    fingerprint: str
    inputs: dict[str, str] = {}
    files: Mapping[str, FileDigest | SafetensorsDigest]
    counts: dict[str, int] = {}
    provenance: Provenance = Field(default_factory=current_provenance)
    seal: str = ""
    reused: bool = Field(default=False, exclude=True)

    @field_validator("files")
    @classmethod
    def _files_lie_in_the_folder(
        cls, files: Mapping[str, FileDigest | SafetensorsDigest]
    ) -> Mapping[str, FileDigest | SafetensorsDigest]:
        for name in files:
            if not (cls.may_use_files_in_place and Path(name).is_absolute() and ".." not in Path(name).parts):
                confined(Path(), name, "the manifest", RecordError)
        return files

    @property
    def location(self) -> str:
        """Where the record is, as reports show it."""
        return str(self.path)

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read the manifest of ``folder``.

        Raises RecordError if there is none of this kind or it was altered, Unreadable if it cannot be read now, and
        UnknownVersion if it is intact but was written by a version with other fields.
        """
        manifest = folder / MANIFEST
        try:
            with reading(manifest):
                content = manifest.read_bytes()
        except ABSENT:
            raise RecordError(
                f"{manifest} does not exist: {folder} is not a finished {_kind_name(cls)} folder"
            ) from None
        try:
            record = cls.model_validate_json(content)
        except ValidationError as error:
            if is_intact(content, cls.model_fields["kind"].default):
                raise unknown_version(str(manifest), error) from error
            raise RecordError(
                f"{manifest} is not the manifest of a finished {_kind_name(cls)} folder: {_first(error)}"
            ) from error
        except RecordError as error:
            raise RecordError(f"{manifest} cannot be used: {error}") from error
        if not record.is_as_written():
            raise RecordError(
                f"{manifest} is damaged or was edited: its content does not match the sha256 that it records"
            )
        return record.model_copy(update={"path": folder})

    def commit(self, folder: Path | None = None) -> Self:
        """Write the manifest, the last step of a stage. ``folder`` has the files if it will be renamed to ``path``."""
        sealed = self.sealed()
        write_text((folder or self.path) / MANIFEST, sealed.manifest_text())
        return sealed

    def manifest_text(self) -> str:
        """The content of ``manifest.json``, for a sealed record."""
        return self.model_dump_json(indent=1) + "\n"

    def sealed(self) -> Self:
        """Return a copy whose ``seal`` is the sha256 of the canonical JSON of everything else in the manifest."""
        return self.model_copy(update={"seal": fingerprint(self.model_dump(mode="json", exclude={"seal"}))})

    def is_as_written(self) -> bool:
        """Whether the seal matches the content. ``load`` checks this before it sets ``path``, which the seal covers."""
        return self.sealed().seal == self.seal

    def verify(self, progress: Progress = silent, known: Mapping[str, FileDigest] | None = None) -> None:
        """Verify every file against its digest. Raises DigestMismatch, naming the first file that differs.

        ``known`` has digests that were computed just now, by name. A file that matches there is not read again.
        """
        for fault in self.faults(progress, known):
            raise fault

    def faults(
        self, progress: Progress = silent, known: Mapping[str, FileDigest] | None = None
    ) -> Iterator[DigestMismatch]:
        """Yield an error for each file that differs from its digest. Raises Unreadable for one that cannot be read."""
        total = sum(digest.size for digest in self.files.values())
        done = 0
        for name, digest in self.files.items():
            if known is None or known.get(name) != digest:
                try:
                    verify_file(self.path / name, digest)
                except DigestMismatch as fault:
                    yield fault
            done += digest.size
            progress("bytes verified", done, total)


class PlainRecord(Record):
    """A record whose files each have a sha256 of the whole file, which other programs can compare."""

    files: dict[str, FileDigest]


REPEATED = "repeated_passages"
"""The count of passages that have the text of an earlier one, of corpora and shards. Old ones do not have it."""


REMOVED = "removed_passages"
"""The count of passages that were removed from training, of corpora and shards with corpus.remove."""

SKIPPED = "skipped_pages"
"""The count of pages of Wikipedia dumps that cannot be parsed, of corpora that have some."""

UNKNOWN_PIECES = "unknown_pieces"
"""The count of tokens to train on that are the unknown piece, of shards and of what a run records. Old ones lack it."""

HELD_OUT_COMPARED, HELD_OUT_TIED = "held_out_compared", "held_out_tied"
"""The counts of held-out passages that Hugging Face's tokenizer was compared on, and of those of them that it encodes
with other pieces which are as probable, of shards. Old ones do not have them."""

HELD_OUT_LEFT_OUT = "held_out_left_out"
"""The count of held-out passages that were not compared, because they spell control tokens, of shards."""

TRAIN_TOKENS = "train_tokens"
"""The count of tokens to train on, of shards and of what a run records."""

LACKED_CHARACTER = "lacked_character_U+"
"""Before its code point, the count of a character in a sample of the text that the vocabulary has no piece for."""

OF_TEXT = "train_samples_of_text_"
"""Before its number, the count of different samples to train on of a text of a mixture, in what a run records."""


class Corpus(PlainRecord):
    """Verified text: files of passages, which may be used in place."""

    may_use_files_in_place = True
    kind: Literal["corpus"] = "corpus"


class TokenizerFiles(PlainRecord):
    """A SentencePiece model in T5's form."""

    kind: Literal["tokenizer"] = "tokenizer"


class TokenShards(PlainRecord):
    """Token ids of a corpus, split into train, validation and test."""

    kind: Literal["shards"] = "shards"


class Pairs(PlainRecord):
    """Verified pairs of source and target, split into train, validation and test, by task."""

    kind: Literal["pairs"] = "pairs"


class PairShards(PlainRecord):
    """Token ids of pairs, split into train, validation and test; those to train on are in the order of their rows."""

    kind: Literal["pair-shards"] = "pair-shards"


class Checkpoint(PlainRecord):
    """A complete DeepSpeed checkpoint, the last or the best of a run, with the engine's own witness of its weights."""

    kind: Literal["checkpoint"] = "checkpoint"
    step: int
    tag: str


class Weights(Record):
    """fp32 safetensors files, whose digests are made from their tensors' digests."""

    kind: Literal["weights"] = "weights"


class Export(PlainRecord):
    """A Hugging Face folder. Once certified, it contains a passing ``certificate.json``."""

    kind: Literal["export"] = "export"


class StartingModelFiles(PlainRecord):
    """A copy of the model that runs start from, which is on the Hub or in a bucket."""

    kind: Literal["starting-model"] = "starting-model"


class Published(PlainRecord):
    """Files that were published to ``url``, an object store or folder.

    The manifest is published with them; in that copy, ``path`` is ``.``. The files are in ``folder`` beside the
    manifest, or directly beside it if ``folder`` is empty, as on disk. Then ``folder`` is left out, so that the
    manifests of earlier versions stay valid.
    """

    url: str
    folder: str = ""

    @field_validator("folder")
    @classmethod
    def _folder_lies_beside_the_manifest(cls, folder: str) -> str:
        if folder:
            child(Path(), folder, "the manifest", RecordError)
        return folder

    @property
    def location(self) -> str:
        """The folder on this machine, or the URL in a store, where ``path`` is ``.``."""
        return self.url if self.path == Path() else str(self.path)

    def name_beside_manifest(self, file: str) -> str:
        """The name of a file relative to the folder that holds the manifest."""
        return f"{self.folder}/{file}" if self.folder else file

    @model_serializer(mode="wrap")
    def _without_an_empty_folder(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        document: dict[str, Any] = serialize(self)
        return {name: value for name, value in document.items() if name != "folder" or value}


class Publication(Published):
    """An export that was published."""

    kind: Literal["publication"] = "publication"


class StoredCheckpoint(Published):
    """A checkpoint of a run that may still be training, in an object store."""

    kind: Literal["stored-checkpoint"] = "stored-checkpoint"
    step: int
    tag: str


R = TypeVar("R", bound=Record)


def reusable(
    kind: type[R],
    folder: Path,
    fingerprint: str,
    progress: Progress = silent,
    known: Mapping[str, FileDigest] | None = None,
) -> R | None:
    """The finished record in ``folder`` if it has this fingerprint and its files verify, else None (and a log line).

    ``known`` is as in ``Record.verify``. Raises Unreadable and UnknownVersion: a result that cannot be read now, or
    only by another version, must not be overwritten.
    """
    if not is_there(folder / MANIFEST):
        return None
    try:
        record = kind.load(folder)
        if record.fingerprint != fingerprint:
            _log.warning("%s was made from other inputs or with other settings: making it again", folder)
            return None
        record.verify(progress, known)
    except (RecordError, DigestMismatch) as error:
        _log.warning("%s: making it again", error)
        return None
    return record.model_copy(update={"reused": True})


def _first(error: ValidationError) -> str:
    """The first validation error in one line; pydantic's own text has many lines."""
    detail = error.errors()[0]
    if detail["type"] == "literal_error" and detail["loc"] == ("kind",):
        kind = detail["input"]
        other = ": name the folder `export` of its run, or compare it with its manifest with `t5-pretrain verify`"
        return f"its kind is {kind!r}{other if kind == 'publication' else ''}"
    return f"{'.'.join(map(str, detail['loc']))}: {detail['msg']}".removeprefix(": ")


def is_intact(content: bytes, kind: str | None) -> bool:
    """Whether ``content`` is an unaltered manifest of this kind (or any, if None), of any version."""
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):
        return False
    return isinstance(document, dict) and kind in {None, document.get("kind")} and is_sealed(document, "seal")


def unknown_version(where: str, error: ValidationError) -> UnknownVersion:
    """The error for an intact document that this version of the project cannot parse."""
    fields = dict.fromkeys(".".join(map(str, each["loc"])) for each in error.errors())
    versions = [f" {each['input']}" for each in error.errors() if each["loc"] == ("schema_version",)]
    return UnknownVersion(
        f"{where} is intact, but another version of t5-pretrain wrote it: this one does not know its "
        f"{', '.join(fields)}{''.join(versions)}. Use the version that wrote the file; nothing was changed"
    )


def _kind_name(cls: type[Record]) -> str:
    return str(cls.model_fields["kind"].default) if cls is not Record else "stage"


_OF_DATA = (Corpus, Pairs, TokenizerFiles, TokenShards, PairShards)
_OF_MODELS = (StartingModelFiles, Checkpoint, Weights, Export, Publication, StoredCheckpoint)
_KINDS: dict[str, type[Record]] = {kind.model_fields["kind"].default: kind for kind in (*_OF_DATA, *_OF_MODELS)}


class _AnyRecord(BaseModel):
    """The field that distinguishes the kinds of records."""

    kind: str


def parse_manifest(content: bytes, where: str) -> Record:
    """The record that ``content`` describes.

    Raises RecordError if it is not a record, DigestMismatch if its seal does not match, and UnknownVersion if it is
    intact but was written by a version with other fields.
    """
    try:
        record = _kind(content).model_validate_json(content)
    except ValidationError as error:
        if is_intact(content, None):
            raise unknown_version(where, error) from error
        raise RecordError(f"{where} is damaged, or not a manifest: {error.errors()[0]['msg']}") from error
    except RecordError as error:
        raise RecordError(f"{where} cannot be used: {error}") from error
    if record.sealed().manifest_text().encode() != content:
        raise DigestMismatch(f"{where} was altered: its content does not match the sha256 that it records")
    return record


def _kind(content: bytes) -> type[Record]:
    kind = _AnyRecord.model_validate_json(content).kind
    if kind not in _KINDS:
        raise RecordError(f"its kind is {kind!r}; the known kinds are {', '.join(_KINDS)}")
    return _KINDS[kind]


def set_damaged_aside(folder: Path) -> None:
    """Move a folder with a damaged manifest aside. Without the manifest, a user's files in it cannot be identified.

    A folder with an intact manifest of any kind, or with none, stays: the stage handles its own result, and refuses
    anything else. Raises Unreadable and UnknownVersion, as such a manifest may be intact.
    """
    manifest = folder / MANIFEST
    try:
        with reading(manifest):
            content = manifest.read_bytes()
        parse_manifest(content, str(manifest))
    except ABSENT:
        return
    except (RecordError, DigestMismatch) as error:
        _log.warning("%s: the folder was moved to %s and will be made again", error, rename_aside(folder))
