"""Brings to nodes what their ranks begin from: only what each lacks, verified there."""

from pathlib import Path

from infra.node_local.node_run import NodeRun, place_of_consolidated, place_of_shards, place_of_start
from infra.node_store.inventory import HEAD, inventory_of
from infra.node_store.paths import tag_place
from infra.node_store.pulling import Wanted, listed
from infra.node_store.restore import part, restore
from infra.node_store.staging import files_of_record, stage_folder
from infra.node_store.tags import FoundTag, complete_tags
from t5train.checkpoint_files import files_read_by
from t5train.progress import Progress
from t5train.records import Weights
from t5train.run_files import METRICS, step_of
from t5train.train.job import TrainJob
from t5train.train.metrics import drop_after


def provide(run: NodeRun, job: TrainJob, progress: Progress) -> None:
    """Give each node what its ranks read of a job that has the head's paths. Raises HostError."""
    _stage(run, job.shards_folder, files_of_record(job.shards()), place_of_shards(job), progress)
    if (told := job.consolidated) is not None:
        files = files_of_record(Weights.load(told.folder))
        _stage(run, told.folder, files, place_of_consolidated(told), progress)
    elif job.resume_tag is not None:
        _restore(run, job.resume_tag, progress)
    elif job.begins_from is not None:
        folder = Path(job.spec.model.start_from or "")
        _stage(run, folder, listed(folder, _visible(folder)), place_of_start(job), progress)
    _continue_metrics(run, job, progress)


def _stage(run: NodeRun, folder: Path, files: list[Wanted], place: str, progress: Progress) -> None:
    stage_folder(run.nodes, folder, files, place, run.name, progress, run.checkpoint_bytes)


def _visible(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


def _restore(run: NodeRun, name: str, progress: Progress) -> None:
    tag = next(tag for tag in complete_tags({HEAD: inventory_of(run.checkpoints)}) if tag.name == name)
    parts = {host.name: part(tag, _read_by(tag, run.ranks_of(host)), run.ranks_of(host)) for host in run.hosts.all}
    place = tag_place(run.name, name)
    restore(run.nodes, run.name, place, parts, run.checkpoints / name, progress, recorded=tag.files)


def _read_by(tag: FoundTag, ranks: range) -> set[str]:
    return {name for rank in ranks for name in files_read_by(rank, tag.sidecars)}


def _continue_metrics(run: NodeRun, job: TrainJob, progress: Progress) -> None:
    """Have rank 0 go on with the lines that the head has; and every node a folder of the run."""
    step = job.consolidated.clock.step if job.consolidated else step_of(job.resume_tag) if job.resume_tag else 0
    drop_after(run.folder / METRICS, step)
    wanted = {host: listed(run.folder, [METRICS]) if host == run.first else [] for host in run.nodes.hosts}
    restore(run.nodes, run.name, run.place, wanted, run.folder, progress)
