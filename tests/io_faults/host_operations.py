"""What a head does with checkpoints on hosts that share no storage: recover, gather and gc."""

import io
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

import typer

from infra.cluster.hosts import Host, Hosts
from infra.node_local.node_run import NodeRun
from infra.node_store.gather import gather
from infra.node_store.nodes import Nodes
from infra.node_store.paths import tag_place
from t5train import sidecar
from t5train.errors import T5TrainError
from t5train.progress import silent
from t5train.records import Checkpoint, digest_files
from t5train.run_files import CHECKPOINTS, METRICS, RUNS
from t5train.spec import StorageSpec
from t5train.train.job import tag_of
from tests.infra.node_store.conftest import RUN, Site, digest, make_sidecar
from tests.io_faults.evidence import complete_tags, missing, tree
from tests.io_faults.small_run import SmallRun
from tests.io_faults.stand_in import LocalHosts
from tests.io_faults.trial import Ending

_HOSTS = "ab"
_OLD, _NEWEST, _UNFINISHED = 4, 8, 12
_BYTES = 2000
_OTHER = "other-0123456789ab"


class Complained(T5TrainError):
    """A command ended with an exit code, after it had said why on standard error."""


class _OnHosts:
    """An operation on two hosts, whose ranks have saved checkpoints, of which the head has an older one."""

    def __init__(self, made: SmallRun) -> None:
        self._made = made

    def _site(self, folder: Path) -> Site:
        """Makes its folders where they are not."""
        site = Site.__new__(Site)
        site.folder, site.transport = folder, LocalHosts(folder / "hosts")
        site.nodes, site.root = Nodes(site.transport, tuple(_HOSTS)), folder / "root"
        site.checkpoints = site.root / RUNS / "smoke" / CHECKPOINTS
        return site

    def prepare(self, folder: Path) -> None:
        """Steps 4 and 8 are complete, of 12 a rank's part is missing."""
        site = self._site(folder)
        self._make_hosts(site)
        site.save(_OLD, _BYTES)
        gather(site.nodes, RUN, site.newest(), site.checkpoints)
        for step in (_NEWEST, _UNFINISHED):
            site.save(step, _BYTES)
        (site.tag("b", _UNFINISHED) / sidecar.sidecar_name(1)).unlink()
        (site.scratch("a") / RUNS / RUN / METRICS).write_text('{"step": 1, "time": 1.0, "loss": 2.5}\n')

    @staticmethod
    def _make_hosts(site: Site) -> None:
        site.checkpoints.mkdir(parents=True)
        for host in _HOSTS:
            site.scratch(host).mkdir(parents=True, mode=0o700)
            site.scratch(host).parent.chmod(0o700)

    def _run(self, folder: Path) -> NodeRun:
        site = self._site(folder)
        hosts = Hosts(tuple(Host(name, (0,)) for name in _HOSTS))
        return NodeRun(
            name=RUN,
            folder=site.checkpoints.parent,
            hosts=hosts,
            nodes=site.nodes,
            keep=StorageSpec(root=site.root, keep_last=1),
        )

    def _lost(self, folder: Path, template: Path, places: list[Path]) -> list[str]:
        before = {str(place.relative_to(folder)): tree(template / place.relative_to(folder)) for place in places}
        return [f"lost: {name}" for name in missing(before, folder)]


class _OnOneRun(_OnHosts):
    """An operation that brings the newest checkpoint to the head."""

    def wrongs(self, folder: Path, ending: Ending, failed: list[str]) -> list[str]:  # noqa: ARG002 - as all have it
        """The newest stays on the hosts, and is on the head in the end; the head's old one gives way to it alone."""
        site, template = self._site(folder), self._template(folder)
        found = self._lost(folder, template, [site.tag(host, _NEWEST) for host in _HOSTS])
        whole = complete_tags(site.checkpoints)
        if tag_of(_NEWEST) not in whole:
            found += self._lost(folder, template, [site.checkpoints / tag_of(_OLD)])
            found += [f"wrong: {tag_of(_NEWEST)} is not on the head"] * ending.succeeded
        taken = sidecar.complete_tags(site.checkpoints)
        return found + [f"wrong: {tag} is taken for complete, and is not" for tag in taken if tag not in whole]

    def _template(self, folder: Path) -> Path:
        return folder.parent.parent / self.name

    name: str


class Recover(_OnOneRun):
    """Before a launch the head selects the newest checkpoint that is complete anywhere, and brings it home."""

    name = "recover"

    def enter(self, folder: Path) -> Callable[[], Any]:
        """The run."""
        from infra.node_local.recovery import recover

        run = self._run(folder)
        return lambda: recover(run, silent)


class Gather(_OnOneRun):
    """While ranks train, the head gathers the newest checkpoint and has old ones removed."""

    name = "gather"

    def enter(self, folder: Path) -> Callable[[], Any]:
        """The run."""
        from infra.node_local.following import keep_up

        run = self._run(folder)
        return lambda: keep_up(run, silent)


class Gc(_OnHosts):
    """``gc --free`` on the head and the hosts: one run has ended, another goes on, a third is another head's."""

    name = "gc"

    def prepare(self, folder: Path) -> None:
        """Of the first the hosts have a copy that is not needed."""
        site = self._site(folder)
        self._make_hosts(site)
        site.save(_NEWEST, _BYTES)
        gather(site.nodes, RUN, site.newest(), site.checkpoints)
        run, tag = site.checkpoints.parent, tag_of(_NEWEST)
        names = [f"{CHECKPOINTS}/{tag}/{path.name}" for path in (site.checkpoints / tag).iterdir()]
        Checkpoint(
            path=run, fingerprint="f00df00df00dcafe", step=_NEWEST, tag=tag, files=digest_files(run, names)
        ).commit()
        going = site.root / RUNS / "going" / CHECKPOINTS
        for step in (2, _OLD):
            _save_alone(going / tag_of(step), step)
        (going / tag_of(2) / sidecar.sidecar_name(0)).unlink()
        (going / f".{tag_of(1)}.discarded").mkdir()
        for host in _HOSTS:
            _save_alone(site.scratch(host) / tag_place(_OTHER, tag_of(_OLD)), _OLD)
            (site.scratch(host) / "shards" / "deadbeef").mkdir(parents=True)
            (site.scratch(host) / "shards" / "deadbeef" / "train.bin").write_bytes(bytes(100))
        (site.scratch("a") / tag_place(_OTHER, f".{tag_of(2)}.discarded")).mkdir()

    def enter(self, folder: Path) -> Callable[[], Any]:
        """The command, as a user gives it; hosts are not reached by ssh."""
        from flows import gc_command

        site, hostfile = self._site(folder), folder.parent / "hosts"
        hostfile.write_text("".join(f"{host} slots=1\n" for host in _HOSTS))

        def collect() -> None:
            ssh = mock.Mock(configured=lambda *_: site.transport)
            said = io.StringIO()
            with redirect_stderr(said), redirect_stdout(io.StringIO()), mock.patch.object(gc_command, "Ssh", ssh):
                try:
                    gc_command.gc(root=site.root, hostfile=hostfile, free=True)
                except typer.Exit as ended:
                    raise Complained(said.getvalue()) from ended

        return collect

    def wrongs(self, folder: Path, ending: Ending, failed: list[str]) -> list[str]:  # noqa: ARG002 - as all have it
        """What is needed stays: of the first run the head's copy, of the others all that is complete."""
        site, template = self._site(folder), folder.parent.parent / self.name
        going = site.root / RUNS / "going" / CHECKPOINTS
        needed = [site.checkpoints / tag_of(_NEWEST), going / tag_of(_OLD)]
        needed += [site.scratch(host) / tag_place(_OTHER, tag_of(_OLD)) for host in _HOSTS]
        return self._lost(folder, template, needed)


def _save_alone(folder: Path, step: int) -> None:
    """A checkpoint of one rank."""
    folder.mkdir(parents=True)
    content = f"step {step}".encode()
    (folder / "mp_rank_00_model_states.pt").write_bytes(content)
    sidecar.write(folder, make_sidecar(0, step, {"mp_rank_00_model_states.pt": digest(content)}, 1, saving="0123abcd"))
