"""What a place holds of a run's checkpoints: a node's own disk, or the gathered copy on the head."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from infra.node_store.nodes import Nodes
from infra.node_store.paths import run_place, scratch_folder, within
from infra.node_store.pulling import Wanted, is_whole
from t5train.atomic_folder import discard
from t5train.errors import HostError
from t5train.run_files import CHECKPOINTS

_DEADLINE_SECONDS = 120.0
_VERIFY_SECONDS = 3600.0
_SIDECARS = "rank-*.json"
HEAD = ""
"""Place of the gathered copy; other places are names of hosts."""


@dataclass(frozen=True)
class Copy:
    """What a place holds of a tag: text of sidecars, and size in bytes of all other files, by name."""

    sidecars: Mapping[str, str]
    files: Mapping[str, int]


Inventory = Mapping[str, Copy]
"""By tag."""


def inventory_of(checkpoints: Path) -> Inventory:
    """What lies in a folder of checkpoints; nothing where there is none, or of what is being written or removed."""
    if not checkpoints.is_dir():
        return {}
    return {each.name: _copy_of(each) for each in sorted(checkpoints.iterdir()) if _is_tag(each)}


@dataclass(frozen=True)
class Survey:
    """What all places hold of a run's checkpoints."""

    found: Mapping[str, Inventory]
    """By place: the head's gathered copy, and each node that answered."""
    silent: Mapping[str, HostError]
    """Why the other nodes did not."""


def survey(nodes: Nodes, run_name: str, checkpoints: Path) -> Survey:
    """Ask all nodes what they hold, and look at the gathered copy."""
    answers = nodes.ask("inventory", lambda _: nodes.request(run_name=run_name), _DEADLINE_SECONDS)
    silent = {host: answer for host, answer in answers.items() if isinstance(answer, HostError)}
    heard = {
        host: {tag: Copy(**copy) for tag, copy in answer["tags"].items()}
        for host, answer in answers.items()
        if not isinstance(answer, HostError)
    }
    return Survey({HEAD: inventory_of(checkpoints), **heard}, silent)


def verify_on(
    nodes: Nodes, run_name: str, tag: str, wanted: Mapping[str, list[Wanted]]
) -> dict[str, list[str] | HostError]:
    """Names of those files that a node lacks or that have another digest there, by host."""

    def request(host: str) -> dict[str, Any]:
        files = [each.to_json() for each in wanted.get(host, [])]
        return nodes.request(run_name=run_name, tag=tag, files=files)

    answers = nodes.ask("verify", request, _VERIFY_SECONDS)
    return {host: each if isinstance(each, HostError) else each["bad"] for host, each in answers.items()}


def prune_on(nodes: Nodes, run_name: str, tags: list[str]) -> dict[str, HostError | None]:
    """Remove these tags from all nodes; the error of each that did not."""
    answers = nodes.ask("prune", lambda _: nodes.request(run_name=run_name, tags=tags), _DEADLINE_SECONDS)
    return {host: each if isinstance(each, HostError) else None for host, each in answers.items()}


def inventory(request: dict[str, Any]) -> dict[str, Any]:
    """Action: the tags of run ``run_name`` on this node."""
    return {"tags": {tag: asdict(copy) for tag, copy in inventory_of(_checkpoints(request)).items()}}


def verify(request: dict[str, Any]) -> dict[str, Any]:
    """Action: which ``files`` of tag ``tag`` are not here, or not as they should be."""
    folder = within(_checkpoints(request), request["tag"])
    wanted = [Wanted(**each) for each in request["files"]]
    return {"bad": [each.name for each in wanted if not is_whole(folder, each)]}


def prune(request: dict[str, Any]) -> dict[str, Any]:
    """Action: remove the ``tags`` from this node."""
    for tag in request["tags"]:
        discard(within(_checkpoints(request), tag))
    return {}


def _checkpoints(request: dict[str, Any]) -> Path:
    return within(within(scratch_folder(request["scratch"]), run_place(request["run_name"])), CHECKPOINTS)


def _is_tag(path: Path) -> bool:
    return path.is_dir() and not path.name.startswith(".")


def _copy_of(folder: Path) -> Copy:
    files = [path for path in folder.iterdir() if path.is_file() and not path.name.startswith(".")]
    texts = {path.name: path.read_text("utf-8", "replace") for path in files if path.match(_SIDECARS)}
    return Copy(texts, {path.name: path.stat().st_size for path in files if path.name not in texts})
