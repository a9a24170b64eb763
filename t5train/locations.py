"""Where text and published folders can lie: a local folder, or anything fsspec knows by URL."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit, urlunsplit

import fsspec
from fsspec.callbacks import Callback
from fsspec.core import split_protocol

from t5train.errors import PublicationError, T5TrainError
from t5train.progress import Progress

_PACKAGES = {
    "s3": "'s3fs>=2025.9'",  # else pip may settle for a very old one that fits what is installed
    "s3a": "'s3fs>=2025.9'",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "abfs": "adlfs",
    "az": "adlfs",
    "sftp": "paramiko",
}
# What stands before the @ is a person there, or Azure's container; with other schemes it can only be a key.
_NAMES_BEFORE_AT = {"sftp", "ssh", "ftp", "hdfs", "webhdfs", "smb", "abfs", "abfss"}
_WITHOUT_QUERIES = {"s3", "s3a", "gs", "gcs", "sftp", "ssh", "ftp", "hdfs", "smb"}
_QUERY = re.compile(r"[\w-]+=")


def local_folder(url: str) -> Path | None:
    """The absolute folder that a path or ``file://`` URL means; None for a URL of another kind."""
    protocol, rest = split_protocol(url)
    if protocol not in (None, "file", "local") or "::" in url:
        return None
    return Path(rest).expanduser().absolute()


def shareable_source(source: str) -> str:
    """A corpus source without credentials, and without the folders of the machine it lay on."""
    local = local_folder(source)
    return redacted(source) if local is None else local.name


def remote_folder(url: str) -> tuple[Any, str]:
    """The fsspec filesystem of a URL, and the folder's path in it.

    Raises PublicationError when the protocol is unknown, its package is not installed, or the store refuses.
    """
    with explained(url, "cannot be reached"):
        filesystem, path = fsspec.core.url_to_fs(url)
        filesystem.invalidate_cache()
    return filesystem, str(path).rstrip("/")


@contextmanager
def explained(url: str, what: str, kind: type[T5TrainError] = PublicationError) -> Iterator[None]:
    """Turn whatever a filesystem raises into an error of that kind, which tells it without the URL's secrets.

    fsspec's filesystems have no error in common. Not chained: a traceback would show the original's text.
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
        said = f"{type(error).__name__}: {_without_secrets(str(error), url)}{_remedy(error)}"
        raise kind(f"{redacted(url)} {what}: {said}") from None


class Counted(Callback):  # type: ignore[misc]  # fsspec has no types
    """Reports the bytes of a file that fsspec has sent or fetched as progress."""

    def __init__(self, what: str, progress: Progress) -> None:
        super().__init__()
        self._what, self._progress = what, progress

    def call(self, hook_name: str | None = None, **kwargs: Any) -> None:  # noqa: ARG002 - fsspec's signature
        """Called by fsspec whenever its count has changed."""
        self._progress(self._what, self.value, self.size)


def redacted(url: str) -> str:
    """The URL without what may be secret: user, password, query and fragment. Local paths are left as they are."""
    if local_folder(url) is not None:
        return url
    return "::".join(_without_authority(part) for part in url.split("::"))


def without_secret(setting: str, url: str) -> str:
    """The URL, if it is fit to be kept in a spec, which is written to disk and shown; else ValueError."""
    for part in map(_taken_apart, url.split("::")):
        has_key = part.password is not None or (part.username is not None and part.scheme not in _NAMES_BEFORE_AT)
        if part.scheme and part.netloc and (has_key or part.query):
            raise ValueError(
                f"{setting} has a password, a key or a query in its URL, and specs are kept and shown: take it out, "
                "and give credentials by the environment variables or files of the store's own client"
            )
    return url


def _remedy(error: Exception) -> str:
    """What to do about credentials, of which stores say no more than that they are wrong."""
    if not isinstance(error, PermissionError) and "Credentials" not in type(error).__name__:
        return ""
    return (
        "; give credentials that may do so, as the store's own client takes them (S3: AWS_ACCESS_KEY_ID and "
        "AWS_SECRET_ACCESS_KEY, or ~/.aws; AWS_ENDPOINT_URL where the store is not Amazon's)"
    )


def _taken_apart(url: str) -> SplitResult:
    """A URL's parts; where its scheme has no queries, a ``?`` that begins none is a wildcard in its path."""
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
