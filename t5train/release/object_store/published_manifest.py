"""The manifest at a destination, and the error for one that is in the way."""

from typing import TypeVar

from t5train.errors import DigestMismatch, PublicationError, RecordError
from t5train.locations import redacted
from t5train.records.stage_records import MANIFEST, Publication, Published, Record, parse_manifest

P = TypeVar("P", bound=Published)


def publication_in(content: bytes, url: str) -> Publication:
    """Return the publication that a manifest at ``url`` describes. Raises PublicationError for anything else."""
    return published_as(Publication, content, url)


def published_as(kind: type[P], content: bytes, url: str) -> P:
    """Return the record of this kind that a manifest at ``url`` describes. Raises PublicationError for others."""
    try:
        record = parse_manifest(content, f"{redacted(url)}/{MANIFEST}")
    except (RecordError, DigestMismatch) as error:
        raise PublicationError(
            f"{redacted(url)} holds no intact publication: {error}. Publish to another destination"
        ) from error
    if not isinstance(record, kind):
        raise occupied(url, record)
    return record


def occupied(url: str, record: Record) -> PublicationError:
    """Return the error for a destination that holds another record."""
    return PublicationError(
        f"{redacted(url)} holds {described(record)}: publish to another destination (`run` has --publish-to and "
        "--name), or remove that one yourself"
    )


def described(record: Record) -> str:
    """Return a description of the record that is in the way."""
    return f"another {record.kind} ({record.fingerprint[:12]}, made {record.provenance.created_at})"


def not_empty(url: str, present: list[str]) -> PublicationError:
    """Return the error for a destination that holds these files, and no publication."""
    return PublicationError(
        f"{redacted(url)} is not empty and holds no publication ({', '.join(sorted(present)[:5])}): publish to another "
        "destination, or remove these files yourself"
    )
