"""Files of a run that are no checkpoint's, such as metrics and the witness, come from a node to the head."""

from collections.abc import Iterable
from pathlib import Path

from infra.node_store.conversation import conversation
from infra.node_store.nodes import Nodes
from infra.node_store.pulling import Wanted, Watcher, pull
from t5train.errors import HostError, RemoteFailed

_DEADLINE_SECONDS = 600.0


def collect(nodes: Nodes, host: str, place: str, names: Iterable[str], into: Path) -> list[str]:
    """Copy files and whole folders called ``names`` from a host's ``place`` into the folder ``into``.

    What is not there is left out; returns the names of the files that are. A file that grows comes as it was at one
    moment. Raises HostError.
    """
    asked = tuple(names)
    folders = tuple(f"{name}/" for name in asked)
    request = nodes.request(place=place, names=list(asked))
    answer = nodes.on(host).ask("listing", lambda _: request, _DEADLINE_SECONDS)[host]
    if isinstance(answer, HostError):
        raise answer
    wanted = [Wanted(**each) for each in answer["files"]]
    if strange := [each.name for each in wanted if each.name not in asked and not each.name.startswith(folders)]:
        raise RemoteFailed(f"{host} answers with {strange[0]!r}, which was not asked for: see what runs there", [host])
    into.mkdir(mode=0o700, parents=True, exist_ok=True)
    with conversation(nodes, host, "send", nodes.request(place=place)) as channel:
        pull(channel.fetch, wanted, into, Watcher())
    return [each.name for each in wanted]
