"""Checks whether hosts share the head's storage or each has its own, and whether it has enough free space."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from infra.head.preflight.findings import HostReplies, names, of_each
from infra.head.preflight.launch_requirements import LaunchRequirements
from infra.node.inspection.facts import Resources
from infra.node.node_folders import node_path
from infra.node.storage.disk_usage import SPARE_BYTES, SPARE_INODES
from t5train.quantities import format_bytes

_NODE_FOLDER_BYTES = 10**9
_ROOT_BYTES = 10**9  # the head itself checks how much a run will write there
_SCRATCH_BYTES = 10**9


@dataclass(frozen=True)
class Storage:
    """Which hosts can read the probe file that the head has just written under the root."""

    sharing: list[str]
    """Hosts that can read it."""
    not_sharing: list[str]
    """Hosts that cannot."""
    is_node_local: bool
    """Whether no host can read it except the head itself, which may be one of the hosts.

    With ``storage.node_local`` there is no such file, so this is always true.
    """

    @classmethod
    def of(cls, replies: HostReplies, nonce: str, head: str) -> "Storage":
        """Evaluate the replies. ``head`` is the identity of the head's machine."""
        sharing = [host for host, reply in replies.items() if reply.facts.resources.nonce == nonce]
        not_sharing = [host for host in replies if host not in sharing]
        others = [host for host in sharing if replies[host].facts.identity != head]
        return cls(sharing, not_sharing, bool(not_sharing) and not others)


def problems(replies: HostReplies, requirements: LaunchRequirements, storage: Storage) -> Iterator[str]:
    """Storage that only some hosts share, or that cannot be written."""
    if storage.is_node_local:
        yield from _scratch(replies, storage)
    elif storage.not_sharing:
        yield (
            f"{names(storage.not_sharing)}: {requirements.root} is not shared with the head, but on "
            f"{names(storage.sharing)} it is. Mount the shared storage at the same path on every host, or "
            "choose a --root that no host shares"
        )
    else:
        yield from of_each(replies, lambda _, facts: facts.resources.root.error or None)


def dask(requirements: LaunchRequirements, storage: Storage) -> Iterator[str]:
    """Hosts that are to tokenise, but do not share the root.

    With ``storage.node_local`` it is not known here whether they do: their workers find out when they start.
    """
    if requirements.tokenises and storage.is_node_local and not requirements.node_local:
        yield (
            f"{names(storage.not_sharing)}: {_called(storage)} no storage with the head, but shards.executor is dask. "
            f"Mount {requirements.root} on every host, or set shards.executor=local"
        )


def remark(storage: Storage, requirements: LaunchRequirements) -> Iterator[str]:
    """A note that the run needs staging and gathering."""
    if storage.is_node_local:
        unshared = f"{names(storage.not_sharing)}: {_called(storage)} no storage with the head"
        why = "storage.node_local is true" if requirements.node_local else unshared
        yield f"{why}. Files are staged to hosts, and checkpoints are gathered to the head"


def disks(replies: HostReplies, requirements: LaunchRequirements, storage: Storage) -> Iterator[str]:
    """Free space where the run will write, and for logs in the node folder."""
    yield from of_each(
        replies,
        lambda host, facts: (
            _byte_shortage(host, facts.resources, requirements, storage) or _inode_shortage(facts.resources, storage)
        ),
    )


def _byte_shortage(host: str, resources: Resources, requirements: LaunchRequirements, storage: Storage) -> str | None:
    folder, root = resources.node_folder, resources.root
    if folder.error:
        return folder.error
    if folder.path != (here := str(node_path())):
        return (
            f"the user has a different user id there: the node folder is {folder.path}, but {here} on the head. Give "
            "the user the same id on both machines, or set cluster.ssh_user"
        )
    if folder.free_bytes < _NODE_FOLDER_BYTES:
        return (
            f"{folder.path} has {format_bytes(folder.free_bytes)} free, but logs need "
            f"{format_bytes(_NODE_FOLDER_BYTES)}. Free some space there"
        )
    if storage.is_node_local:
        return _scratch_shortage(resources, requirements.checkpoint_bytes.get(host, 0) + requirements.staged_bytes)
    if not root.error and root.free_bytes < _ROOT_BYTES:
        return (
            f"{root.path} has {format_bytes(root.free_bytes)} free, but a run needs at least "
            f"{format_bytes(_ROOT_BYTES)}. Free some space, or choose another root"
        )
    return None


def _inode_shortage(resources: Resources, storage: Storage) -> str | None:
    """The complaint if a disk cannot hold enough files, although it may have enough free bytes."""
    for folder in (resources.node_folder, resources.scratch if storage.is_node_local else resources.root):
        if folder.free_inodes is not None and folder.free_inodes < SPARE_INODES:
            return (
                f"the disk of {folder.path} has {folder.free_inodes:,} free inodes, but a run needs {SPARE_INODES:,} "
                "there, one for each file and folder. Remove files from that disk (`df -i` shows its inodes)"
            )
    return None


def _scratch_shortage(resources: Resources, run_bytes: int) -> str | None:
    """The complaint if scratch has too little space. What the run has there already, or can free, counts as free."""
    needed, yielding = max(run_bytes + SPARE_BYTES, _SCRATCH_BYTES), resources.scratch_yielding_bytes
    scratch = resources.scratch
    if not scratch.path or scratch.error or scratch.free_bytes + yielding >= needed:
        return None
    more = f" and {format_bytes(yielding)} that can be freed" if yielding else ""
    return (
        f"{scratch.path} has {format_bytes(scratch.free_bytes)} free{more}, but the checkpoints "
        f"and token shards that go there need {format_bytes(needed)}. Free some space, keep fewer "
        "checkpoints (storage.keep_last, storage.keep_every_steps, storage.checkpoint_gigabytes), or choose another "
        "storage.scratch"
    )


def _scratch(replies: HostReplies, storage: Storage) -> Iterator[str]:
    """Hosts without their own scratch folder: in a shared one, files of one host would be taken for another's."""
    yield from of_each(replies, lambda _, facts: facts.resources.scratch.error or None)
    marks = {host: replies[host].facts.resources.scratch_mark for host in storage.not_sharing}
    for mark, count in Counter(marks.values()).items():
        if mark and count > 1:
            sharing = [host for host, its in marks.items() if its == mark]
            yield (
                f"{names(sharing)}: {replies[sharing[0]].facts.resources.scratch.path} is the same folder on these "
                "hosts. Choose a storage.scratch on each host's own disk. If a disk is a clone of another host's, "
                "remove the folder from the clone"
            )


def _called(storage: Storage) -> str:
    return "share" if len(storage.not_sharing) > 1 else "shares"
