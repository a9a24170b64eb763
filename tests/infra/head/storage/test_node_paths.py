from dataclasses import replace
from pathlib import Path

from infra.head.hosts.hostfile import Host, Hosts
from infra.head.storage.node_paths import NodeRun
from infra.node.node_folders import node_path
from t5train.spec.rank_job import Consolidated, TrainingProgress, TrainJob
from t5train.spec.recipes import recipe


def job(**facts: object) -> TrainJob:
    values = {
        "spec": recipe("smoke"),
        "run_fingerprint": "f" * 64,
        "run_folder": "/data/t5/runs/smoke",
        "shards_folder": "/data/t5/shards/pydocs-1",
        "resume_tag": None,
    }
    return TrainJob.model_validate(values | facts)


def test_ranks_on_nodes_are_told_their_own_paths(run: NodeRun) -> None:
    told = run.job_on_nodes(job(resume_tag="step-00000008", start_fingerprint="5" * 64))
    scratch = node_path("scratch")
    assert told.node_local
    assert told.run_folder == scratch / "runs" / run.name
    assert told.shards_folder == scratch / "shards/pydocs-1"
    assert told.spec == recipe("smoke")
    chosen = replace(run, nodes=replace(run.nodes, scratch=Path("/nvme")))
    assert chosen.job_on_nodes(job()).run_folder == Path("/nvme/runs", run.name)


def test_what_an_attempt_begins_from_is_named_where_it_is_staged(run: NodeRun) -> None:
    consolidated = Consolidated(
        folder=Path("/root/w/relayout/step-8"), fingerprint="c" * 64, clock=TrainingProgress(step=8)
    )
    told = run.job_on_nodes(job(consolidated=consolidated))
    assert told.consolidated == consolidated.model_copy(
        update={"folder": node_path("scratch/staged/step-8-cccccccccccc")}
    )
    spec = recipe("smoke").with_settings({"model.start_from": '"/models/t5"'})
    told = run.job_on_nodes(job(spec=spec, start_fingerprint="5" * 64))
    assert told.spec.model.start_from == str(node_path("scratch/staged/t5-555555555555"))


def test_ranks_are_counted_over_hosts(run: NodeRun) -> None:
    hosts = Hosts((Host("a", (0, 1)), Host("b", (3,)), Host("c", (0, 1))))
    assert [replace(run, hosts=hosts).ranks_of(host) for host in hosts.all] == [range(2), range(2, 3), range(3, 5)]
