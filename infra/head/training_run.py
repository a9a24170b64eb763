"""Trains a run to its end, on this machine or on hosts. Start reading here.

Does not use Prefect: both the flow's task and the command line call it.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from infra.head import retries
from infra.head.host_selection import require_hosts, training_hosts
from infra.head.hosts.hostfile import Hosts
from infra.head.launch.cluster_launch import ClusterLaunchSpec, launch_on_hosts
from infra.head.launch.held_run import HeldRun, end_all, hold_run
from infra.head.launch.local_launch import LaunchSpec, launch
from infra.head.predicting.hosts_predictor import evaluating_hosts
from infra.head.preflight.launch_requirements import LaunchRequirements, operators_of
from infra.head.preflight.monitor_checks import require_wandb, wandb_environment
from infra.head.preflight.pair_checks import require_data
from infra.head.preflight.run_checks import (
    WEIGHT_BYTES,
    needed_bytes,
    publish_url,
    require_absolute,
    require_capable,
    require_free,
    require_model,
)
from infra.head.preflight.text_checks import TextFacts
from infra.head.progress_report import ProgressReport
from infra.head.storage.checkpoint_copies import begin_copies, can_do_without, check_bucket
from infra.head.storage.node_paths import NodeRun
from infra.head.storage.run_storage import NodeLocalStorage, RunStorage, SharedStorage
from infra.head.storage.staged_bytes import StagedBytes
from t5train.checkpoint import resume
from t5train.checkpoint.resume import has_finished, require_same_settings
from t5train.checkpoint.resume_point import ask_to_begin_again
from t5train.data.pairs.task_rates import require_enough_pairs
from t5train.data.samples.loader import require_enough_samples
from t5train.data.vocabulary.unknown_pieces import require_known_in
from t5train.errors import HostError, LaunchError, SpecError, StoreError
from t5train.files.run_folder import ATTEMPT_SPEC
from t5train.host_resources import make_root, require_free_space, require_writable
from t5train.model import model_shape
from t5train.model.model_shape import T5Shape, resolve
from t5train.progress import Progress, silent
from t5train.records.stage_records import Checkpoint, PairShards
from t5train.release.publication import check_destination
from t5train.spec import RunSpec
from t5train.spec.rank_job import Shards

_log = logging.getLogger(__name__)


def train_run(
    spec: RunSpec,
    shards: Shards,
    run: HeldRun,
    progress: Progress = silent,
    *,
    adopt: bool = False,
    staged: StagedBytes | None = None,
) -> Checkpoint:
    """Train a held run to its end, from its newest complete checkpoint; returns the last checkpoint.

    If the run has finished, only returns its last checkpoint. ``adopt`` takes over the run's files on hosts from
    another head whose lease has expired. On hosts that do not share the root, ``staged`` gets the bytes that each of
    them needs before its ranks start.

    Raises InputError if the shards are too few or have too many unknown pieces, RunChanged if the run was begun
    with other settings, RunOwned if another head owns its files on hosts, and a TrainingError if training fails a
    sanity check. Raises LaunchError or HostError for other failures; most of these are worth a retry. These errors name
    the hosts that have failed twice in the last week, which spares then replace.
    """
    resume.open_run(spec, shards, progress)
    run.copies = run.copies or begin_copies(spec)
    if (checkpoint := resume.finished(spec, shards, progress)) is not None:
        _store_last(run, progress)
        return checkpoint
    _require_enough(spec, shards)
    if run.copies is not None:
        run.copies.prepare(progress)
        run.copies.start()
    report = ProgressReport(spec, progress)
    try:
        _Training(spec, shards, run, progress, report, adopt, staged or StagedBytes()).to_the_end()
        run.require_held()
    except (LaunchError, HostError) as error:
        judged = retries.judged(spec.run_folder, error, partial(_is_replaced, spec, run))
        if judged is error:
            raise
        raise judged from error
    report.report()
    checkpoint = resume.conclude(spec, shards, progress)
    _store_last(run, progress)
    return checkpoint


def _require_enough(spec: RunSpec, shards: Shards) -> None:
    if isinstance(shards, PairShards):
        require_enough_pairs(spec, shards)
    else:
        require_enough_samples(spec, shards)
        require_known_in(shards, spec.shards.max_unknown_share)


def _store_last(run: HeldRun, progress: Progress) -> None:
    if run.copies is not None:
        run.copies.catch_up(progress)


def train_again(spec: RunSpec, run: HeldRun) -> None:
    """Make the next ``train_run`` begin at step 0, with all checkpoints set aside.

    Ranks that an earlier command left running are ended first.
    """
    end_all(run, spec.cluster, on_tick=lambda: None)
    ask_to_begin_again(spec.run_folder)


@dataclass(frozen=True)
class _Training:
    """The training of a held run, on this machine or on hosts."""

    spec: RunSpec
    shards: Shards
    run: HeldRun
    progress: Progress
    report: ProgressReport
    adopt: bool
    staged: StagedBytes

    def to_the_end(self) -> None:
        """Start the ranks, and wait until all of them have trained to the last step."""
        spec = self.spec
        self.run.require_held()  # before ending ranks of an earlier attempt: another head may have taken over
        if spec.cluster.hostfile is None:
            end_all(self.run, spec.cluster, self._on_tick)
            launch(launch_spec(spec, self._write_job), self._on_tick)
        else:
            launch_on_hosts(self._on_hosts(), self._on_tick)

    def _on_tick(self) -> None:
        self.run.require_held()
        self.report.report()

    def _write_job(self, attempt_folder: Path, look: Callable[[], None] = lambda: None) -> Path:
        def progress(what: str, done: int, total: int | None) -> None:
            look()
            self.progress(what, done, total)

        return resume.write_job(self.spec, self.shards, attempt_folder, progress)

    def _on_hosts(self) -> ClusterLaunchSpec:
        spec, shards = self.spec, self.shards
        hosts = training_hosts(spec, self.run.running_hosts, self.run.silent_hosts)
        shape = resolve(spec.model, int(shards.counts["vocab_size"]))
        needs = LaunchRequirements.of_run(spec, hosts, shape, sum(digest.size for digest in shards.files.values()))
        return ClusterLaunchSpec(
            run=self.run,
            cluster=spec.cluster,
            hosts=hosts,
            needs=needs,
            storage=lambda is_node_local: (
                self._on_nodes(needs, hosts) if is_node_local else SharedStorage(self._write_job)
            ),
            program=rank_program,
            is_same_job=lambda attempt_folder: resume.is_job_of(spec, shards, attempt_folder),
        )

    def _on_nodes(self, needs: LaunchRequirements, hosts: Hosts) -> RunStorage:
        spec = self.spec
        transport = self.run.transport(spec.cluster)
        begun, unique_id = resume.run_fingerprint(spec, self.shards), resume.unique_id(spec.run_folder)
        of_nodes = NodeRun.of(spec, begun, str(unique_id), hosts, transport, needs.checkpoint_bytes)
        return NodeLocalStorage(of_nodes, self._write_job, self.progress, self.run.claim, self.adopt, self.staged)


def _is_replaced(spec: RunSpec, run: HeldRun, host: str) -> bool:
    if spec.cluster.hostfile is None:
        return False
    return host not in training_hosts(spec, run.running_hosts, run.silent_hosts).names


def launch_spec(spec: RunSpec, write_job: Callable[[Path, Callable[[], None]], object]) -> LaunchSpec:
    """Return the settings of a launch on this machine, where ranks import while ``write_job`` verifies a checkpoint."""
    import_seconds = str(spec.cluster.deadlines.start_seconds)
    return LaunchSpec(
        program=lambda folder: (*rank_program(folder / ATTEMPT_SPEC), "--await-spec", import_seconds),
        prepare=write_job,
        run_folder=spec.run_folder,
        num_ranks=spec.cluster.ranks,
        accelerator=spec.cluster.accelerator,
        master_port=spec.cluster.master_port,
        grace_seconds=spec.cluster.grace_seconds,
        save_seconds=spec.cluster.deadlines.save_seconds,
        environment=wandb_environment(spec),
        operators=operators_of(spec),
    )


def rank_program(spec_path: Path) -> tuple[str, ...]:
    """Return the arguments of the Python interpreter for every rank."""
    return "-m", "t5train.train", "--spec", str(spec_path)


def require_startable(
    spec: RunSpec, run: HeldRun | None = None, text: TextFacts | None = None
) -> tuple[T5Shape, TextFacts]:
    """Raise the errors that the start of a run would raise, whatever else is running or is stored on the disk.

    ``run`` is the run, if it is held: ranks that are running on hosts have what monitoring needs. ``text`` is given if
    the text is not read any more. Returns the model's shape, and what is known of the text or the pairs.
    """
    require_absolute("root", spec.storage.root)
    require_same_settings(spec)
    if run is None or run.running_hosts is None:
        require_wandb(spec)
    of_model = require_model(spec)
    if spec.cluster.hostfile is None:
        require_capable(spec, of_model)
    return of_model, text or require_data(spec)


def require_startable_now(
    spec: RunSpec, run: HeldRun | None = None, text: TextFacts | None = None
) -> tuple[T5Shape, TextFacts]:
    """Raise also the errors that busy or full resources of this machine would cause; ``run`` and ``--dry-run`` call it.

    Asks no other machine, and writes nothing. Returns what ``require_startable`` returns.
    """
    of_model, text = require_startable(spec, run, text)
    if spec.cluster.hostfile is None:
        require_free(spec)
    require_writable(spec.storage.root)
    require_free_space(spec.storage.root, needed_bytes(spec, of_model, text.size_bytes), f"run {spec.run_name!r}")
    return of_model, text


def require_destination(spec: RunSpec, of_model: T5Shape) -> None:
    """Raise PublicationError if the run could not be published, or its checkpoints could not be stored.

    Raises RunOwned if another head may be storing the run's checkpoints.
    """
    weight_bytes = WEIGHT_BYTES * model_shape.count_parameters(of_model)
    try:
        check_destination(publish_url(spec), weight_bytes, spec.fingerprint())
    except StoreError as error:
        if not can_do_without(spec, error):
            raise
        _log.warning("the run cannot be published now: %s", error)
    check_bucket(spec)


def require_ready(spec: RunSpec, run: HeldRun | None = None, text: TextFacts | None = None) -> set[str]:
    """Raise the errors that training would raise hours later, as far as they can be detected now.

    For the arguments, see ``require_startable``. Returns the hosts that do not answer, which spares are to replace.
    """
    of_model, text = require_startable_now(spec, run, text)
    make_root(spec.storage.root)
    require_destination(spec, of_model)
    if spec.predicts_held_out and not has_finished(spec):
        with evaluating_hosts(spec, silent):
            pass
    running_hosts, silent_hosts = (run.running_hosts, run.silent_hosts) if run else (None, set[str]())
    if spec.cluster.hostfile is None or has_finished(spec):
        return silent_hosts
    return require_hosts(spec, of_model, text, running_hosts, silent_hosts)


@contextmanager
def hold_ready_run(spec: RunSpec, held: HeldRun | None = None, text: TextFacts | None = None) -> Iterator[HeldRun]:
    """Hold a run (``hold_run``) that passes ``require_ready``. If the caller has ``held`` it already, only check it.

    Raises SpecError if ``held`` is another run.

    A run that has already begun is held before it is checked: its ranks may be running on hosts, and end when no head
    renews their lease.
    """
    if held is not None and held.folder != spec.run_folder:
        raise SpecError(
            f"{held.folder} is locked for this command, but its settings are those of the run {spec.run_folder}. Start "
            "the run again"
        )
    with ExitStack() as stack:
        if held is None and spec.run_folder.exists():
            held = stack.enter_context(hold_run(spec.run_folder))
        silent_hosts = require_ready(spec, held, text)
        run = held or stack.enter_context(hold_run(spec.run_folder))
        run.silent_hosts |= silent_hosts
        if run.copies is None and resume.unique_id(spec.run_folder) is not None:
            # From now on, nobody else can continue it, although making text and tokens may take hours.
            run.copies = begin_copies(spec)
        yield run
