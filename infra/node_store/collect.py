"""Files of a run that are no checkpoint's, such as metrics and the witness: from the node that writes them to the head."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from infra.node_store.conversation import conversation
from infra.node_store.nodes import Nodes
from infra.node_store.paths import scratch_folder, within
from infra.node_store.pulling import Wanted, Watcher, pull
from t5train.errors import HostError
from t5train.records import digest_file

_DEADLINE_SECONDS = 600.0


def collect(nodes: Nodes, host: str, place: str, names: Iterable[str], into: Path) -> list[str]:
    """Copy files and whole folders called ``names`` from a host's ``place`` into the folder ``into``.

    What is not there is left out; returns the names of the files that are. A file that grows comes as it was at one
    moment. Raises HostError.
    """
    request = nodes.request(place=place, names=list(names))
    answer = nodes.on(host).ask("listing", lambda _: request, _DEADLINE_SECONDS)[host]
    if isinstance(answer, HostError):
        raise answer
    wanted = [Wanted(**each) for each in answer["files"]]
    into.mkdir(mode=0o700, parents=True, exist_ok=True)
    with conversation(nodes, host, "send", nodes.request(place=place)) as channel:
        pull(channel.fetch, wanted, into, Watcher())
    return [each.name for each in wanted]


def listed(folder: Path, names: Iterable[str]) -> list[Wanted]:
    """Files of a folder called ``names``, and all in folders of it that are called so; what to ``restore`` of them."""
    return [
        Wanted.of(str(path.relative_to(folder)), digest_file(path))
        for name in names
        for path in _files(within(folder, name))
    ]


def listing(request: dict[str, Any]) -> dict[str, Any]:
    """Action: the files ``names`` of ``place``, with their digests."""
    folder = within(scratch_folder(request["scratch"]), request["place"])
    return {"files": [each.to_json() for each in listed(folder, request["names"])]}


def _files(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
    elif path.is_dir():
        yield from (each for each in sorted(path.rglob("*")) if each.is_file() and not each.name.startswith("."))
