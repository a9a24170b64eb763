"""Who may ask a server."""

import hmac
import os
import re
from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple, Self

from t5train.errors import SpecError
from t5train.files.private_text import read_private

KEY_VARIABLE = "T5_PRETRAIN_SERVE_KEY"
_KEY = re.compile("[!-~]{16,}")
_MAKE_KEY = "make one with `(umask 077; openssl rand -hex 32 > KEY_FILE)`, and add --key-file KEY_FILE"


class Access(NamedTuple):
    """Who may ask: those with the key, if there is one.

    A server on loopback refuses other names than its own, so that no web page can lead its own name here (DNS
    rebinding). Without CORS, pages of other names can neither read answers nor send JSON.
    """

    key: str | None
    is_loopback: bool

    @classmethod
    def of(cls, key_file: Path | None, is_loopback: bool) -> Self:
        """Take the key of a private file or, without one, that of the environment, where it is set.

        Raises SpecError if there is none but other machines can connect, or if it is too short; and StorageError if
        others can read the file.
        """
        key = read_private(key_file, _MAKE_KEY) if key_file else os.environ.get(KEY_VARIABLE)
        if key is None and not is_loopback:
            raise SpecError(f"other machines can connect to this address, so a key is needed: {_MAKE_KEY}")
        if key is not None and not _KEY.fullmatch(key):
            raise SpecError(
                f"the key in {key_file or KEY_VARIABLE} has {len(key)} characters: it must be at least 16, "
                f"of ASCII and without spaces; {_MAKE_KEY}"
            )
        return cls(key, is_loopback)

    def allows_host(self, host: str) -> bool:
        """Return whether a Host header is for this server."""
        return not self.is_loopback or _is_loopback(re.sub(":[0-9]*$", "", host.lower()).strip("[]"))

    def allows_key(self, authorization: str) -> bool:
        """Return whether an Authorization header has the key. The time that it takes says nothing about the key."""
        return self.key is None or hmac.compare_digest(authorization.encode(), f"Bearer {self.key}".encode())


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False
