"""What a head does with checkpoints on hosts without shared storage: recover, gather and gc."""

import io
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import typer

from infra.head.hosts.hostfile import Host, Hosts
from infra.head.hosts.nodes import Nodes
from infra.head.storage.checkpoint_sync import keep_up
from infra.head.storage.gather import gather
from infra.head.storage.node_paths import NodeRun
from infra.head.storage.recovery import recover
from infra.node.attempts.run_ownership import OWNER, Owner
from infra.node.node_folders import run_path, tag_path
from t5train.checkpoint import sidecar, tags
from t5train.files import run_folder
from t5train.files.atomic import write_json
from t5train.files.run_folder import CHECKPOINTS, METRICS, RUNS, tag_of
from t5train.progress import silent
from t5train.records.digests import digest_files
from t5train.records.stage_records import Checkpoint
from t5train.spec import StorageSpec
from tests.acceptance.io_faults.evidence import complete_tags, missing, tree
from tests.acceptance.io_faults.small_run import SmallRun
from tests.acceptance.io_faults.trial import Ending, ReportedFailure
from tests.support.simulated_nodes import NODE, RUN, LocalHosts, Site, digest, make_sidecar

_OLD, _NEWEST, _UNFINISHED = 4, 8, 12
_BYTES = 2000
_OTHER = "other-0123456789ab"
_DAMAGED = "damaged-f00df00df00d"
_OURS = Owner("1" * 32, "this-head", "/this/root", "2026-01-01T00:00:00", lease_seconds=60.0)
_THEIRS = Owner("2" * 32, "that-head", "/that/root", "2026-01-01T00:00:00", lease_seconds=60.0)


class _Hosts(LocalHosts):
    def command(self, host: str, argv: Sequence[str]) -> list[str]:
        """The command of an action of infra.node. It does not make the folder, as that would be a call of the trial."""
        return [self.python, "-c", NODE, str(self.folder / host), argv[-1]]


class _OnHosts:
    """An operation on hosts whose ranks have saved checkpoints. The head has gathered an older one."""

    hosts = "ab"

    def __init__(self, small_run: SmallRun) -> None:
        self._small_run = small_run

    def _site(self, folder: Path) -> Site:
        """The simulated head and hosts in a folder."""
        site = Site.__new__(Site)
        site.folder, site.transport = (
            folder,
            _Hosts(folder / "hosts", str(Path(sys.executable).parents[1] / "nodes/python")),
        )
        site.nodes = Nodes(site.transport, tuple(self.hosts), owner=_OURS.unique_id)
        site.root = folder / "root"
        site.checkpoints = site.root / RUNS / "smoke" / CHECKPOINTS
        return site

    def prepare(self, folder: Path) -> None:
        """Save complete checkpoints of steps 4 and 8, and one of step 12 that lacks the sidecar of a rank."""
        site = self._site(folder)
        self._make_hosts(site)
        site.save(_OLD, _BYTES)
        gather(site.nodes, RUN, site.newest(), site.checkpoints)
        for step in (_NEWEST, _UNFINISHED):
            site.save(step, _BYTES)
        (site.tag("b", _UNFINISHED) / sidecar.sidecar_name(1)).unlink()
        (site.scratch("a") / RUNS / RUN / METRICS).write_text('{"step": 1, "time": 1.0, "loss": 2.5}\n')

    def _make_hosts(self, site: Site) -> None:
        """Make the hosts' folders, with a claim of this head that has expired."""
        site.checkpoints.mkdir(parents=True)
        for host in self.hosts:
            site.scratch(host).mkdir(parents=True, mode=0o700)
            site.scratch(host).parent.chmod(0o700)
            _claim(site.scratch(host) / run_path(RUN), _OURS)

    def _run(self, folder: Path) -> NodeRun:
        site = self._site(folder)
        hosts, keep = Hosts(tuple(Host(name, (0,)) for name in self.hosts)), StorageSpec(root=site.root, keep_last=1)
        return NodeRun(RUN, site.checkpoints.parent, hosts=hosts, nodes=site.nodes, keep=keep, owner=_OURS)

    def _lost(self, folder: Path, template: Path, paths: list[Path]) -> list[str]:
        before = {str(path.relative_to(folder)): tree(template / path.relative_to(folder)) for path in paths}
        return [f"lost: {name}" for name in missing(before, folder)]


class _OnOneRun(_OnHosts):
    """An operation that brings the newest checkpoint to the head."""

    def problems(self, folder: Path, ending: Ending, failed: list[str]) -> list[str]:  # noqa: ARG002 - part of Operation
        """The newest checkpoint stays on the hosts.

        On success, it is on the head, and only then may the older one be gone.
        """
        site, template = self._site(folder), self._template(folder)
        found = self._lost(folder, template, [site.tag(host, _NEWEST) for host in self.hosts])
        complete = complete_tags(site.checkpoints)
        if tag_of(_NEWEST) not in complete:
            found += self._lost(folder, template, [site.checkpoints / tag_of(_OLD)])
            found += [f"wrong: {tag_of(_NEWEST)} is not on the head"] * ending.succeeded
        taken_for_complete = tags.complete_tags(site.checkpoints)
        return found + [
            f"wrong: {tag} is treated as complete but is not" for tag in taken_for_complete if tag not in complete
        ]

    def _template(self, folder: Path) -> Path:
        return folder.parent.parent / self.name

    name: str


class Recover(_OnOneRun):
    """Before a launch, the head selects the newest checkpoint that is complete on any machine, and gathers it."""

    name = "recover"

    def set_up(self, folder: Path) -> Callable[[], Any]:
        return partial(recover, self._run(folder), silent)


class Gather(_OnOneRun):
    """While ranks train, the head gathers the newest checkpoint and prunes old ones."""

    name = "gather"

    def set_up(self, folder: Path) -> Callable[[], Any]:
        return partial(keep_up, self._run(folder), silent)


class Gc(_OnHosts):
    """``gc --free`` on the head and a host, with an ended run, an unfinished one, and one of another head."""

    name = "gc"
    hosts = "a"

    def prepare(self, folder: Path) -> None:
        """The host's copy of the ended run is not needed.

        There is a second ended run, whose copy on the head is damaged.
        """
        site = self._site(folder)
        self._make_hosts(site)
        site.save(_NEWEST, _BYTES)
        gather(site.nodes, RUN, site.newest(), site.checkpoints)
        _finish(site.checkpoints.parent)
        for host in self.hosts:
            shutil.copytree(site.scratch(host) / run_path(RUN), site.scratch(host) / run_path(_DAMAGED))
        damaged = site.root / RUNS / "damaged"
        shutil.copytree(site.checkpoints.parent, damaged)
        next(damaged.glob(f"{CHECKPOINTS}/*/*.pt")).write_bytes(bytes(_BYTES))
        unfinished = site.root / RUNS / "going" / CHECKPOINTS
        for step in (2, _OLD):
            _save_alone(unfinished / tag_of(step), step)
        (unfinished / tag_of(2) / sidecar.sidecar_name(0)).unlink()
        (unfinished / f".{tag_of(1)}.discarded").mkdir()
        for host in self.hosts:
            _claim(site.scratch(host) / run_path(_OTHER), _THEIRS)
            _save_alone(site.scratch(host) / tag_path(_OTHER, tag_of(_OLD)), _OLD)
            (site.scratch(host) / "shards" / "deadbeef").mkdir(parents=True)
            (site.scratch(host) / "shards" / "deadbeef" / "train.bin").write_bytes(bytes(100))
        (site.scratch("a") / tag_path(_OTHER, f".{tag_of(2)}.discarded")).mkdir()

    def set_up(self, folder: Path) -> Callable[[], Any]:
        """The command as a user types it, except that hosts are not reached by ssh."""
        from flows.cli.operate import removal_commands
        from infra.head.hosts import code_shipping

        site, hostfile = self._site(folder), folder.parent / "hosts"
        hostfile.write_text("".join(f"{host} slots=1\n" for host in self.hosts))

        def collect() -> None:
            ssh = mock.Mock(configured=lambda *_: site.transport)
            output = io.StringIO()
            with redirect_stderr(output), redirect_stdout(io.StringIO()), mock.patch.object(code_shipping, "Ssh", ssh):
                try:
                    removal_commands.gc(root=site.root, hostfile=hostfile, free=True)
                except typer.Exit as ended:
                    raise ReportedFailure(output.getvalue()) from ended

        return collect

    def problems(self, folder: Path, ending: Ending, failed: list[str]) -> list[str]:  # noqa: ARG002 - part of Operation
        """What is still needed must stay.

        That is, on the head, the newest checkpoints of the ended and the unfinished run; on the host, those of the run
        that is damaged on the head, and of the other head's run. If the head's copy of the ended run cannot be
        verified, the host's copy stays too.
        """
        site, template = self._site(folder), folder.parent.parent / self.name
        unfinished = site.root / RUNS / "going" / CHECKPOINTS
        needed = [site.checkpoints / tag_of(_NEWEST), unfinished / tag_of(_OLD)]
        needed += [site.scratch(host) / tag_path(_OTHER, tag_of(_OLD)) for host in self.hosts]
        needed += [site.scratch(host) / tag_path(_DAMAGED, tag_of(_NEWEST)) for host in self.hosts]
        if self._cannot_be_verified(site, failed):
            needed += [site.tag(host, _NEWEST) for host in self.hosts]
        found = self._lost(folder, template, needed)
        if not failed and any(site.tag(host, _NEWEST).exists() for host in self.hosts):
            found.append("wrong: the hosts' copy of a finished run was not freed")
        return found

    @staticmethod
    def _cannot_be_verified(site: Site, failed: list[str]) -> bool:
        """Whether a call on the head's copy of the ended run failed. Then the hosts' copy must stay."""
        files = (site.checkpoints / tag_of(_NEWEST)).resolve()
        return any(Path(path).parent == files and path.endswith(".pt") for path in failed)


def _finish(run: Path) -> None:
    tag = tag_of(_NEWEST)
    names = [f"{CHECKPOINTS}/{tag}/{path.name}" for path in (run / CHECKPOINTS / tag).iterdir()]
    Checkpoint(path=run, fingerprint="f00df00df00dcafe", step=_NEWEST, tag=tag, files=digest_files(run, names)).commit()
    write_json(run / run_folder.RUN, {"unique_id": _OURS.unique_id})


def _claim(run: Path, owner: Owner) -> None:
    run.mkdir(parents=True)
    write_json(run / OWNER, asdict(owner))


def _save_alone(folder: Path, step: int) -> None:
    folder.mkdir(parents=True)
    content = f"step {step}".encode()
    (folder / "mp_rank_00_model_states.pt").write_bytes(content)
    sidecar.write(folder, make_sidecar(0, step, {"mp_rank_00_model_states.pt": digest(content)}, 1, saving="0123abcd"))
