"""Messages that arrive in pieces, or never end."""

import os
from collections.abc import Iterator
from typing import IO, NamedTuple

import pytest

from infra.node import channel
from infra.node.attempts.agent_messages import Alive
from infra.node.channel import BrokenOff, Channel
from infra.node.messages import encode


class Ends(NamedTuple):
    """A channel, and the end at which its peer writes."""

    channel: Channel
    peer: IO[bytes]


@pytest.fixture
def ends() -> Iterator[Ends]:
    reader, writer = os.pipe()
    with open(reader, "rb") as received, open(writer, "wb", buffering=0) as peer, open(os.devnull, "wb") as unused:
        yield Ends(Channel(received, unused), peer)


def test_messages_are_received_as_soon_as_they_are_whole(ends: Ends) -> None:
    first, second = encode(Alive(("rank-00000",))), encode(Alive(("rank-00001",)))
    ends.peer.write(first[:5])
    assert ends.channel.receive_within(0.1, Alive) == []
    ends.peer.write(first[5:] + second)
    assert ends.channel.receive_within(10, Alive) == [Alive(("rank-00000",)), Alive(("rank-00001",))]


def test_a_message_without_an_end_breaks_the_conversation_off(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "_MOST_LINE_BYTES", 1 << 10)
    ends.peer.write(b"x" * (2 << 10))
    with pytest.raises(BrokenOff, match="without the end of a message"):
        ends.channel.receive_within(10, Alive)
