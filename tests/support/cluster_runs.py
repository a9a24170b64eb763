"""Runs of a very small model on a test cluster, started on its head as a user starts them."""

import json
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infra.testcluster import Cluster
from infra.testcluster.host import Process
from t5train.data.corpus import build_corpus
from t5train.data.shards import build_shards
from t5train.data.vocabulary.tokenizer import build_tokenizer
from t5train.files.run_folder import METRICS, WITNESS_FOLDER
from t5train.records import metrics
from t5train.spec.recipes import recipe

SETTINGS: dict[str, Any] = {
    "tokenizer.vocab_size": 500,
    "model.d_model": 32,
    "model.d_ff": 64,
    "objective.input_tokens": 32,
    "layout.micro_batch_sequences": 16,
    "optimizer.num_steps": 30,
    "optimizer.warmup_steps": 10,
    "storage.checkpoint_every_steps": 15,
    "storage.validate_every_steps": 30,
    "storage.validate_sequences": 32,
}
# The number of threads fixes the order of summation within a rank. The default is the number of the host's cores.
ENVIRONMENT = {"OMP_NUM_THREADS": "1"}
SSHD = ("sshd:", "sshd-session:")
"""How the titles of sshd's processes begin; the second is that of a connection since OpenSSH 9.8."""
LEFT_SECONDS = 10.0
_POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Ended:
    """How a command on the head ended."""

    exit_code: int
    """As a shell reports it: 128 plus the signal's number if a signal ended the command."""
    at: float
    """When the command ended, by time.monotonic."""
    output: str

    @property
    def message(self) -> str:
        """The error message without the quoted end of a rank's output, or the last line if there is no error."""
        _, found, last = f"\n{self.output}".rpartition("\nerror: ")
        if found:
            return " ".join(f"error: {last}".partition(", and ends:")[0].split())
        return last.strip().rpartition("\n")[2]


@dataclass(frozen=True)
class Started:
    """A command that runs on the head."""

    process: subprocess.Popen[bytes]
    log: Path
    run_folder: Path

    def wait(self, seconds: float) -> Ended:
        """Wait for the command to end. Raises subprocess.TimeoutExpired after ``seconds``."""
        returncode = self.process.wait(seconds)
        return Ended(
            returncode if returncode >= 0 else 128 - returncode,
            time.monotonic(),
            self.log.read_text("utf-8", "replace"),
        )

    def await_step(self, step: int, seconds: float = 120) -> None:
        """Wait until the run takes a step. Raises AssertionError with its output if it ends first or takes too long."""
        deadline = time.monotonic() + seconds
        while self.step < step:
            alive = self.process.poll() is None and time.monotonic() < deadline
            assert alive, f"no step {step}: {self.log.read_text('utf-8', 'replace')[-4000:]}"
            time.sleep(_POLL_SECONDS)

    @property
    def step(self) -> int:
        """The last step in the run's metrics; 0 if there is none."""
        return last_step(self.run_folder)


@dataclass(frozen=True)
class ClusterRunner:
    """A cluster, the root that its hosts share, and settings of every run."""

    cluster: Cluster
    root: Path
    settings: Mapping[str, Any] = field(default_factory=dict)

    def start(
        self,
        command: str,
        name: str,
        options: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        root: Path | None = None,
        host: str = "head",
    ) -> Started:
        """Start ``t5-pretrain COMMAND smoke`` on a host; without ``--hostfile`` among the options, that host trains."""
        root = root or self.root
        changes = [
            part for item in ({**SETTINGS, **self.settings}).items() for part in ("--set", "{}={}".format(*item))
        ]
        argv = ["t5-pretrain", command, "smoke", "--root", str(root), "--name", name, *changes, *options]
        log = self.root / f"{name}.log"
        with open(log, "wb") as output:
            process = self.cluster.start(host, argv, output.fileno(), ENVIRONMENT | dict(environment or {}))
        return Started(process, log, root / "runs" / name)

    def processes(self) -> list[tuple[str, Process]]:
        """Processes on all hosts, except sshd, which keeps its end of a connection that was cut."""
        processes = ((host, process) for host in self.cluster.hosts for process in self.cluster.processes(host))
        return [found for found in processes if not found[1].argv[0].startswith(SSHD)]

    def left(self, others: Sequence[tuple[str, Process]] = (), seconds: float = LEFT_SECONDS) -> list[str]:
        """Processes, except ``others``, that are still running on any host after some seconds; returns early if none.

        A program on a host can outlive the ssh client that started it for a moment.
        """
        deadline = time.monotonic() + seconds
        while (left := [one for one in self.processes() if one not in others]) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        return [f"{host}: {' '.join(process.argv)}" for host, process in left]


def prepare(root: Path) -> None:
    """Make the text, the tokenizer and the token shards that every run uses, in a folder that need not exist."""
    root.mkdir(exist_ok=True)
    spec = recipe("smoke").with_settings({**SETTINGS, "storage.root": str(root)})
    text = build_corpus(spec.corpus, root)
    vocabulary = build_tokenizer(spec.tokenizer, spec.corpus, text, root)
    build_shards(spec.shards, spec.corpus, text, vocabulary, root)


def last_step(run_folder: Path) -> int:
    """The last step in the run's metrics; 0 if there is none."""
    lines = metrics.read(run_folder / METRICS)
    return int(lines[-1]["step"] or 0) if lines else 0


def weights(run_folder: Path) -> Any:
    """Digests of the final weights of a run, by name."""
    return json.loads((run_folder / WITNESS_FOLDER / "witness.json").read_text("utf-8"))["tensors"]
