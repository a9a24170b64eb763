"""Brings the output of ranks to the head: lines to its log while they run, and files to the run's folder afterwards.

Secrets are redacted, and the rate of lines is limited.
"""

import gzip
import io
import logging
import re
import tarfile
import zlib
from collections.abc import Iterable
from pathlib import Path

from infra.head.hosts.hostfile import Hosts
from infra.head.hosts.nodes import Nodes
from infra.head.hosts.ssh import Transport
from infra.node.attempts.agent_messages import RankLine
from infra.node.attempts.attempt import Attempt
from infra.node.attempts.attempt_actions import PackLogs, RemoveAttempt
from infra.node.attempts.log_tail import RateLimit, printable, warns
from infra.node.attempts.rank_environment import redact
from infra.node.node_folders import attempt_folder
from t5train.errors import HostError
from t5train.files.atomic import write_text
from t5train.quantities import quantity

_LOGS_SECONDS, _REMOVE_SECONDS = 120.0, 20.0
_OF_A_RANK = re.compile(r"rank-([0-9]{5})\.(?:log|pid|beat|exit\.json|error\.json)")
_MOST_BYTES_OF_A_RANK = 64 << 20  # twice what a node packs of a log; other files are far smaller
_log = logging.getLogger(__name__)


def gather(this: Attempt, transport: Transport, hosts: Iterable[str]) -> None:
    """Move the files of ranks from hosts to the attempt's folder. If a host does not answer in time, its files stay."""
    nodes = Nodes(transport, tuple(hosts), code=this.code)
    gathered, known = [], Hosts.of(this.hosts or {})
    ranks = dict(zip(known.names, known.ranks(), strict=True))  # no host may write files of another's ranks
    for host, answer in nodes.ask(PackLogs(this.run_id), _LOGS_SECONDS).items():
        try:
            if isinstance(answer, HostError):
                raise answer
            unpack(answer.content, this.folder, ranks[host])
            gathered.append(host)
        except (HostError, tarfile.TarError, gzip.BadGzipFile, EOFError, zlib.error) as error:
            _log.warning(
                "the files on %s of attempt %s cannot be collected, and stay there in %s: %s",
                host,
                this.number,
                attempt_folder(this.run_id),
                error,
            )
    nodes.on(*gathered).ask(RemoveAttempt(this.run_id), _REMOVE_SECONDS)


def keep_own(head_folder: Path, folder: Path) -> None:
    """Copy the launcher's files from the head's own folder."""
    for path in head_folder.glob("launcher.*"):
        write_text(folder / path.name, redact(path.read_text("utf-8", errors="replace")))


def unpack(packed: bytes, folder: Path, ranks: range) -> None:
    """Extract the files of these ranks from a gzipped tar into a folder, and nothing else: another machine packed it.

    Raises TarError if the archive is larger than the files of these ranks can be, and the errors of gzip and tarfile if
    it is damaged.
    """
    most = _MOST_BYTES_OF_A_RANK * len(ranks)
    with gzip.open(io.BytesIO(packed)) as archive:
        content = archive.read(most + 1)
    if len(content) > most:
        raise tarfile.TarError(
            f"the archive has more than {most >> 20} MiB, but only logs of {len(ranks)} ranks were requested"
        )
    with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as files:
        for member in files:
            file = files.extractfile(member) if member.isreg() and _is_of(ranks, member.name) else None
            if file is not None:
                write_text(folder / member.name, redact(file.read().decode("utf-8", errors="replace")))


def _is_of(ranks: range, name: str) -> bool:
    found = _OF_A_RANK.fullmatch(name)
    return found is not None and int(found[1]) in ranks


LINES_A_SECOND = 20.0
BURST_LINES = 200.0


class RankLines:
    """Logs lines of ranks that hosts send. Limits their total rate; each host already limits its own."""

    def __init__(self) -> None:
        self._limit = RateLimit(LINES_A_SECOND, BURST_LINES)
        self._left_out = 0

    def report(self, host: str, lines: Iterable[RankLine], left_out: int) -> None:
        """Log lines with the names of their ranks. The next logged line says how many were left out before it."""
        for name, line in lines:
            if not self._limit.take(1):
                self._left_out += 1
                continue
            omitted = f" ({quantity(self._left_out, 'line')} left out before this one)" if self._left_out else ""
            self._left_out = 0
            level = logging.WARNING if warns(line) else logging.INFO
            _log.log(level, "%s %s: %s%s", host, printable(name), printable(redact(line)), omitted)
        self._left_out += left_out  # those that the host left out came after these lines
