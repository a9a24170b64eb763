"""Two hosts tokenise a text through Dask. One is killed half-way, and the files are those of one machine."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from infra.testcluster import Cluster
from infra.testcluster.host_files import HOSTFILE
from t5train.data.corpus import build_corpus
from t5train.data.shards import build_shards
from t5train.data.vocabulary.tokenizer import build_tokenizer
from t5train.spec import CorpusSpec, ShardsSpec, TokenizerSpec
from tests.support.cluster_runs import ClusterRunner
from tests.support.generated_text import write_jsonl
from tests.support.waiting import await_that

pytestmark = pytest.mark.cluster

SHARDS = 16
SECONDS = 400  # only a hang takes as long
CLIENT = """
import socket, sys
from distributed import Client, Security
from infra.head.tokenising.dask_scheduler import new_credentials
from infra.node.stages.dask_settings import security

socket.create_connection(("head", int(sys.argv[1])), timeout=4).close()
print("reached")
for scheme, given in (("tcp", Security()), ("tls", security(new_credentials()))):
    try:
        with Client(f"{scheme}://head:{sys.argv[1]}", security=given, timeout=4) as client:
            print("accepted", client.scheduler_info())
    except OSError:
        print("refused")
"""


class Tokenising:
    """A text and a vocabulary that two hosts share with the head, and the shards that this machine makes of them."""

    def __init__(self, cluster: Cluster, share: Path) -> None:
        self.cluster, self.share = cluster, share
        spec = CorpusSpec(source=str(write_jsonl(share / "text.jsonl", 3000)))
        corpus = build_corpus(spec, share)
        self.tokenizer = build_tokenizer(TokenizerSpec(vocab_size=300), spec, corpus, share)
        self.shard_tokens = corpus.counts["text_bytes"] // 4 // SHARDS
        shards = ShardsSpec(shard_tokens=self.shard_tokens)
        self.expected = build_shards(shards, spec, corpus, self.tokenizer, share, out=share / "expected").files

    def start(self, out: Path) -> subprocess.Popen[bytes]:
        """Tokenise on both hosts, one process on each, started on the head as a user does."""
        options = ["--hostfile", HOSTFILE, "--workers", "1", "--set", "cluster.lease_seconds=5"]
        text = ["--corpus", str(self.share / "text.jsonl"), "--tokenizer", str(self.tokenizer.path)]
        argv = ["t5-pretrain", "tokenize", *text, "--out", str(out), "--shard-tokens", str(self.shard_tokens), *options]
        with open(self.share / f"{out.name}.log", "wb") as output:
            return self.cluster.start("head", argv, output.fileno())

    def log(self, out: Path) -> str:
        """The output of the command."""
        return (self.share / f"{out.name}.log").read_text("utf-8", "replace")

    def await_shards(self, out: Path, number: int, process: subprocess.Popen[bytes]) -> None:
        """Wait until so many shards are complete."""
        deadline = time.monotonic() + SECONDS
        while len(list((out / "shards").glob("shard-*.json"))) < number:
            assert process.poll() is None, self.log(out)
            assert time.monotonic() < deadline, self.log(out)
            time.sleep(0.02)

    def port(self) -> str:
        """The port of the scheduler: the only one at which a Python on the head listens."""
        said = self.cluster.exec("head", ["ss", "--listening", "--tcp", "--numeric", "--processes"]).stdout
        (port,) = {found[1] for line in said.splitlines() if (found := re.search(r":(\d+) .*python", line))}
        return port


@pytest.fixture(scope="module")
def tokenising(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tokenising]:
    share = tmp_path_factory.mktemp("tokenising")
    with Cluster.temporary(f"tokenising-{os.getpid()}", nodes=2, share=share) as cluster:
        yield Tokenising(cluster, share)


def files(out: Path) -> dict[str, Any]:
    """The digests of the files of shards, as their manifest records them."""
    found: dict[str, Any] = json.loads((out / "shards" / "manifest.json").read_text("utf-8"))["files"]
    return found


def test_half_of_the_hosts_is_killed_half_way_and_strangers_are_refused(tokenising: Tokenising) -> None:
    out, cluster = tokenising.share / "killed", tokenising.cluster
    process = tokenising.start(out)
    tokenising.await_shards(out, 1, process)
    await_that(lambda: jobs_on(cluster, "node1"))
    for job in jobs_on(cluster, "node1"):  # it keeps its shard, or all might be made before the host is killed
        os.kill(job, signal.SIGSTOP)
    client = cluster.start("node0", [sys.executable, "-c", CLIENT, tokenising.port()], subprocess.PIPE)
    tokenising.await_shards(out, SHARDS // 2, process)
    cluster.power_cut("node1")
    assert len(list((out / "shards").glob("shard-*.json"))) < SHARDS
    assert client.communicate(timeout=SECONDS)[0].splitlines() == [b"reached", b"refused", b"refused"]
    assert process.wait(SECONDS) == 0, tokenising.log(out)
    assert "node1: " in tokenising.log(out)
    assert "The other hosts make its shards" in tokenising.log(out)
    assert files(out) == {name: digest.model_dump() for name, digest in tokenising.expected.items()}
    assert not ClusterRunner(cluster, tokenising.share).left()
    cluster.boot("node1")


def jobs_on(cluster: Cluster, host: str) -> list[int]:
    """The processes that make shards on a host."""
    return [each.pid for each in cluster.processes(host) if "t5train.data.worker_processes" in each.argv]


def end_head(cluster: Cluster, signal_number: int) -> None:
    """Send a signal to the command on the head, and to nothing that it has started."""
    (program,) = (each for each in cluster.processes("head") if any("t5-pretrain" in word for word in each.argv))
    os.kill(program.pid, signal_number)


def test_nothing_is_left_on_any_host_when_the_head_ends_and_a_rerun_makes_the_rest(tokenising: Tokenising) -> None:
    out = tokenising.share / "ended"
    for number, signal_number in enumerate([signal.SIGINT, signal.SIGKILL], start=1):
        process = tokenising.start(out)
        tokenising.await_shards(out, 4 * number, process)
        end_head(tokenising.cluster, signal_number)
        process.wait(SECONDS)
        assert not ClusterRunner(tokenising.cluster, tokenising.share).left()
    before = {path.name: path.stat().st_mtime_ns for path in (out / "shards").glob("shard-*.json")}
    assert len(before) < SHARDS
    assert tokenising.start(out).wait(SECONDS) == 0, tokenising.log(out)
    assert files(out) == {name: digest.model_dump() for name, digest in tokenising.expected.items()}
    assert {name: (out / "shards" / name).stat().st_mtime_ns for name in before} == before
