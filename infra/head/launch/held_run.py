"""A run that this process holds, and its state until the run is released.

A flow's steps before training can take longer than ranks run without a head. Therefore, the leases of ranks that are
found running are renewed as soon as the run is held.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from infra.head.hosts.agents import Agents
from infra.head.hosts.hostfile import Hosts
from infra.head.hosts.nodes import Nodes
from infra.head.hosts.ssh import SSH_CONFIG, Ssh
from infra.head.launch.deepspeed_launcher import ClusterLauncher
from infra.head.launch.earlier_attempts import end, end_earlier, unended
from infra.head.launch.start_record import recording_start
from infra.head.launch.supervision import Supervision
from infra.head.stop_signal import stoppable
from infra.head.storage.checkpoint_copies import CheckpointCopies
from infra.head.storage.claim import Claim
from infra.node.attempts import head_lease
from infra.node.attempts.attempt import Attempt
from infra.node.attempts.run_lease import RunLease
from infra.node.attempts.run_lock import run_lock
from infra.node.code_bundle import own_bundle
from t5train.spec import ClusterSpec

_log = logging.getLogger(__name__)


class HeldRun:
    """A held run. Functions that require the run to be held take this object as an argument.

    Not a dataclass, because Prefect searches the fields of dataclasses that are passed to tasks.
    """

    def __init__(
        self, folder: Path, lease: RunLease, agents: Agents, found: Supervision | None, at_release: ExitStack
    ) -> None:
        self.folder = folder
        self.agents = agents
        """The agents on the run's hosts."""
        self.claim = Claim(agents)
        """The head's claim to the run's files on hosts."""
        self.copies: CheckpointCopies | None = None
        """The copies of the run's checkpoints in a bucket, if there are to be any and the bucket is claimed."""
        self.silent_hosts = set[str]()
        """Hosts that did not answer before the run began."""
        self._lease, self._found, self._at_release = lease, found, at_release

    def require_held(self) -> None:
        """Raise RunLocked if another head has taken over the run in its folder, on its hosts or in its bucket."""
        self._lease.require_kept()
        self.claim.require_kept()
        if self.copies is not None:
            self.copies.require_kept()

    def confirm_held(self) -> None:
        """Raise RunLocked unless no other head has taken over the run, also in its bucket, which is asked."""
        self.require_held()
        if self.copies is not None:
            self.copies.confirm()

    def transport(self, cluster: ClusterSpec) -> Ssh:
        """Return the transport with these settings, which can be used until the run is released."""
        folder = self._at_release.enter_context(TemporaryDirectory(prefix="t5-hosts-"))
        return Ssh.configured(cluster, Path(folder))

    @property
    def running_hosts(self) -> Hosts | None:
        """The hosts of ranks that were found running; None if there are none, or they have been adopted."""
        return None if self._found is None else Hosts.of(self._found.this.hosts or {})

    def adopt(self) -> Supervision | None:
        """Return the supervision of ranks that were found running, if any. From now on, the caller must end them."""
        found, self._found = self._found, None
        return found


@contextmanager
def hold_run(run_folder: Path) -> Iterator[HeldRun]:
    """Hold a run with ``run_lock``, and keep ranks running that an earlier head on this machine left on hosts.

    ``HeldRun.adopt`` takes these ranks over. If it is not called, they are ended when the block ends. How the block
    ends is recorded (infra.head.launch.start_record); SIGTERM therefore takes effect only then.
    """
    with stoppable(), run_lock(run_folder) as lease, recording_start(run_folder), ExitStack() as at_release:
        agents = Agents()
        run = HeldRun(run_folder, lease, agents, _found(run_folder, agents), at_release)
        try:
            yield run
        finally:
            try:
                _end_found(run)
            finally:
                run.claim.release()
                agents.close()
                if run.copies is not None:
                    run.copies.end()


def end_all(run: HeldRun, cluster: ClusterSpec, on_tick: Callable[[], None]) -> None:
    """End all earlier attempts on hosts, including ranks that were found running."""
    if (supervision := run.adopt()) is not None:
        supervision.close()
    if not any(unended(run.folder)):
        return
    with TemporaryDirectory(prefix="t5-ssh-") as folder:
        end_earlier(run.folder, Ssh.configured(cluster, Path(folder)), on_tick)


def transport_of(this: Attempt) -> Ssh:
    """The transport to the hosts of an attempt that was started on this machine."""
    return Ssh(ClusterLauncher(this.run_id).folder / SSH_CONFIG)


def _found(run_folder: Path, agents: Agents) -> Supervision | None:
    if (this := _running_attempt(run_folder)) is None:
        return None
    _log.warning("attempt %s of %s is still running; continuing it", this.number, this.run_name)
    code = None if this.code is None else own_bundle().digest
    nodes = Nodes(transport_of(this), tuple(this.hosts or {}), code=code)
    return Supervision(this, agents.on(nodes, this.lease_seconds or 0), ClusterLauncher(this.run_id).folder, None)


def _end_found(run: HeldRun) -> None:
    if (supervision := run.adopt()) is not None:
        supervision.close()
        end(supervision.this, transport_of(supervision.this))


def _running_attempt(run_folder: Path) -> Attempt | None:
    """The run's newest attempt, if its launcher is alive here and its ranks are still waiting for a head."""
    newest = max(unended(run_folder), key=lambda this: this.number, default=None)
    if newest is None or newest.lease_seconds is None:
        return None
    launcher = ClusterLauncher(newest.run_id)
    return newest if launcher.is_alive and head_lease.age_seconds(launcher.folder) < newest.lease_seconds else None
