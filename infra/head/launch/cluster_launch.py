"""Starts the ranks of a run on several hosts under DeepSpeed's launcher, watches them, and leaves no process behind.

::

    head (this process) ─┬─ ssh: an agent on each host (infra.head.hosts.agents)
                         └─ guard ── deepspeed.launcher.runner ── pdsh ── ssh to each host
    host: sshd ── deepspeed.launcher.launch ── guard ── rank

The head ends everything when a rank or the launcher fails, or a host is lost. Guards end their ranks when the head has
not renewed its lease for ``cluster.lease_seconds``. Only exit records show whether the ranks did their work: pdsh, and
with it DeepSpeed's launcher, exits with 0 when it is killed.
"""

import logging
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from infra.head.hosts.code_shipping import hosts_with_code, path_to, shipped_code
from infra.head.hosts.hostfile import Host, Hosts
from infra.head.hosts.nodes import Nodes
from infra.head.hosts.ssh import Ssh, Transport
from infra.head.launch import earlier_attempts
from infra.head.launch.attempt_outcome import ClusterWatch
from infra.head.launch.deepspeed_launcher import ClusterLauncher, launch_command, write_hostfile
from infra.head.launch.held_run import HeldRun, transport_of
from infra.head.launch.supervision import Supervision
from infra.head.preflight.host_preflight import Fit, require_fit
from infra.head.preflight.launch_requirements import LaunchRequirements
from infra.head.stop_signal import is_stop, stoppable
from infra.head.storage.run_storage import RunStorage
from infra.node.attempts import attempt, head_lease, process_guard
from infra.node.attempts.attempt import Attempt
from infra.node.attempts.attempt_actions import PrepareAttempt, Prepared
from infra.node.attempts.rank_environment import travelling_environment
from infra.node.node_folders import attempt_folder
from infra.node.ports import Endpoint
from t5train.errors import HostError, SpecError
from t5train.files.run_folder import ATTEMPT_SPEC
from t5train.spec import ClusterSpec
from t5train.spec.rank_job import TrainJob

_PREPARE_SECONDS = 30.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ClusterLaunchSpec:
    """What to start on which hosts."""

    run: HeldRun
    cluster: ClusterSpec
    hosts: Hosts
    needs: LaunchRequirements
    storage: Callable[[bool], RunStorage]
    """Called with True if the hosts share no storage; returns the storage of the run. The job that ``make_ready`` of
    the storage writes is sent to every host."""
    program: Callable[[Path], tuple[str, ...]]
    """Called with the path of that job on a host; returns the arguments of the Python interpreter for every rank."""
    is_same_job: Callable[[Path], bool]
    """Called with the folder of an attempt whose ranks are running; returns whether they run this job."""


def launch_on_hosts(spec: ClusterLaunchSpec, on_tick: Callable[[], None] = lambda: None) -> Attempt:
    """Run all ranks to their end. Ranks of the same job that are already running continue.

    For ``on_tick``, see infra.head.launch.local_launch. If SIGTERM or Ctrl-C raises an exception
    (infra.head.stop_signal), the ranks first get time to save. In any case, no process of the attempt is left on any
    host that can be reached; on other hosts, processes end when the lease expires. Raises the error that a rank
    reported, HostLost, or another LaunchError.
    """
    with stoppable():
        transport = spec.run.transport(spec.cluster)
        watch, storage = _continued(spec, transport, on_tick) or _started(spec, transport, on_tick)
        with storage.syncing(watch.num_saved) or nullcontext():
            _see_through(watch)
        if (failure := watch.failure()) is not None:
            raise failure
        storage.take_home()
    return watch.this


def _see_through(watch: ClusterWatch) -> None:
    """Watch the attempt until all its processes have ended."""
    try:
        watch.until_decided()
    except BaseException as error:
        if is_stop(error):
            watch.stop()
        raise
    finally:
        watch.end()


def _continued(
    spec: ClusterLaunchSpec, transport: Transport, on_tick: Callable[[], None]
) -> tuple[ClusterWatch, RunStorage] | None:
    """Take over ranks of the same job that an earlier head left running; returns None if there are none."""
    if (found := spec.run.adopt()) is None:
        return None
    if found.this.hosts != _slots(spec.hosts) or not spec.is_same_job(found.this.folder):
        _log.warning(
            "ending attempt %s: its ranks run on other hosts or with other settings than requested", found.this.number
        )
        found.close()
        return None
    if spec.needs.code is not None:  # ranks keep their code; this head's code stages and gathers files
        hosts_with_code(transport, spec.hosts.names, "ranks continue, but their checkpoints stay on this host for now")
    storage = spec.storage(TrainJob.read(found.this.folder / ATTEMPT_SPEC).node_local)
    try:
        storage.claim(are_ranks_running=True)
    except BaseException:
        found.close()
        earlier_attempts.end(found.this, transport)
        raise
    launcher, way = ClusterLauncher(found.this.run_id), transport_of(found.this)
    return ClusterWatch(found, launcher, way, on_tick), storage


def _started(
    spec: ClusterLaunchSpec, transport: Transport, on_tick: Callable[[], None]
) -> tuple[ClusterWatch, RunStorage]:
    """End earlier attempts, check that the hosts are fit, prepare them, and start the launcher."""
    earlier_attempts.end_earlier(spec.run.folder, transport, on_tick)
    fit = require_fit(spec.needs, transport)
    storage = spec.storage(fit.is_node_local)
    storage.claim(are_ranks_running=False)
    this = attempt.begin(
        spec.run.folder,
        None,
        spec.cluster.lease_seconds,
        hosts=_slots(spec.hosts),
        grace_seconds=spec.cluster.grace_seconds,
        save_seconds=spec.cluster.deadlines.save_seconds,
        accelerator=spec.cluster.accelerator,
        code=shipped_code(spec.cluster),
    )
    launcher, place = ClusterLauncher(this.run_id), attempt_folder(this.run_id)
    launcher.folder.mkdir(mode=0o700)
    head_lease.begin(launcher.folder)
    way = Ssh.configured(spec.cluster, launcher.folder)  # which a restarted head uses, too
    try:
        job = storage.make_ready(this.folder)
        program = (process_guard.MODULE, str(place), sys.executable, *spec.program(place / job.name))
        write_hostfile(spec.hosts, launcher.folder)
        argv = launch_command(
            spec.cluster, spec.hosts, launcher.folder, master=(fit.rendezvous.address, fit.port), program=program
        )
        boot_ids = _prepare(spec, this, way, fit, job, storage.owner)
        head_lease.renew(launcher.folder)  # the steps since ``begin`` may have taken long
        launcher.start(this, argv, spec.cluster.accelerator)
        agents = spec.run.agents.on(Nodes(transport, spec.hosts.names, code=this.code), spec.cluster.lease_seconds)
        supervision = Supervision(this, agents, launcher.folder, boot_ids)
        return ClusterWatch(supervision, launcher, way, on_tick), storage
    except BaseException:
        earlier_attempts.end(this, way)
        raise


def _prepare(
    spec: ClusterLaunchSpec, this: Attempt, transport: Transport, fit: Fit, job: Path, owner: str | None
) -> dict[str, str]:
    """Make every host create its folder for the attempt; returns the hosts' boot ids."""
    environment = travelling_environment(this, accelerator=this.accelerator, names=spec.cluster.environment)
    environment |= path_to(this.code)

    files = {job.name: job.read_text("utf-8")}

    def request(host: Host) -> PrepareAttempt:
        own = replace(this, host=host.name, slots=host.slots, hosts=None)
        # Otherwise collectives use the interface that the hostname resolves to.
        interface = dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), fit.rendezvous.interfaces[host.name])
        return PrepareAttempt(own, interface | environment, Endpoint(fit.rendezvous.address, fit.port), owner, files)

    nodes = Nodes(transport, spec.hosts.names, code=this.code)
    answers = nodes.ask_each({host.name: request(host) for host in spec.hosts.all}, _PREPARE_SECONDS)
    return {host: _boot_id(host, answer, attempt_folder(this.run_id)) for host, answer in answers.items()}


def _boot_id(host: str, answer: Prepared | HostError, expected: Path) -> str:
    if isinstance(answer, HostError):
        raise answer
    if answer.folder != expected:
        raise SpecError(
            f"{host}: the user has a different user id there, so files of attempts are in {answer.folder} there, but "
            f"in {expected} on the head. Give the user the same id on both machines, or set cluster.ssh_user"
        )
    return answer.boot_id


def _slots(hosts: Hosts) -> dict[str, tuple[int, ...]]:
    return {host.name: host.slots for host in hosts.all}
