"""The head's end of a host session: it reconnects when the connection breaks, and renews the lease.

See infra.node.attempts.session_server for the other end.
"""

import threading
import time
from dataclasses import dataclass
from itertools import chain, repeat
from queue import SimpleQueue

from infra.head.hosts.nodes import END_SECONDS, Nodes, conversation
from infra.head.hosts.ssh import Transport
from infra.node.attempts.attempt import Attempt
from infra.node.attempts.log_tail import Offsets
from infra.node.attempts.session_messages import Ended, Hello, Instruction, NewLines, Order, Report, Watch
from infra.node.channel import BrokenOff, Channel
from t5train.errors import HostError, HostUnreachable

RENEW_SECONDS = 2.0
_LOOK_SECONDS = 0.25
_SILENT_SECONDS = 8.0
"""Silence after which to reconnect. That is faster than to wait for TCP, which waits longer after each try."""
_LOGIN_SHARE = 0.5
"""Share of the lease after which to reconnect if not even the first message has arrived, as when a login is slow."""
_BACKOFF_SECONDS = (1.0, 2.0)


@dataclass(frozen=True)
class SessionBroken:
    """The connection to the host could not be made, or was lost."""

    reason: str


News = SimpleQueue[tuple[str, float, Report | SessionBroken]]
"""Received reports: the host, the time of arrival (monotonic), the report."""


class HostSession:
    """A thread that exchanges messages with one host. What it receives goes to ``news``."""

    def __init__(self, transport: Transport, host: str, this: Attempt, offsets: Offsets | None, news: News) -> None:
        """Open a session for an attempt; for ``offsets``, see infra.node.attempts.log_tail."""
        self.host = host
        self._nodes = Nodes(transport, (host,), code=this.code)
        self._run_id, self._offsets, self._news = this.run_id, offsets, news
        self._login_seconds = _LOGIN_SHARE * (this.lease_seconds or 0)
        self._order: Order | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._stay_open, name=f"session on {host}", daemon=True)
        self._thread.start()

    def order(self, order: Order) -> None:
        """Send an order to the host. It is sent again after a reconnect, because it may not have arrived."""
        self._order = order

    def close(self) -> None:
        """Begin to close the session: from now on, nothing is received and no lease is renewed."""
        self._closed.set()

    def join(self) -> None:
        """Wait until the session is closed, for a few seconds at most."""
        self._thread.join(END_SECONDS + 1.0)

    def _stay_open(self) -> None:
        for seconds in chain(_BACKOFF_SECONDS, repeat(_BACKOFF_SECONDS[-1])):
            try:
                with conversation(self._nodes, self.host, Watch(self._run_id, self._offsets)) as node:
                    self._converse(node)
            except (HostError, OSError, ValueError) as error:  # any cause: without a session, the host would be lost
                self._news.put((self.host, time.monotonic(), SessionBroken(str(error))))
            if self._closed.wait(seconds):
                return

    def _converse(self, node: Channel) -> None:
        """Exchange messages until the session is closed. Raises BrokenOff or HostUnreachable if it is lost."""
        sent, renewed_at, last_message_at = None, -RENEW_SECONDS, time.monotonic()
        tolerated_seconds = max(_SILENT_SECONDS, self._login_seconds)
        while not self._closed.is_set():
            now = time.monotonic()
            if now - renewed_at >= RENEW_SECONDS:
                node.send(Instruction(Order.RENEW))
                renewed_at = now
            if reports := node.receive_within(_LOOK_SECONDS, Report):
                last_message_at, tolerated_seconds = time.monotonic(), _SILENT_SECONDS
            for report in reports:
                self._receive(report)
            if self._order not in (None, sent):
                node.send(Instruction(self._order))
                sent = self._order
            if now - last_message_at > tolerated_seconds:
                silent_seconds = now - last_message_at
                raise HostUnreachable(
                    f"{self.host}: no message received for {silent_seconds:.0f} s. Check whether the host hangs, and "
                    "the network to it",
                    [self.host],
                )
            if node.at_end and not self._closed.is_set():
                raise BrokenOff("the host ended the session")

    def _receive(self, report: Report) -> None:
        if isinstance(report, Hello | NewLines):
            self._offsets = report.offsets
        if isinstance(report, Ended):
            self._closed.set()
        self._news.put((self.host, time.monotonic(), report))
