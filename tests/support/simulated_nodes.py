"""Nodes simulated by folders of this machine, and checkpoints whose files are spread over them."""

import hashlib
import json
import os
import random
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from infra.head.hosts.nodes import Nodes, conversation
from infra.head.hosts.ssh import Transport
from infra.head.storage.checkpoint_inventory import FoundTag, Survey, complete_tags, survey
from infra.node.attempts.attempt import Attempt
from infra.node.attempts.attempt_actions import PrepareAttempt, Prepared
from infra.node.attempts.run_ownership import Owner
from infra.node.channel import BrokenOff
from infra.node.messages import Request
from infra.node.node_folders import run_path, tag_path
from infra.node.ports import Endpoint
from infra.node.storage.file_channel import FromReceiver
from t5train.checkpoint import sidecar
from t5train.checkpoint.sidecar import DataState, ParallelLayout, Sidecar
from t5train.files.run_folder import tag_of
from t5train.records.digests import FileDigest

RUN = "smoke-f00df00df00d"
PART_OF_B = "zero_pp_rank_1_mp_rank_00_optim_states.pt"


def digest(content: bytes) -> FileDigest:
    return FileDigest(size=len(content), sha256=hashlib.sha256(content).hexdigest())


def make_sidecar(rank: int, step: int, files: dict[str, FileDigest], world_size: int = 2, **facts: Any) -> Sidecar:
    layout = ParallelLayout(zero_stage=1, precision="fp32", data_parallel_rank=rank, data_parallel_size=world_size)
    facts = {"run_fingerprint": "f00d", "huggingface_config": {}, "groups": [[]]} | facts
    data = DataState(samples_consumed=step * 8, shards_fingerprint="5eed")
    return Sidecar(
        step=step, tag=tag_of(step), rank=rank, world_size=world_size, layout=layout, files=files, data=data, **facts
    )


NODE = """
import sys
from pathlib import Path
from infra.node import node_folders
node_folders.PARENT = Path(sys.argv.pop(1))
from infra.node.__main__ import main
sys.exit(main())
"""


class LocalHosts:
    """A transport to hosts that are folders of this machine: commands run here, with the host's own node folder."""

    def __init__(self, folder: Path, python: str = sys.executable) -> None:
        self.folder, self.python = folder, python

    def command(self, host: str, argv: Sequence[str]) -> list[str]:
        """The command of an action of infra.node that uses the host's folder; the code receiver runs unchanged."""
        if "\n" in argv[-1]:
            return list(argv)
        (self.folder / host).mkdir(exist_ok=True)
        return [self.python, "-c", NODE, str(self.folder / host), argv[-1]]

    def attempt_folder(self, host: str, run_id: str) -> Path:
        return self.folder / host / f"t5-pretrain-{os.getuid()}" / "attempts" / run_id

    def prepare(self, this: Attempt) -> None:
        """Prepare the attempt's folder on each of its hosts."""
        for host in this.hosts or {}:
            own = replace(this, host=host, hosts=None)
            request = PrepareAttempt(own, {}, Endpoint("127.0.0.1", 20001), None, {})
            assert isinstance(Nodes(self, (host,)).ask(request, 20)[host], Prepared)


class ThisMachine:
    """A transport to hosts that are all this machine, except for ``lost`` ones, which do not answer."""

    def __init__(self, *lost: str) -> None:
        self.lost, self.sent_commands = lost, list[list[str]]()

    def command(self, host: str, argv: Sequence[str]) -> list[str]:
        self.sent_commands.append(list(argv))
        return ["sh", "-c", "exit 255"] if host in self.lost else list(argv)


class Unsteady:
    """A transport that cannot reach hosts whose letter is in ``unreachable``, and records what it is asked for."""

    def __init__(self, transport: Transport, unreachable: str = "") -> None:
        self.transport, self.unreachable = transport, unreachable
        self.actions = list[tuple[str, str]]()

    def command(self, host: str, argv: Sequence[str]) -> list[str]:
        self.actions.append((host, argv[-1]))
        return ["sh", "-c", "exit 255"] if host in self.unreachable else list(self.transport.command(host, argv))


def link_to_itself(path: Path) -> None:
    """Replace a file with a link to itself: opening it then fails with ELOOP, and at no moment as if it were absent."""
    link = path.with_name(f"{path.name}.link")
    link.symlink_to(path.name)
    link.replace(path)


def flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def await_end(nodes: Nodes, host: str, request: Request) -> None:
    """Start a conversation, and wait until the node ends it."""
    with conversation(nodes, host, request) as node:
        while node.receive(FromReceiver) is not None:
            pass
        raise BrokenOff("it ended")


class Site:
    """A head and its nodes a, b, ..., whose ranks have saved checkpoints."""

    def __init__(self, folder: Path, transport: Any, hosts: Sequence[str]) -> None:
        self.folder, self.transport = folder, transport
        self.nodes = Nodes(transport, tuple(hosts))
        self.root = folder / "root"
        self.checkpoints = self.root / "runs" / "smoke" / "checkpoints"
        self.checkpoints.mkdir(parents=True)
        for host in hosts:
            self.scratch(host).mkdir(parents=True)
            self.scratch(host).parent.chmod(0o700)

    def scratch(self, host: str) -> Path:
        return self.folder / "hosts" / host / f"t5-pretrain-{os.getuid()}" / "scratch"

    def tag(self, host: str, step: int) -> Path:
        return self.scratch(host) / tag_path(RUN, tag_of(step))

    def save(self, step: int, size: int = 300_000, seed: int = 0, **facts: Any) -> dict[str, bytes]:
        """Save a checkpoint with rank r on node r, and return the contents of its files by name.

        Rank 0 records the model's file. The other nodes have replicas of it, with other bytes.
        """
        generator, contents = random.Random(f"{step} {seed}"), dict[str, bytes]()
        for rank, host in enumerate(self.nodes.hosts):
            folder = self.tag(host, step)
            folder.mkdir(parents=True, exist_ok=True)
            own = {f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt": generator.randbytes(size)}
            model = {"mp_rank_00_model_states.pt": generator.randbytes(size)}
            for name, content in {**own, **model}.items():
                (folder / name).write_bytes(content)
            replicas = {name: digest(content) for name, content in model.items()} if rank else {}
            files = own if rank else own | model
            contents |= files
            recorded = {name: digest(content) for name, content in files.items()}
            sidecar.write(folder, make_sidecar(rank, step, recorded, len(self.nodes.hosts), replicas=replicas, **facts))
        return contents

    def write_owner(self, owner: Owner) -> None:
        """Let all nodes record this owner of the run."""
        for host in self.nodes.hosts:
            folder = self.scratch(host) / run_path(RUN)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "owner.json").write_text(json.dumps(asdict(owner)))

    def survey(self) -> Survey:
        return survey(self.nodes, RUN, self.checkpoints)

    def newest(self) -> FoundTag:
        return complete_tags(self.survey().found)[0]
