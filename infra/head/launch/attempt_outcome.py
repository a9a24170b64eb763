"""Watches an attempt over hosts until all its ranks have ended, and decides when to end it."""

import logging
import time
from collections.abc import Callable
from contextlib import suppress

from infra.head.hosts.ssh import Transport
from infra.head.launch import earlier_attempts
from infra.head.launch.deepspeed_launcher import ClusterLauncher
from infra.head.launch.rank_evidence import evidence_of
from infra.head.launch.supervision import Supervision
from infra.head.launch.verdict import Evidence, Hops, verdict
from infra.head.stop_signal import stopping_line, undisturbed
from infra.node.attempts import attempt
from infra.node.attempts.agent_messages import Order
from infra.node.attempts.exit_record import Cause
from t5train.errors import HostLost, T5TrainError

_LOOK_SECONDS = 0.5
_SETTLE_SECONDS = 2.0
"""How long to wait after a failure, since another host may be about to report an earlier one."""
_RECORDS_SECONDS = 5.0
"""How long to wait, after the launcher has ended, for the records of ranks that ended just before it."""
_STOP_SECONDS = 10.0
"""How long guards may take to end ranks and to record it."""
_log = logging.getLogger(__name__)


class ClusterWatch:
    """Watches one attempt over hosts to its end."""

    def __init__(
        self, supervision: Supervision, launcher: ClusterLauncher, transport: Transport, on_tick: Callable[[], None]
    ) -> None:
        self.this = supervision.this
        self._supervision, self._launcher, self._transport, self._on_tick = supervision, launcher, transport, on_tick
        self._silent: dict[str, str] = {}
        """Why the attempt could not be ended on hosts whose leases have not expired."""
        self._is_launcher_first = False

    def until_decided(self) -> None:
        """Wait until every rank has ended, one has failed, a host is lost, or the launcher is gone."""
        gone_since = None
        while True:
            gone = not self._launcher.is_alive  # checked before the records: the launcher outlives the ranks
            self._look()
            if self._supervision.failed:
                self._supervision.look(_SETTLE_SECONDS)
                return
            if self._supervision.all_ended:
                self._launcher.await_end()
                return
            gone_since = gone_since or (time.monotonic() if gone else None)
            if gone_since and time.monotonic() - gone_since > _RECORDS_SECONDS and not self._supervision.silent:
                self._is_launcher_first = True
                return

    def num_saved(self) -> int:
        """How many parts of checkpoints ranks are known to have saved on their hosts' own disks."""
        return self._supervision.num_saved

    def stop(self) -> None:
        """Order the ranks to save and end, and wait until they have ended."""
        _log.warning("attempt %s: %s", self.this.number, stopping_line(self.this.grace_seconds))
        with suppress(OSError):  # on a full disk, a later head does not know that ranks may still be saving
            self.this.order_stop()
        self._supervision.order(Order.STOP)
        began = time.monotonic()
        while not self._supervision.all_ended and time.monotonic() - began < self._stop_seconds():
            self._supervision.look(_LOOK_SECONDS)

    def _stop_seconds(self) -> float:
        """How long ranks may take to end. Guards end those that have not begun to save after the grace period."""
        return self.this.grace_seconds + _STOP_SECONDS + (0 if self._supervision.failed else self.this.saving_seconds)

    def end(self) -> None:
        """End the attempt on every host that can be reached, and collect what its ranks have written."""
        with undisturbed("ending the ranks on all hosts, which takes a minute at most"):
            self._end_on_hosts()
        earlier_attempts.settle(self.this, self._transport, [*self._supervision.lost, *self._silent])

    def _end_on_hosts(self) -> None:
        self._launcher.end()
        self._supervision.order(Order.END)
        deadline = time.monotonic() + earlier_attempts.END_SECONDS
        while set(self._supervision.not_ended) - set(self._supervision.silent) and time.monotonic() < deadline:
            self._supervision.look(_LOOK_SECONDS)
        missing, lost = self._supervision.not_ended, self._supervision.lost
        self._supervision.close()
        if lost:
            _log.warning(
                "attempt %s may keep running on %s, which cannot be reached, until its lease expires there",
                self.this.number,
                ", ".join(lost),
            )
        # Others may answer although the connections to their agents are broken or slow.
        asked = [host for host in missing if host not in lost]
        self._silent = earlier_attempts.end_on_hosts(self.this, self._transport, asked)

    def failure(self) -> T5TrainError | None:
        """Return the error to raise after everything has ended; None if all ranks succeeded."""
        if self._supervision.succeeded:
            return None
        silent = [
            Evidence(HostLost(f"could not end the ranks on {why}"), Hops.SILENT, hosts=(host,))
            for host, why in self._silent.items()
            if not self._supervision.has_obeyed(host)
        ]
        of_ranks = evidence_of(self.this, len(self._supervision.ranks), self._supervision.gone, self._is_launcher_first)
        of_hosts = [*self._supervision.evidence, *self._of_head(), *silent]
        return verdict([*of_hosts, *of_ranks], self.this.hosts or {})

    def _of_head(self) -> list[Evidence]:
        """That the head did not run, if it ended ranks. It does not if the hosts were suspended with the head."""
        records = map(self.this.exit_record, self._supervision.ranks)
        has_ended = any(record is not None and record.cause == Cause.HEAD for record in records)
        return self._supervision.of_head if has_ended else []

    def _look(self) -> None:
        self._supervision.look(_LOOK_SECONDS)
        self._on_tick()
        if (self._launcher.folder / attempt.STOP).exists():
            self._supervision.order(Order.STOP)
