"""The manifest at a destination, whether it is of the same model, and the error for one that is in the way."""

from collections.abc import Iterable
from typing import TypeVar

from t5train.errors import DigestMismatch, PublicationError, RecordError
from t5train.records.digests import FileDigest
from t5train.records.locations import redacted
from t5train.records.stage_records import MANIFEST, Publication, Published, Record, parse_manifest
from t5train.release.certificate import CERTIFICATE
from t5train.release.model_card import CARD_FILES

P = TypeVar("P", bound=Published)
_MOST_SHOWN = 5
_REMEDY = "publish to another destination (`run` has --publish-to and --name), or remove that one yourself"


_OF_TRANSPORT = {".git", ".gitattributes", ".cache"}
"""What Git and the Hugging Face Hub's client add to a folder that they fetch."""


def require_only(record: Published, present: Iterable[str], where: str) -> None:
    """Raise PublicationError if unlisted files are present."""
    unknown = sorted(set(present) - {*record.files, MANIFEST})
    if extra := [name for name in unknown if name.split("/")[0] not in _OF_TRANSPORT]:
        more = f" and {len(extra) - 5:,} more" if extra[5:] else ""
        raise PublicationError(
            f"{where} also holds files that were not published: {', '.join(extra[:5])}{more}. Move them elsewhere"
        )


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


def difference(found: Published, wanted: Published, url: str) -> PublicationError | None:
    """Return the error for a destination that holds something else than ``wanted``; None if it holds the same.

    Both must have the same fingerprint and the same digest of every file except the certificate, which can be made
    again; publications also the same inputs and counts. A fingerprint alone proves nothing: whoever writes a manifest
    states it.
    """
    if found.fingerprint != wanted.fingerprint:
        return occupied(url, found)
    theirs, ours = ({**each.files, CERTIFICATE: None} for each in (found, wanted))
    names = [name for name in sorted({*theirs, *ours}) if theirs.get(name) != ours.get(name)]
    differing = [f"its {name} {_compared(theirs.get(name), ours.get(name))}" for name in names]
    if isinstance(wanted, Publication):  # a run that was begun again can store the same checkpoint
        stated = (("inputs", found.inputs, wanted.inputs), ("counts", found.counts, wanted.counts))
        differing += [f"its {what} differ" for what, there, here in stated if there != here]
    if not differing:
        return None
    if len(differing) == len(names) and {*names} <= CARD_FILES:
        return PublicationError(
            f"{redacted(url)} holds this model with another card ({', '.join(names)}), as another version or commit "
            "writes it. All other files are the same, so the model need not be published again. To publish the new "
            f"card too, {_REMEDY}"
        )
    more = f", and {len(differing) - _MOST_SHOWN} more" if differing[_MOST_SHOWN:] else ""
    return PublicationError(
        f"{redacted(url)} holds {described(found)} with the same fingerprint and other content: "
        f"{', '.join(differing[:_MOST_SHOWN])}{more}: {_REMEDY}"
    )


def _compared(there: FileDigest | None, here: FileDigest | None) -> str:
    if there is None:
        return "is missing"
    return f"has {there}, but {here} is to be published" if here else "is not to be published"


def occupied(url: str, record: Record) -> PublicationError:
    """Return the error for a destination that holds another record."""
    return PublicationError(f"{redacted(url)} holds {described(record)}: {_REMEDY}")


def described(record: Record) -> str:
    """Return a description of the record that is in the way."""
    return f"another {record.kind} ({record.fingerprint[:12]}, made {record.provenance.created_at})"


def not_empty(url: str, present: list[str]) -> PublicationError:
    """Return the error for a destination that holds these files, and no publication."""
    return PublicationError(
        f"{redacted(url)} is not empty and holds no publication ({', '.join(sorted(present)[:5])}): publish to another "
        "destination, or remove these files yourself"
    )
