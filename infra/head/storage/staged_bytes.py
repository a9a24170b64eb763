"""How many bytes each host needs on its own disk before ranks start, and how many of them have been copied there."""

import threading
from dataclasses import dataclass, field, replace

from t5train.progress import Progress, silent


@dataclass
class HostBytes:
    """Bytes of one host.

    ``copied`` may exceed ``needed`` if a file arrived damaged and was sent again. ``already_there`` did not have to be
    copied.
    """

    needed: int = 0
    copied: int = 0
    already_there: int = 0


class StagedBytes:
    """The bytes of all hosts. Threads that copy files to hosts add to it, and any thread may read it meanwhile."""

    def __init__(self) -> None:
        self._hosts: dict[str, HostBytes] = {}
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Forget all hosts: another attempt begins, which may use others, and finds there what was copied before."""
        with self._lock:
            self._hosts.clear()

    def add(self, host: str, needed: int = 0, copied: int = 0, already_there: int = 0) -> None:
        """Add to the bytes of a host."""
        with self._lock:
            found = self._hosts.setdefault(host, HostBytes())
            found.needed += needed
            found.copied += copied
            found.already_there += already_there

    def by_host(self) -> dict[str, HostBytes]:
        """Return the bytes of each host so far."""
        with self._lock:
            return {host: replace(found) for host, found in self._hosts.items()}


@dataclass(frozen=True)
class StagingReports:
    """What is told of staging while it goes on."""

    progress: Progress = silent
    """Called with the bytes of all hosts together."""
    staged: StagedBytes = field(default_factory=StagedBytes)
    """Gets the bytes of each host."""
