"""The ledger of a run in a bucket: which head may store checkpoints there, and which checkpoints there are.

It is one object, ``run.json``, and every change is a conditional write, which succeeds only if nobody has changed the
ledger since it was read. So a head that was superseded can neither add a checkpoint nor remove one, however late its
request arrives.
"""

import re
import secrets
from collections.abc import Callable
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
)

from t5train.errors import DigestMismatch, PublicationError, StoreError, UnknownVersion
from t5train.files.run_folder import RUN, is_tag
from t5train.records.identity import fingerprint
from t5train.release.object_store.bucket import BucketFolder
from t5train.release.object_store.store_errors import CONTENDED, MISSING, PRECONDITION_FAILED, TRANSIENT

LEDGER = RUN


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Holder(_Part):
    """The head that may change the ledger."""

    token: str
    """Generated when the head claimed the ledger."""
    head: str
    """Name of the head's machine."""
    root: str
    boot_id: str
    """Changes when the machine is booted, and differs in copies of it."""
    since: str
    lease_seconds: float

    def __str__(self) -> str:
        return f"head {self.head}, root {self.root}, since {self.since}"


_FOLDER = re.compile("step-[0-9]{8}-[0-9a-f]{12}")


def folder_of(tag: str, content: str) -> str:
    """The folder of a checkpoint, relative to the ledger. ``content`` is a fingerprint that all of its files decide.

    So heads that store different files of one step write to different folders.
    """
    return f"{tag}-{content[:12]}"


def is_checkpoint_folder(name: str) -> bool:
    """Whether a name is one that ``folder_of`` returns."""
    return _FOLDER.fullmatch(name) is not None


def _tag(name: str) -> str:
    if not is_tag(name):
        raise ValueError(f"{name!r} is not the name of a checkpoint")
    return name


def _folder(name: str) -> str:
    if not is_checkpoint_folder(name):
        raise ValueError(f"{name!r} is not the folder of a checkpoint")
    return name


_Folder = Annotated[str, AfterValidator(_folder)]


class StoredTag(_Part):
    """A checkpoint in the bucket."""

    tag: Annotated[str, AfterValidator(_tag)]
    folder: _Folder
    """The folder with its manifest, relative to the ledger."""
    size: int
    """In bytes."""
    best_step: int | None = None
    """Step of the best checkpoint as of this one, without which no run resumes; None, and left out, if none is."""

    @model_serializer(mode="wrap")
    def _without_an_absent_best(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        document: dict[str, Any] = serialize(self)
        return {name: value for name, value in document.items() if value is not None}


class Ledger(_Part):
    """The content of the ledger. ``seal`` is the sha256 of everything else."""

    kind: Literal["run"] = "run"
    schema_version: Literal[1] = 1
    run: dict[str, Any]
    """The file ``run.json`` of the run's folder."""
    config: str
    """The configuration file that starts the run."""
    holder: Holder | None
    checkpoints: tuple[StoredTag, ...] = ()
    """Those that can be resumed from, oldest first."""
    removing: tuple[_Folder, ...] = ()
    """Folders that are no longer a checkpoint's, and may not be removed yet."""
    set_aside: tuple[_Folder, ...] = ()
    """Folders that are neither resumed from nor removed: damaged checkpoints, and those before the run began again."""
    beginnings: tuple[str, ...] = ()
    """The beginnings of the run; see t5train.checkpoint.resume_point.beginnings."""
    nonce: str = ""
    """Makes every version of the ledger different, so that its ETag is, too."""
    seal: str = ""

    @property
    def newest(self) -> StoredTag | None:
        """The checkpoint that a run resumes from."""
        return max(self.checkpoints, key=lambda one: one.tag, default=None)

    @property
    def unique_id(self) -> str:
        """The id of the run."""
        return str(self.run.get("unique_id"))

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the run's identity."""
        return str(self.run.get("fingerprint"))

    def changed(self, **values: Any) -> Self:
        """Return a sealed copy with these values, which differs from every other version."""
        copy = self.model_copy(update={**values, "nonce": secrets.token_hex(16), "seal": ""})
        return copy.model_copy(update={"seal": copy._digest()})

    def is_as_written(self) -> bool:
        """Whether the seal matches the content."""
        return self.seal == self._digest()

    def _digest(self) -> str:
        return fingerprint(self.model_dump(mode="json", exclude={"seal"}))


class FoundLedger(NamedTuple):
    """A ledger as it was when it was read."""

    ledger: Ledger
    etag: str
    age_seconds: float
    """Since the last write, by the server's clock."""

    @property
    def left_seconds(self) -> float:
        """How long the lease of its holder still lasts; 0 if it has expired, or there is no holder."""
        holder = self.ledger.holder
        return 0.0 if holder is None else max(0.0, holder.lease_seconds - self.age_seconds)


def read_ledger(bucket: BucketFolder) -> FoundLedger | None:
    """Read the ledger; None if there is none.

    Raises StoreError; PublicationError for anything else that is there, such as a published model; DigestMismatch if
    the ledger was altered; UnknownVersion if another version wrote it.
    """
    present = bucket.names(below=False)  # to read what does not exist may be denied
    if LEDGER not in present:
        if present:
            raise PublicationError(
                f"{bucket.url} is not empty and holds no checkpoints of a run ({', '.join(sorted(present)[:5])}): "
                "check the URL, or choose another folder with storage.publish_checkpoints_under"
            )
        return None
    return read_existing_ledger(bucket)


def read_existing_ledger(bucket: BucketFolder) -> FoundLedger | None:
    """``read_ledger`` where a ledger was seen: the list of objects, which may be stale, is not asked for."""
    try:
        answer = bucket.call("get_object", LEDGER)
        content = bucket.content_of(answer, LEDGER)
    except StoreError as error:
        if error.code in MISSING:
            return None
        raise
    return FoundLedger(_parsed(content, f"{bucket.url}/{LEDGER}"), answer["ETag"], _age(answer))


def _parsed(content: bytes, where: str) -> Ledger:
    try:
        ledger = Ledger.model_validate_json(content)
    except ValidationError as error:
        raise UnknownVersion(
            f"{where} is not the ledger of a run, or another version of t5-pretrain wrote it "
            f"({error.errors()[0]['msg']}). Check the URL, or use that version; nothing was changed"
        ) from error
    if not ledger.is_as_written():
        raise DigestMismatch(f"{where} was altered: its content does not match the sha256 that it records")
    return ledger


def _age(answer: dict[str, Any]) -> float:
    """Seconds between the last write and the answer. Both times are the server's."""
    headers = answer["ResponseMetadata"]["HTTPHeaders"]
    answered = parsedate_to_datetime(headers["date"]) if "date" in headers else datetime.now(UTC)
    return max(0.0, float((answered - answer["LastModified"]).total_seconds()))


def write_ledger(bucket: BucketFolder, ledger: Ledger, replaced: str | None) -> str | None:
    """Write a ledger if the one with the ETag ``replaced`` is still there (None: if there is none).

    Returns the new ETag; None if the ledger there is another one. After an error, only the server knows whether it was
    written, so it is asked. Raises StoreError.
    """
    content = ledger.model_dump_json(indent=1).encode()
    condition = {"IfNoneMatch": "*"} if replaced is None else {"IfMatch": replaced}
    try:
        return bucket.put(LEDGER, content, ContentType="application/json", **condition)
    except StoreError as error:
        if error.code not in (*PRECONDITION_FAILED, *CONTENDED, *TRANSIENT, *MISSING):
            raise
        is_there = error.code in PRECONDITION_FAILED
        found = read_existing_ledger(bucket) if is_there else read_ledger(bucket)
        if found is not None and found.ledger.nonce == ledger.nonce:
            return found.etag
        if error.code in TRANSIENT and (found.etag if found else None) == replaced:
            raise
        return None


Change = Callable[[Ledger], Ledger]
"""Returns the ledger that a change makes of one; ``Ledger.changed`` seals it."""
