"""The head's end of a host session: it reconnects when the connection breaks, and renews the lease.

See infra.node.attempts.session_server for the other end.
"""

import json
import os
import select
import subprocess
import threading
import time
from itertools import chain, repeat
from queue import SimpleQueue
from typing import IO, Any, cast

from infra.head.hosts.node_client import node_command
from infra.head.hosts.ssh import Transport, connect, failure_of, kill, message_of
from infra.node.attempts.attempt import Attempt
from infra.node.attempts.log_tail import Offsets
from t5train.errors import HostError, HostUnreachable

RENEW_SECONDS = 2.0
_LOOK_SECONDS = 0.25
_SILENT_SECONDS = 8.0
"""After which a connection counts as broken: reconnecting is faster than TCP, which waits longer after each try."""
_BACKOFF_SECONDS = (1.0, 2.0)
_CLOSE_SECONDS = 5.0

Message = dict[str, Any]
News = SimpleQueue[tuple[str, float, Message]]
"""Messages of hosts: the host, the time of arrival (monotonic), the message. ``broken`` comes from the session."""


class HostSession:
    """A thread that exchanges messages with one host. What it receives goes to ``news``."""

    def __init__(self, transport: Transport, host: str, this: Attempt, offsets: Offsets | None, news: News) -> None:
        """Open a session for an attempt; for ``offsets``, see infra.node.attempts.log_tail."""
        self.host = host
        self._command = node_command("watch", this.code)
        self._transport, self._run_id, self._offsets, self._news = transport, this.run_id, offsets, news
        self._order: Message | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._stay_open, name=f"window on {host}", daemon=True)
        self._thread.start()

    def order(self, message: Message) -> None:
        """Send an order to the host. It is sent again after a reconnect, as it may not have arrived."""
        self._order = message

    def close(self) -> None:
        """Begin to close it: from now on, nothing is received or renewed."""
        self._closed.set()

    def join(self) -> None:
        """Wait until it is closed."""
        self._thread.join(_CLOSE_SECONDS)

    def _stay_open(self) -> None:
        for seconds in chain(_BACKOFF_SECONDS, repeat(_BACKOFF_SECONDS[-1])):
            try:
                self._converse()
            except (HostError, OSError, ValueError) as error:  # whatever the cause: without a session the host is lost
                self._news.put((self.host, time.monotonic(), {"broken": str(error)}))
            if self._closed.wait(seconds):
                return

    def _converse(self) -> None:
        """Exchange messages until it is closed. Raises HostError if the connection cannot be made, or breaks."""
        conversation = _Conversation(self.host, self._command, connect(self._transport, self.host, self._command))
        told = None
        try:
            conversation.say({"run_id": self._run_id, "offsets": self._offsets})
            while not self._closed.is_set():
                for message in conversation.hear():
                    self._hear(message)
                if told is not (order := self._order) and order is not None:
                    conversation.say(order)
                    told = order
        finally:
            conversation.end()

    def _hear(self, message: Message) -> None:
        self._offsets = message.get("offsets", self._offsets)
        if "ended" in message:
            self._closed.set()
        self._news.put((self.host, time.monotonic(), message))


class _Conversation:
    """Lines to and from the process at the other end. Raises HostError if that process has ended."""

    def __init__(self, host: str, command: list[str], process: subprocess.Popen[bytes]) -> None:
        self._host, self._command, self._process = host, command, process
        self._stdin, self._stdout = (cast("IO[bytes]", pipe).fileno() for pipe in (process.stdin, process.stdout))
        self._rest = b""
        self._heard_at, self._renewed_at = time.monotonic(), -RENEW_SECONDS

    def say(self, message: Message) -> None:
        try:
            os.write(self._stdin, json.dumps(message).encode() + b"\n")
        except BrokenPipeError:
            raise self._failure() from None

    def hear(self) -> list[Message]:
        """The messages that arrive within a moment."""
        now = time.monotonic()
        if now - self._renewed_at >= RENEW_SECONDS:
            self.say({"renew": True})
            self._renewed_at = now
        if not select.select([self._stdout], [], [], _LOOK_SECONDS)[0]:
            if now - self._heard_at > _SILENT_SECONDS:
                raise HostUnreachable(
                    f"{self._host}: no message received for {now - self._heard_at:.0f} s", [self._host]
                )
            return []
        if not (new := os.read(self._stdout, 1 << 16)):
            raise self._failure()
        self._heard_at = now
        *lines, self._rest = (self._rest + new).split(b"\n")
        return [message_of(self._host, line) for line in lines]

    def end(self) -> None:
        kill(self._process)
        self._process.communicate()

    def _failure(self) -> HostError:
        try:
            _, said = self._process.communicate(timeout=_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            kill(self._process)
            _, said = self._process.communicate()
        return failure_of(self._host, self._command, self._process.returncode, said)
