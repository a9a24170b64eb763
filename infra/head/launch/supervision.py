"""The hosts of an attempt, seen from the head: what their ranks did, and which hosts were lost.

The agents on hosts watch the attempt and renew its leases there until the supervision is closed. ``look`` processes the
reports that they receive, in the caller's thread.
"""

import logging
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty

from infra.head.hosts.agents import RENEW_SECONDS, Agent, ChannelBroken, News
from infra.head.hosts.hostfile import Hosts
from infra.head.launch.log_collection import RankLines
from infra.head.launch.verdict import Evidence, Hops
from infra.node.attempts import head_lease
from infra.node.attempts.agent_messages import (
    Alive,
    Ended,
    Hello,
    LeaseNotRenewed,
    NewLines,
    Order,
    RankEnded,
    RankError,
    RankPhase,
    Report,
    Saved,
)
from infra.node.attempts.attempt import HEAD, Attempt, now, rank_name
from infra.node.attempts.exit_record import ExitRecord
from infra.node.attempts.rank_environment import redact
from t5train.errors import DiskFailed, DiskFull, HostLost, LaunchError
from t5train.files import heartbeat
from t5train.files.atomic import write_json
from t5train.files.heartbeat import Beat
from t5train.files.os_errors import explain, of_rank

_SILENT_SECONDS = 5.0
_log = logging.getLogger(__name__)


@dataclass
class _Host:
    """What is known about a host."""

    agent: Agent
    last_message_at: float
    boot_id: str | None
    broken: str = ""
    is_silent: bool = False
    is_lost: bool = False
    """Whether it has been silent for so long that its lease has expired."""
    ended: bool = False


class Supervision:
    """Supervises one attempt over hosts. The exit records of its ranks are written to its folder as they arrive."""

    def __init__(
        self, this: Attempt, agents: Mapping[str, Agent], head_folder: Path, boot_ids: dict[str, str] | None
    ) -> None:
        """Let the agents on the attempt's hosts watch it.

        ``boot_ids`` are those of the hosts at the start, or None if ranks are already running.
        """
        self.this, self.head_folder = this, head_folder
        self.records: dict[str, ExitRecord] = {}
        self.evidence = list[Evidence]()
        """Of failures that the exit records do not show, such as a lost host."""
        self.of_head = list[Evidence]()
        """That this process did not run for longer than the lease, which need not have ended any rank."""
        self.num_saved = 0
        """How many sidecars hosts have reported that their ranks wrote to the hosts' own disks."""
        self._may_end = False
        self.gone = set[str]()
        """Ranks that ended with their guards, without a record, before the head ended the attempt."""
        self._news, self._lines = News(), RankLines()
        self._hosts = {
            host: _Host(agents[host], time.monotonic(), boot_ids[host] if boot_ids else None)
            for host in this.hosts or {}
        }
        for host in self._hosts.values():
            host.agent.watch(this.run_id, None if boot_ids is None else {}, self._news)
        self._closed = threading.Event()
        self._renewal = threading.Thread(target=self._renew, name="lease of the head", daemon=True)
        self._renewal.start()

    @property
    def ranks(self) -> list[str]:
        """Names of all expected ranks."""
        return [rank_name(rank) for rank in range(Hosts.of(self.this.hosts or {}).num_ranks)]

    @property
    def succeeded(self) -> bool:
        """Whether every rank has finished its work."""
        return self.all_ended and all(record.succeeded for record in self.records.values())

    @property
    def failed(self) -> bool:
        """Whether a rank has failed or ended without a record, or a host was lost."""
        bad = self.gone or any(record.is_failure for record in self.records.values())
        return bool(self.evidence or bad)

    @property
    def all_ended(self) -> bool:
        """Whether every rank has ended, successfully or not."""
        return all(name in self.records for name in self.ranks)

    @property
    def silent(self) -> list[str]:
        """Hosts that have sent nothing for a while."""
        return [name for name, host in self._hosts.items() if host.is_silent]

    @property
    def lost(self) -> list[str]:
        """Hosts that have sent nothing for longer than the lease, so that ranks there have ended by themselves."""
        return [name for name, host in self._hosts.items() if host.is_lost]

    @property
    def not_ended(self) -> list[str]:
        """Hosts that have not reported that everything there has ended."""
        return [name for name, host in self._hosts.items() if not host.ended]

    def has_obeyed(self, host: str) -> bool:
        """Whether all ranks of a host have done their work or ended as ordered, so its absence explains nothing."""
        hosts = [name for name, slots in (self.this.hosts or {}).items() for _ in slots]
        records = [self.records.get(name) for name, of in zip(self.ranks, hosts, strict=True) if of == host]
        return all(record is not None and not record.is_failure for record in records)

    def look(self, seconds: float) -> None:
        """Process all reports that have queued up, perhaps for hours, and those that arrive within ``seconds``."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                self._take(*self._news.get(timeout=max(0.0, deadline - time.monotonic())))
            except Empty:
                break
        self._forgive_silence(time.monotonic() - deadline)
        for name, host in self._hosts.items():
            self._judge_silence(name, host)

    def order(self, order: Order) -> None:
        """Send an order to all hosts."""
        self._may_end = self._may_end or order == Order.END
        for host in self._hosts.values():
            host.agent.order(order)

    def close(self) -> None:
        """Watch the attempt no longer; its leases are not renewed from now on."""
        self._closed.set()
        for host in self._hosts.values():
            host.agent.unwatch()
        self._renewal.join()

    def _renew(self) -> None:
        head_lease.begin(self.head_folder)
        began, before = now(), _clock()
        while not self._closed.wait(RENEW_SECONDS):
            self._note_pause(_clock() - before, began)
            head_lease.renew(self.head_folder)
            began, before = now(), _clock()

    def _note_pause(self, seconds: float, began: str) -> None:
        """Note how long this process did not run, if that was longer than the lease."""
        lease_seconds = self.this.lease_seconds or 0
        if seconds > lease_seconds:
            error = LaunchError(
                f"the head did not run for {seconds:.0f} s, so ranks on hosts ended by themselves after "
                f"cluster.lease_seconds ({lease_seconds:.0f} s). Check whether somebody stopped it (Ctrl-Z, SIGSTOP, a "
                "debugger), or whether this machine was suspended. The same command continues from the last checkpoint"
            )
            self.of_head.append(Evidence(error, Hops.OWN, began))  # what failed meanwhile, failed for that reason

    def _take(self, name: str, last_message_at: float, report: Report | ChannelBroken) -> None:
        host = self._hosts[name]
        if isinstance(report, ChannelBroken):
            host.broken = report.reason
            return
        host.last_message_at = max(host.last_message_at, last_message_at)  # later, if silence was forgiven since
        match report:
            case Hello(boot_id=boot_id):
                self._greet(name, host, boot_id)
            case LeaseNotRenewed(reason):
                self._fail(DiskFailed(f"{name}: {redact(reason)}. To train without {name}, use --exclude {name}"), name)
            case RankError() | RankEnded():
                self._keep(report)
            case RankPhase():
                self._keep_phase(report, last_message_at)
            case Saved(count):
                self.num_saved += count
            case NewLines():
                self._lines.report(name, report.lines, report.left_out)
            case Alive(gone):
                self.gone |= set() if self._may_end else set(gone)
            case Ended(left):
                self._part(name, host, left)

    def _greet(self, name: str, host: _Host, boot_id: str) -> None:
        if host.boot_id not in (None, boot_id):
            self._fail(HostLost(f"{name} was restarted while its ranks were running"), name)
        host.boot_id, host.broken = boot_id, ""

    def _keep(self, report: RankError | RankEnded) -> None:
        name = report.name if isinstance(report, RankError) else report.record.name
        if name not in self.ranks:  # checked before a name from another machine becomes the name of a file here
            return
        if isinstance(report, RankEnded):
            self.records[name] = report.record
        try:
            if isinstance(report, RankEnded):
                self.this.write_exit(report.record)
            else:
                reported = {"type": redact(report.kind), "message": redact(report.message)}
                write_json(self.this.folder / f"{name}.error.json", reported)
        except OSError as error:  # not raised here: first, the ranks of all hosts must be ended
            kind = DiskFull if isinstance(of_rank(error), DiskFull) else DiskFailed
            self._fail(kind(f"this machine: {explain(error)}"))

    def _keep_phase(self, found: RankPhase, at: float) -> None:
        """Keep it for the progress report and for ``status``, which are other threads or processes."""
        if (phase := next((each for each in heartbeat.PHASE_DESCRIPTIONS if each == found.phase), None)) is not None:
            beat = Beat(at, phase, at - found.seconds, found.limit_seconds, found.step)
            with suppress(OSError):  # the phase is then not shown; training does not depend on it
                heartbeat.write(heartbeat.beat_file(self.this.rank_files(HEAD)), beat)

    def _part(self, name: str, host: _Host, left: tuple[int, ...]) -> None:
        host.ended = True
        if not self._may_end:
            self._fail(
                HostLost(
                    f"{name} reports that the attempt has ended, but the head did not end it. Check whether the host "
                    "was restarted, got a new disk, or is used by another head"
                ),
                name,
            )
        if left:
            _log.error(
                "%s: processes %s survived SIGKILL, so a disk or driver may hang: restart that host", name, list(left)
            )

    def _forgive_silence(self, late_seconds: float) -> None:
        """Do not count the time for which this process was stopped as silence: what arrived is yet to be read."""
        if late_seconds > _SILENT_SECONDS:
            for host in self._hosts.values():
                host.last_message_at = min(host.last_message_at + late_seconds, time.monotonic())

    def _judge_silence(self, name: str, host: _Host) -> None:
        seconds = time.monotonic() - host.last_message_at
        if host.is_silent and seconds <= _SILENT_SECONDS:
            _log.warning("%s responds again", name)
        if not host.is_silent and seconds > _SILENT_SECONDS and not host.ended:
            tolerated = self.this.lease_seconds or 0
            _log.warning(
                "%s has not responded for %.0f s and counts as lost after %.0f s: %s",
                name,
                seconds,
                tolerated,
                host.broken or "nothing arrives from it",
            )
        host.is_silent = seconds > _SILENT_SECONDS and not host.ended
        was_lost, host.is_lost = host.is_lost, host.is_silent and seconds > (self.this.lease_seconds or 0)
        if host.is_lost and not was_lost and not self.has_obeyed(name):
            error = HostLost(
                f"{name} has not responded for {seconds:.0f} s, so it counts as lost. The last error: "
                f"{host.broken or 'nothing arrives from it'}"
            )
            self.evidence.append(Evidence(error, Hops.LOST, hosts=(name,)))

    def _fail(self, failure: LaunchError, *hosts: str) -> None:
        self.evidence.append(Evidence(failure, Hops.OWN, now(), hosts))


def _clock() -> float:
    """Seconds since this machine was booted, also those for which it was suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
