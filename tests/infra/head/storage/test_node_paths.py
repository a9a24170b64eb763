from dataclasses import replace
from pathlib import Path

from infra.head.storage.node_paths import NodeRun
from infra.node.node_folders import node_path
from t5train.spec.rank_job import Consolidated, TrainingProgress, TrainJob
from t5train.spec.recipes import recipe


def job(**facts: object) -> TrainJob:
    values = {"spec": recipe("smoke"), "run_fingerprint": "f" * 64, "resume_tag": None}
    folders = {"run_folder": "/data/t5/runs/smoke", "shards_folder": "/data/t5/shards/pydocs-1"}
    return TrainJob.model_validate(values | folders | facts)


def test_ranks_on_nodes_get_the_paths_on_their_node(run: NodeRun) -> None:
    node_job = run.job_on_nodes(job(resume_tag="step-00000008", start_fingerprint="5" * 64))
    scratch = node_path("scratch")
    assert node_job.node_local
    assert node_job.run_folder == scratch / "runs" / run.name
    assert node_job.shards_folder == scratch / "shards/pydocs-1"
    assert node_job.spec == recipe("smoke")
    chosen = replace(run, nodes=replace(run.nodes, scratch=Path("/nvme")))
    assert chosen.job_on_nodes(job()).run_folder == Path("/nvme/runs", run.name)


def test_the_job_names_starting_weights_by_the_path_where_they_are_staged(run: NodeRun) -> None:
    folder = Path("/shared/t5/runs/smoke/relayout/step-8")
    consolidated = Consolidated(folder=folder, fingerprint="c" * 64, clock=TrainingProgress(step=8))
    node_job = run.job_on_nodes(job(consolidated=consolidated))
    staged = {"folder": node_path("scratch/staged/step-8-cccccccccccc")}
    assert node_job.consolidated == consolidated.model_copy(update=staged)
    spec = recipe("smoke").with_settings({"model.start_from": '"/models/t5"'})
    node_job = run.job_on_nodes(job(spec=spec, start_fingerprint="5" * 64))
    assert node_job.spec.model.start_from == str(node_path("scratch/staged/t5-555555555555"))


def test_adapters_have_the_weights_they_are_for_also_when_they_resume(run: NodeRun) -> None:
    start = {"model.start_from": '"/models/t5"'}
    lora = {"pairs.train": ["a.jsonl"], "optimizer.kind": "adamw", "finetune.lora.rank": 8}
    for settings, expected in ((start, "/models/t5"), (start | lora, str(node_path("scratch/staged/t5-555555555555")))):
        spec = recipe("smoke").with_settings(settings)
        resumed = job(spec=spec, start_fingerprint="5" * 64, resume_tag="step-00000008")
        assert run.job_on_nodes(resumed).spec.model.start_from == expected
