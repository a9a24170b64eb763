"""The head's ends of its control channels: one agent on each host, for as long as the run is held.

An agent renews the leases on its host: that of the attempt which it watches, and that of the run's files. When a
connection breaks, it is made again. See infra.node.attempts.agent for the other end.
"""

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain, repeat
from queue import SimpleQueue
from typing import Protocol

from infra.head.hosts.code_shipping import ship
from infra.head.hosts.nodes import END_SECONDS, Nodes, conversation
from infra.node.attempts.agent_messages import (
    ClaimNotRenewed,
    ClaimRenewed,
    Ended,
    Hello,
    NewLines,
    NotWatched,
    Order,
    Ordered,
    Renew,
    Report,
    Serve,
    Watch,
)
from infra.node.attempts.log_tail import Offsets
from infra.node.attempts.run_ownership import Claimed, ClaimRun
from infra.node.channel import BrokenOff, Channel
from t5train.errors import HostUnreachable, RemoteFailed
from t5train.files.os_errors import in_one_line

RENEW_SECONDS = 2.0
_LOOK_SECONDS = 0.25
_SILENT_SECONDS = 8.0
"""Silence after which to reconnect. That is faster than to wait for TCP, which waits longer after each try."""
_LOGIN_SHARE = 0.5
"""Share of the lease after which to reconnect if not even the first message has arrived, as when a login is slow."""
_UNANSWERED_SHARE = 0.5
"""Share of the lease after which a claim counts as not renewed, although the agent there is alive."""
_BACKOFF_SECONDS = (1.0, 2.0)


@dataclass(frozen=True)
class ChannelBroken:
    """The connection to the host could not be made, or was lost."""

    reason: str


News = SimpleQueue[tuple[str, float, Report | ChannelBroken]]
"""Received reports: the host, the time of arrival (monotonic), the report."""


class KeptClaim(Protocol):
    """A claim that agents renew until it is over. Their threads call it."""

    request: ClaimRun
    is_over: bool

    def take_answer(self, host: str, answer: Claimed | str) -> None:
        """Take what the host answered to a renewal, or why there was no answer."""
        ...


@dataclass
class _Watched:
    """An attempt on one host, as the head watches it."""

    run_id: str
    offsets: Offsets | None
    news: News
    order: Order | None = None
    sent: Order | None = None
    """The last order sent to the agent since it watches this attempt."""
    is_announced: bool = False
    """Whether the agent was sent Watch, and has not reported NotWatched."""
    is_greeted: bool = False
    """Whether what arrives on this channel is about this attempt."""
    is_over: bool = False


class Agent:
    """The head's end of the channel to the agent on one host, and the thread that uses it."""

    def __init__(self, nodes: Nodes, lease_seconds: float) -> None:
        """Open the channel to the one host of ``nodes``."""
        (self.host,) = nodes.hosts
        self.nodes = nodes
        """How to connect the next time."""
        self.claim: KeptClaim | None = None
        """The claim to renew."""
        self.lease_seconds = lease_seconds
        """How long the agent lives without a message, and the lease of what it renews, from the next connection on."""
        self._watched: _Watched | None = None
        self._answered, self._asked_at = threading.Event(), 0.0
        self._answered.set()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._stay_open, name=f"agent on {self.host}", daemon=True)
        self._thread.start()

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to watch or to renew."""
        return self._current is None and (self.claim is None or self.claim.is_over)

    def watch(self, run_id: str, offsets: Offsets | None, news: News) -> None:
        """Watch an attempt, and renew its lease. For ``offsets``, see infra.node.attempts.log_tail."""
        self._watched = _Watched(run_id, offsets, news)

    def unwatch(self) -> None:
        """Receive no more about the attempt, and renew its lease no longer."""
        self._watched = None

    def order(self, order: Order) -> None:
        """Send an order about the attempt. It is sent again after a reconnect, because it may not have arrived."""
        if self._watched is not None:
            self._watched.order = order

    def await_answer(self, seconds: float) -> None:
        """Wait until no renewal of the claim is under way, but no longer than this."""
        self._answered.wait(seconds)

    def close(self) -> None:
        """Begin to close the channel."""
        self._closed.set()

    def join(self, seconds: float = END_SECONDS) -> None:
        """Wait until the channel is closed, but no longer than this."""
        self._thread.join(seconds)

    @property
    def _current(self) -> _Watched | None:
        watched = self._watched
        return None if watched is None or watched.is_over else watched

    def _stay_open(self) -> None:
        for seconds in chain(_BACKOFF_SECONDS, repeat(_BACKOFF_SECONDS[-1])):
            nodes = self.nodes
            try:
                self._connect(nodes)
            except Exception as error:  # whatever it is: else, the host would be lost
                self._report_broken(in_one_line(error))
            self._answered.set()
            if self._closed.wait(seconds):
                return
            while self.is_idle:  # as on hosts that were switched off after training
                if self._closed.wait(_LOOK_SECONDS):
                    return

    def _connect(self, nodes: Nodes) -> None:
        """Exchange messages with the agent until the channel is closed. If it cannot start, send the host this code."""
        try:
            with conversation(nodes, self.host, Serve(self.lease_seconds)) as node:
                self._converse(node)
        except RemoteFailed:
            # Ranks that were found running have the code of an earlier head, and a disk may be new.
            for error in ship(nodes.transport, nodes.hosts).values() if nodes.code else ():
                raise error from None
            raise

    def _report_broken(self, reason: str) -> None:
        if (watched := self._current) is not None:
            watched.news.put((self.host, time.monotonic(), ChannelBroken(reason)))
        if self.claim is not None and not self.claim.is_over:
            self.claim.take_answer(self.host, reason)

    def _converse(self, node: Channel) -> None:
        """Exchange messages until the channel is closed. Raises BrokenOff or HostUnreachable if it is lost."""
        announced: _Watched | None = None
        renewed_at, last_message_at = -RENEW_SECONDS, time.monotonic()
        tolerated_seconds = max(_SILENT_SECONDS, _LOGIN_SHARE * self.lease_seconds)
        while not self._closed.is_set():
            now = time.monotonic()
            if (watched := self._current) is not announced:
                announced, renewed_at = watched, -RENEW_SECONDS
                if watched is not None:
                    watched.is_announced = watched.is_greeted = False
            if now - renewed_at >= RENEW_SECONDS:
                self._renew(node, announced)
                renewed_at = now
            if reports := node.receive_within(_LOOK_SECONDS, Report):
                last_message_at, tolerated_seconds = time.monotonic(), _SILENT_SECONDS
            for report in reports:
                self._receive(report, announced)
            if announced is not None and (order := announced.order) is not None and order != announced.sent:
                announced.sent = order
                node.send(Ordered(order))
            if now - last_message_at > tolerated_seconds:
                silent_seconds = now - last_message_at
                raise HostUnreachable(
                    f"{self.host}: no message received for {silent_seconds:.0f} s. Check whether the host hangs, and "
                    "the network to it",
                    [self.host],
                )
            if node.at_end and not self._closed.is_set():
                raise BrokenOff("the agent there has ended")

    def _renew(self, node: Channel, announced: _Watched | None) -> None:
        if announced is not None and not announced.is_announced:
            announced.is_announced, announced.sent = True, None
            node.send(Watch(announced.run_id, announced.offsets))
        node.send(Renew(announced.run_id if announced else None, self._claim_to_renew()))

    def _claim_to_renew(self) -> ClaimRun | None:
        """The claim to send, unless the answer to the last renewal is still to come."""
        claim = self.claim
        if claim is None:
            return None
        if not self._answered.is_set():
            if (seconds := time.monotonic() - self._asked_at) > _UNANSWERED_SHARE * self.lease_seconds:
                claim.take_answer(
                    self.host, f"no answer for {seconds:.0f} s. Check whether the disk of its scratch folder hangs"
                )
            return None
        self._answered.clear()  # first, so that whoever ends the claim now waits for the answer
        self._asked_at = time.monotonic()
        if claim.is_over:
            self._answered.set()
            return None
        return claim.request

    def _receive(self, report: Report, announced: _Watched | None) -> None:
        if isinstance(report, ClaimRenewed | ClaimNotRenewed):
            self._answered.set()
            if self.claim is not None and not self.claim.is_over:
                self.claim.take_answer(self.host, report.claimed if isinstance(report, ClaimRenewed) else report.reason)
            return
        if announced is None:
            return
        if isinstance(report, Hello):
            announced.is_greeted = report.run_id == announced.run_id
        if isinstance(report, NotWatched) and report.run_id == announced.run_id:
            announced.is_announced = announced.is_greeted = False
            announced.news.put((self.host, time.monotonic(), ChannelBroken(report.reason)))
        if not announced.is_greeted or announced.is_over or announced is not self._watched:
            return
        if isinstance(report, Hello | NewLines):
            announced.offsets = report.offsets
        announced.is_over = isinstance(report, Ended)
        announced.news.put((self.host, time.monotonic(), report))


class Agents:
    """The agents of a held run, one on each host that it uses."""

    def __init__(self) -> None:
        self._open: dict[str, Agent] = {}

    def on(self, nodes: Nodes, lease_seconds: float) -> Mapping[str, Agent]:
        """Return the agents on these hosts. Opens those that are missing, and closes those that have nothing to do.

        If an agent is open already, it is connected in this way the next time.
        """
        for host in nodes.hosts:
            if host in self._open:
                self._open[host].nodes, self._open[host].lease_seconds = nodes.on(host), lease_seconds
            else:
                self._open[host] = Agent(nodes.on(host), lease_seconds)
        for host in [host for host, agent in self._open.items() if host not in nodes.hosts and agent.is_idle]:
            self._open.pop(host).close()
        return {host: self._open[host] for host in nodes.hosts}

    def await_answers(self) -> None:
        """Wait until no host renews a claim that is over, for a few seconds at most."""
        deadline = time.monotonic() + END_SECONDS
        for agent in self._open.values():
            agent.await_answer(max(0.0, deadline - time.monotonic()))

    def close(self) -> None:
        """Close all channels, waiting for a few seconds at most: leases are not renewed from now on."""
        for agent in self._open.values():
            agent.close()
        deadline = time.monotonic() + END_SECONDS
        for agent in self._open.values():
            agent.join(max(0.0, deadline - time.monotonic()))
