"""Locations of text and published folders: a local folder, or any URL that fsspec supports."""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit, urlunsplit

import fsspec
from fsspec.callbacks import Callback
from fsspec.core import split_protocol

from t5train.errors import InputError, PublicationError, T5TrainError, encodable, printable
from t5train.files.os_errors import explain
from t5train.progress import Progress

_PACKAGES = {
    "s3": "'s3fs>=2025.9'",  # otherwise pip may pick a very old one that fits the installed packages
    "s3a": "'s3fs>=2025.9'",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "abfs": "adlfs",
    "az": "adlfs",
    "sftp": "paramiko",
}
# In these schemes, the part before the @ is a user name or Azure's container; in others it can only be a key.
_NAMES_BEFORE_AT = {"sftp", "ssh", "ftp", "hdfs", "webhdfs", "smb", "abfs", "abfss"}
_WITHOUT_QUERIES = {"s3", "s3a", "gs", "gcs", "sftp", "ssh", "ftp", "hdfs", "smb"}
_BEGINNING = re.compile(r"(s3a?|gc?s|abfss?|az|sftp|https?|hf|file):(/{0,2})", re.IGNORECASE)
_MEANINGS = {
    FileNotFoundError: "not found",
    PermissionError: "access denied",
    TimeoutError: "there was no answer in time",
    ConnectionError: "the connection failed",
}
_QUERY = re.compile(r"[\w-]+=")
_END = r"""['"<>()\[\].,:;]*(?:\s|$)"""
_URL = re.compile(rf"""[A-Za-z][\w+.-]*://[^\s'"<>()\[\]?#]+(?:[?#]\S*?(?={_END}))?""")
# As the Hub and Git allow them: others are refused by its client, or lead to another model's page.
_HUB_MODEL = re.compile(
    r"hf://(?!(?:datasets|models|spaces|buckets)/)(?!.*[./]\.)(?![^@]*(?:--|\.git(?:@|$)))(?=[^@]{1,96}(?:@|$))"
    r"(\w(?:[\w.-]*\w)?/\w(?:[\w.-]*\w)?)(?:@(\w(?:[\w./-]{0,120}\w)?))?",
    re.ASCII,
)
_BUCKET_FOLDER = re.compile(r"s3a?://[A-Za-z0-9][A-Za-z0-9._-]{1,62}/[^?#@]+")
_HUB_NAME = re.compile(r"hf://(?!(?:datasets|models|spaces|buckets)/)([A-Za-z0-9_.-]+/[A-Za-z0-9_.-]+)/?")


def at_home(path: Path | str) -> Path:
    """Return a path with a leading ``~`` replaced by the home folder. Shells leave it in ``--root=~/t5``.

    A ``~`` that names no user's home is kept.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:  # there is no such user
        return Path(path)


def require_location(location: str, kind: type[Exception] = InputError) -> None:
    """Raise ``kind`` for an empty text, or one that begins like a URL, but would be taken for a local path."""
    if not location:
        raise kind("the path or URL is empty: name a folder, or . for the current one")
    found = _BEGINNING.match(location)
    if found is not None and (found[2] != "//" or found[1] != found[1].lower()):
        scheme = found[1].lower()
        raise kind(
            f"a URL does not begin with {found[0]!r}: write {scheme}://... (or ./{found[1]}:... for a folder of that "
            "name)"
        )


def require_utf8_names(paths: Iterable[str]) -> None:
    """Raise InputError for a path that is not UTF-8: records of files could not name it."""
    for each in paths:
        if encodable(each) != each:
            raise InputError(
                f"corpus.source includes {printable(each)}, whose name is not UTF-8, as records of files are. Rename "
                "it, or leave it out"
            )


def local_folder(url: str) -> Path | None:
    """Return the absolute path of the folder that a path or ``file://`` URL names; None for any other URL."""
    protocol, rest = split_protocol(url)
    if protocol not in (None, "file", "local") or "::" in url:
        return None
    return at_home(rest).absolute()


def hub_dataset_name(source: str) -> str | None:
    """Return OWNER/NAME if a source names a dataset of the Hugging Face Hub, as ``hf://OWNER/NAME`` does.

    None for any other source. ``hf://datasets/OWNER/NAME/PATH`` names files: fsspec reads it.
    """
    found = _HUB_NAME.fullmatch(source)
    return found[1] if found else None


def hub_model(start: str) -> tuple[str, str] | None:
    """Return OWNER/NAME and the revision (may be empty) if ``hf://OWNER/NAME@REVISION`` names a model of the Hub."""
    found = _HUB_MODEL.fullmatch(start)
    return (found[1], found[2] or "") if found else None


def is_remote_model(start: str) -> bool:
    """Whether a model to start from is on the Hub, or in a folder of a bucket."""
    return hub_model(start) is not None or _BUCKET_FOLDER.fullmatch(start) is not None


def shareable_source(source: str) -> str:
    """Return a corpus source without credentials and, for a local one, without its parent folders."""
    local = local_folder(source)
    return shown_text(source) if local is None else local.name


def shown_text(source: str) -> str:
    """Return a corpus source without credentials, but with what is chosen of a dataset of the Hub after ``#``."""
    is_dataset = hub_dataset_name(source.partition("#")[0]) is not None
    return source if is_dataset else redacted(source)


def remote_folder(url: str) -> tuple[Any, str]:
    """Return the fsspec filesystem of a URL, and the folder's path in it.

    Raises PublicationError if the protocol is unknown, its package is not installed, or the store refuses access.
    """
    with explained(url, "cannot be reached"):
        filesystem, path = fsspec.core.url_to_fs(url)
        filesystem.invalidate_cache()
    return filesystem, str(path).rstrip("/")


@contextmanager
def explained(url: str, what: str, kind: type[T5TrainError] = PublicationError) -> Iterator[None]:
    """Convert any exception of a filesystem to an error of class ``kind``, without the URL's secrets.

    fsspec's filesystems share no base error. The error is not chained, because a traceback would show the original.
    """
    try:
        yield
    except T5TrainError:
        raise
    except ImportError as error:
        protocol = str(split_protocol(url)[0])
        package = _PACKAGES.get(protocol, f"fsspec[{protocol}]")
        raise kind(f"{redacted(url)} needs a package that is not installed ({error}): pip install {package}") from None
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None and local_folder(url) is not None:
            raise kind(f"{url} {what}: {explain(error)}") from None
        raise kind(f"{redacted(url)} {what}: {_said(error, url)}{_remedy(error)}") from None


class Counted(Callback):  # type: ignore[misc]  # fsspec has no types
    """Reports as progress the bytes of a file that fsspec has sent or fetched."""

    def __init__(self, what: str, progress: Progress) -> None:
        super().__init__()
        self._what, self._progress = what, progress

    def call(self, hook_name: str | None = None, **kwargs: Any) -> None:  # noqa: ARG002 - fsspec's signature
        """Report the new count; fsspec calls this whenever it changes."""
        self._progress(self._what, self.value, self.size)


def redacted(url: str) -> str:
    """Return a URL without user, password, query and fragment, which may be secret. Local paths are not changed."""
    if local_folder(url) is not None:
        return url
    return "::".join(_without_authority(part) for part in url.split("::"))


def without_queries(text: str) -> str:
    """Return a text in which each URL is without user, password, query and fragment, which may be secret."""
    return _URL.sub(lambda url: redacted(url[0]), text)


def without_secret(setting: str, url: str) -> str:
    """Return the URL. Raises ValueError if it holds a secret, because specs are written to disk and displayed.

    The same is raised for what ``require_location`` refuses, but not for an empty text, which stands for none.
    """
    if url:
        require_location(url, ValueError)
    for part in map(_taken_apart, url.split("::")):
        has_key = part.password is not None or (part.username is not None and part.scheme not in _NAMES_BEFORE_AT)
        if part.scheme and part.netloc and (has_key or part.query):
            raise ValueError(
                f"{setting} has a password, a key or a query in its URL, but specs are stored and displayed: remove "
                "it, and give credentials in the environment variables or files that the store's own client reads"
            )
    return url


def _said(error: Exception, url: str) -> str:
    """Return what an error says, in one line. Those of stores often only name the object, so their kind is added."""
    if isinstance(status := getattr(error, "status", None), int):
        return f"the server answered with status {status}"  # aiohttp also shows the URL, which may be signed
    kind = next((meaning for known, meaning in _MEANINGS.items() if isinstance(error, known)), "")
    text = _without_secrets(" ".join(str(error).split()), url)
    return ": ".join(each for each in (kind, text) if each) or type(error).__name__


def _remedy(error: Exception) -> str:
    """Return the remedy that an error has, or advice about credentials: stores only report that access is denied."""
    if isinstance(remedy := getattr(error, "remedy", None), str):
        return f". {remedy}"
    if not isinstance(error, PermissionError) and "Credentials" not in type(error).__name__:
        return ""
    return (
        "; give credentials with this permission where the store's own client reads them (S3: AWS_ACCESS_KEY_ID and "
        "AWS_SECRET_ACCESS_KEY, or ~/.aws; AWS_ENDPOINT_URL if the store is not Amazon's)"
    )


def _taken_apart(url: str) -> SplitResult:
    """Split a URL. In schemes without queries, a ``?`` that does not begin a query is a wildcard in the path."""
    parts = urlsplit(url)
    if parts.scheme in _WITHOUT_QUERIES and parts.path and parts.query and not _QUERY.match(parts.query):
        return parts._replace(path=f"{parts.path}?{parts.query}", query="")
    return parts


def _without_authority(url: str) -> str:
    parts = _taken_apart(url)
    if not parts.netloc:
        return url
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def _without_secrets(text: str, url: str) -> str:
    text = text.replace(url, redacted(url))
    for part in map(_taken_apart, url.split("::")):
        for secret in (part.netloc.rpartition("@")[0], part.username, part.password, part.query, part.fragment):
            if secret:
                text = text.replace(secret, "***")
    return text
