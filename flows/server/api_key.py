"""The API key of an embedded Prefect server: a file in the server's home that only its owner can read.

Anyone with the key can run code as the server's user. Therefore it is passed only in files of mode 0600 and in the
environment of this user's own processes, never on a command line.
"""

import re
import secrets
from pathlib import Path

from t5train.errors import StorageError
from t5train.files import atomic
from t5train.files.locks import private_folder
from t5train.files.private_text import read_private

_NAME = "api-key"
_USER = "t5-pretrain"
_MAKE_NEW = "restart the server to make a new key (remove the file first if it is that of `t5-pretrain server`)"
_KEY = re.compile(rf"{_USER}:[A-Za-z0-9_-]{{43}}")


def path_of(home: Path) -> Path:
    """Return the path of the key of the server in ``home``."""
    return home / _NAME


def renew(home: Path) -> str:
    """Generate a key that replaces the previous one. ``home`` must be a folder that only this user can access."""
    private_folder(home)
    key = f"{_USER}:{secrets.token_urlsafe(32)}"
    try:
        with atomic.replacing(path_of(home), mode=0o600) as file:
            file.write(f"{key}\n".encode("ascii"))
    except OSError as error:
        raise StorageError(
            f"{path_of(home)} cannot be written: {error.strerror}; fix the permissions of {home}"
        ) from error
    return key


def keep(home: Path) -> str:
    """Return the key, or generate the first one. ``home`` must be a folder that only this user can access."""
    private_folder(home)
    return read(home) if path_of(home).is_symlink() or path_of(home).exists() else renew(home)


def read(home: Path) -> str:
    """Read the key. Raises StorageError unless the file has one, belongs to this user, and is private."""
    path = path_of(home)
    private_folder(home)
    key = read_private(path, _MAKE_NEW)
    if not _KEY.fullmatch(key):
        raise StorageError(f"{path} holds no API key: {_MAKE_NEW}")
    return key
