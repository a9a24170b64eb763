"""Nodes that are folders of this machine, and checkpoints whose files are spread over them."""

import hashlib
import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from infra.head.hosts.node_client import Nodes, conversation
from infra.head.storage.checkpoint_inventory import FoundTag, Survey, complete_tags, survey
from infra.node.channel import BrokenOff
from infra.node.messages import Request
from infra.node.node_folders import tag_place
from infra.node.storage.file_channel import FromReceiver
from t5train.checkpoint import sidecar
from t5train.checkpoint.sidecar import DataState, ParallelLayout, Sidecar
from t5train.files.run_folder import tag_of
from t5train.records.digests import FileDigest

RUN = "smoke-f00df00df00d"


def digest(content: bytes) -> FileDigest:
    return FileDigest(size=len(content), sha256=hashlib.sha256(content).hexdigest())


def make_sidecar(rank: int, step: int, files: dict[str, FileDigest], world_size: int = 2, **facts: Any) -> Sidecar:
    layout = ParallelLayout(zero_stage=1, precision="fp32", data_parallel_rank=rank, data_parallel_size=world_size)
    facts = {"run_fingerprint": "f00d", "huggingface_config": {}, "groups": [[]]} | facts
    data = DataState(samples_consumed=step * 8, shards_fingerprint="5eed")
    return Sidecar(
        step=step, tag=tag_of(step), rank=rank, world_size=world_size, layout=layout, files=files, data=data, **facts
    )


def until_it_ends(nodes: Nodes, host: str, request: Request) -> None:
    """Begin a conversation, and wait until the node ends it."""
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
        return self.scratch(host) / tag_place(RUN, tag_of(step))

    def save(self, step: int, size: int = 300_000, seed: int = 0, **facts: Any) -> dict[str, bytes]:
        """Rank r is on node r; rank 0 answers for the model's file, of which the others' nodes have replicas."""
        chosen, contents = random.Random(f"{step} {seed}"), dict[str, bytes]()
        for rank, host in enumerate(self.nodes.hosts):
            folder = self.tag(host, step)
            folder.mkdir(parents=True, exist_ok=True)
            own = {f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt": chosen.randbytes(size)}
            model = {"mp_rank_00_model_states.pt": chosen.randbytes(size)}
            for name, content in {**own, **model}.items():
                (folder / name).write_bytes(content)
            replicas = {name: digest(content) for name, content in model.items()} if rank else {}
            files = own if rank else own | model
            contents |= files
            recorded = {name: digest(content) for name, content in files.items()}
            sidecar.write(folder, make_sidecar(rank, step, recorded, len(self.nodes.hosts), replicas=replicas, **facts))
        return contents

    def survey(self) -> Survey:
        return survey(self.nodes, RUN, self.checkpoints)

    def newest(self) -> FoundTag:
        return complete_tags(self.survey().found)[0]


@pytest.fixture
def site(tmp_path: Path, local_hosts: Any) -> Site:
    """Two nodes."""
    return Site(tmp_path, local_hosts, "ab")


@pytest.fixture
def make_site(tmp_path: Path, local_hosts: Any) -> Callable[[str], Site]:
    return lambda hosts: Site(tmp_path, local_hosts, hosts)
