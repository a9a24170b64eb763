"""Training to its end, here or on hosts: without Prefect, for the flow's task and for the command line alike."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from infra.cluster import failure_history
from infra.cluster.attachment import end_all, hosts_at_work
from infra.cluster.hosts import Hosts, read_hosts, spare_hosts
from infra.cluster.launch import ClusterLaunchSpec, launch_on_hosts
from infra.cluster.remote import Ssh
from infra.cluster.run_storage import RunStorage, SharedStorage
from infra.launch import LaunchSpec, launch
from infra.node_local.node_run import NodeRun
from infra.node_local.storage import NodeLocalStorage
from infra.preflight.needs import Needs, operators_of
from infra.run_lock import at_release, require_held
from t5train.errors import HostError, LaunchError
from t5train.model.shape import resolve
from t5train.progress import Progress, silent
from t5train.records import Checkpoint, TokenShards
from t5train.run_files import METRICS
from t5train.spec import RunSpec
from t5train.train import run
from t5train.train.metrics import Values, parse_line
from t5train.train.resume_point import ask_to_begin_again

_TAIL_BYTES = 64 << 10


def train_run(spec: RunSpec, shards: TokenShards, progress: Progress = silent, *, adopt: bool = False) -> Checkpoint:
    """The run's last checkpoint: reused, or trained from the newest complete one on.

    ``adopt`` takes the run's files on hosts over from another head whose lease has expired. Hold ``hold_run`` around
    it. Raises RunChanged when the run was begun with other settings, RunOwned when another head has its files on hosts,
    a TrainingError when training was not honest, and LaunchError or HostError, after most of which trying again can
    help. A host that has failed twice in the last week is named then, and replaced by a spare the next time.
    """
    run.open_run(spec, shards, progress)
    if (checkpoint := run.finished(spec, shards, progress)) is not None:
        return checkpoint
    try:
        _train(spec, shards, progress, adopt)
        require_held(spec.run_folder)
    except (LaunchError, HostError) as error:
        raise failure_history.judged(spec.run_folder, error, partial(_is_replaced, spec)) from error
    _tell(spec, progress)
    return run.conclude(spec, shards, progress)


def train_again(spec: RunSpec) -> None:
    """Have ``train_run`` begin at step 0 the next time, with all checkpoints moved aside; the caller holds the run.

    Ranks that an earlier command left at work are ended first.
    """
    end_all(spec.run_folder, spec.cluster, on_tick=lambda: None)
    ask_to_begin_again(spec.run_folder)


def _train(spec: RunSpec, shards: TokenShards, progress: Progress, adopt: bool) -> None:
    def job(attempt_folder: Path) -> Path:
        return run.write_job(spec, shards, attempt_folder, progress)

    def on_tick() -> None:
        require_held(spec.run_folder)
        _tell(spec, progress)

    require_held(spec.run_folder)  # before what seems to be left of an earlier attempt is ended
    if spec.cluster.hostfile is None:
        end_all(spec.run_folder, spec.cluster, on_tick)
        launch(launch_spec(spec, lambda attempt_folder: rank_program(job(attempt_folder))), on_tick)
    else:
        launch_on_hosts(_on_hosts(spec, shards, job, progress, adopt), on_tick)


def _on_hosts(
    spec: RunSpec, shards: TokenShards, job: Callable[[Path], Path], progress: Progress, adopt: bool
) -> ClusterLaunchSpec:
    hosts = training_hosts(spec)
    shape = resolve(spec.model, int(shards.counts["vocab_size"]))
    needs = Needs.of_run(spec, hosts, shape, sum(digest.size for digest in shards.files.values()))

    def storage(is_node_local: bool) -> RunStorage:
        if not is_node_local:
            return SharedStorage(job)
        # The claim on the hosts is renewed between two launches, too.
        folder = at_release(spec.run_folder).enter_context(TemporaryDirectory(prefix="t5-hosts-"))
        transport = Ssh.configured(spec.cluster, Path(folder))
        begun, unique_id = run.run_fingerprint(spec, shards), run.unique_id(spec.run_folder)
        of_nodes = NodeRun.of(spec, begun, str(unique_id), hosts, transport, needs.checkpoint_bytes)
        return NodeLocalStorage(of_nodes, job, progress, adopt)

    return ClusterLaunchSpec(
        run_folder=spec.run_folder,
        cluster=spec.cluster,
        hosts=hosts,
        needs=needs,
        storage=storage,
        program=rank_program,
        is_same_job=lambda attempt_folder: run.is_job_of(spec, shards, attempt_folder),
    )


def training_hosts(spec: RunSpec) -> Hosts:
    """Those that are to train; spares among them that an earlier head has put in the place of others stay."""
    hosts, spares = read_hosts(spec.cluster), spare_hosts(spec.cluster)
    unfit, at_work = failure_history.unfit(spec.run_folder), hosts_at_work(spec.run_folder)
    fit = {*hosts.names, *spares.names} - unfit.keys()
    if spares.all and at_work and at_work.num_ranks == hosts.num_ranks and fit.issuperset(at_work.names):
        return at_work
    return failure_history.with_spares(hosts, spares, unfit)


def _is_replaced(spec: RunSpec, host: str) -> bool:
    return spec.cluster.hostfile is not None and host not in training_hosts(spec).names


def launch_spec(spec: RunSpec, program: Callable[[Path], tuple[str, ...]]) -> LaunchSpec:
    """What DeepSpeed's launcher is to start; ``program`` as LaunchSpec has it."""
    return LaunchSpec(
        program=program,
        run_folder=spec.run_folder,
        num_ranks=spec.cluster.ranks,
        accelerator=spec.cluster.accelerator,
        master_port=spec.cluster.master_port,
        grace_seconds=spec.cluster.grace_seconds,
        operators=operators_of(spec),
    )


def rank_program(spec_path: Path) -> tuple[str, ...]:
    """Arguments of the interpreter in every rank."""
    return "-m", "t5train.train", "--spec", str(spec_path)


def last_metrics(path: Path) -> Values | None:
    """The newest whole line with a loss; only the end of the file is read, as it is asked for twice a second."""
    if not path.exists():
        return None
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        lines = file.read().split(b"\n")[:-1]
    steps = (parse_line(line) for line in reversed(lines) if b'"loss"' in line)
    return next((step for step in steps if step is not None), None)


def _tell(spec: RunSpec, progress: Progress) -> None:
    line = last_metrics(spec.run_folder / METRICS)
    if line is None:
        progress("steps, ranks are starting", 0, spec.optimizer.num_steps)
        return
    facts = f"loss {line['loss']:.3f}, {line['tokens_per_second']:,.0f} tokens/s"
    progress(f"steps, {facts}", int(line["step"] or 0), spec.optimizer.num_steps)
