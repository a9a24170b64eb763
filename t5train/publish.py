"""Publishing a certified export: objects first, ``manifest.json`` last, and never over something else."""

from pathlib import Path

from t5train.atomic_folder import copy_durably, filling
from t5train.certificate import CERTIFICATE, Certificate
from t5train.destination import described, publication_at
from t5train.errors import CertificationError, DigestMismatch, PublicationError
from t5train.fingerprint import fingerprint
from t5train.locations import local_folder, redacted
from t5train.os_errors import explain
from t5train.presence import reading
from t5train.progress import Progress, silent
from t5train.records import Export, Publication, current_provenance, verify_file
from t5train.upload import upload
from t5train.verify import verify


def publish(export: Export, url: str, progress: Progress = silent) -> Publication:
    """Copy a certified export to a folder or fsspec URL and return what is there now.

    A local folder appears whole, by one rename. A publication of the same export that verifies is reused. Raises
    PublicationError without a passing certificate for exactly these files, and when anything else is in the way.
    Secrets of the URL appear in no record, log or error.
    """
    _require_certified(export, progress)
    record = _record(export, url)
    if (existing := _existing(url, record.fingerprint, progress)) is not None:
        return existing
    folder = local_folder(url)
    if folder is None:
        upload(export.path, record, url, progress)
        return record
    _copy(export, record, folder, progress)
    return record.model_copy(update={"path": folder, "url": str(folder)})


def _record(export: Export, url: str) -> Publication:
    """What the manifest will say; a local folder is ``.``, for its manifest travels with it."""
    return Publication(
        path=Path(),
        url="." if local_folder(url) is not None else redacted(url).rstrip("/"),
        fingerprint=fingerprint({"stage": "publication", "schema_version": 1, "export": export.fingerprint}),
        inputs={**export.inputs, "export": export.fingerprint},
        files=export.files,
        counts=export.counts,
        provenance=current_provenance(),
    ).sealed()


def _require_certified(export: Export, progress: Progress) -> None:
    if CERTIFICATE not in export.files:
        raise PublicationError(f"{export.path} may not be published: it has no certificate; certify it first")
    path = export.path / CERTIFICATE
    try:
        export.verify(progress)
        with reading(path):
            content = path.read_bytes()
        Certificate.parse(content, str(path)).require_vouching(export.fingerprint, export.files, str(path))
    except (CertificationError, DigestMismatch) as error:
        raise PublicationError(f"{export.path} may not be published: {error}") from error


def _existing(url: str, identity: str, progress: Progress) -> Publication | None:
    """The verified publication of this identity; PublicationError when something else is in its place."""
    found = publication_at(url)
    if found is None:
        return None
    if found.fingerprint != identity:
        raise PublicationError(
            f"{redacted(url)} holds {described(found)}: publish to another place, or remove that yourself"
        )
    try:
        verified = verify(url, progress)
    except (DigestMismatch, PublicationError) as error:
        raise PublicationError(
            f"{redacted(url)} holds this publication, but damaged: {error}. Remove it, then publish again"
        ) from error
    return Publication.model_validate(verified).model_copy(update={"reused": True})


def _copy(export: Export, record: Publication, folder: Path, progress: Progress) -> None:
    total, done = sum(digest.size for digest in record.files.values()), 0
    try:
        with filling(folder) as partial:
            for name, digest in record.files.items():
                copy_durably(export.path / name, partial / name)
                verify_file(partial / name, digest)
                done += digest.size
                progress("bytes published", done, total)
            record.commit(partial)
    except OSError as error:
        raise PublicationError(f"{folder} cannot be written: {explain(error)}") from error
