"""Checkpoints of nodes that share no disk: saved, gathered, brought back and resumed by real DeepSpeed.

Every layout first trains to its end. It then resumes from the last checkpoint but one, after one node has lost its
disk. On four ranks, every kind of rank group has several ranks: the experts are split over two ranks, with two
replicas; one pipeline has two stages and two replicas, and another one has four stages.
"""

from pathlib import Path
from typing import Any

import pytest

from t5train.checkpoint import sidecar, tags
from t5train.checkpoint.retention import bytes_held
from t5train.checkpoint.sidecar import Sidecar
from t5train.checkpoint.tags import complete_tags, files_read_by
from t5train.model.model_shape import resolve
from t5train.records.stage_records import TokenShards
from tests.support.training.launched import Trained, job, spec_of, train

pytestmark = pytest.mark.slow

SHORT = {"optimizer.num_steps": 2, "optimizer.warmup_steps": 1, "storage.checkpoint_every_steps": 1}
SHORT |= {"storage.keep_last": 1, "storage.validate_every_steps": 2}
TAG, LAST = "step-00000001", "step-00000002"
ONE_RANK_A_NODE = ["zero0-fp32", "zero1-bf16", "zero2-fp32-tied", "zero3-fp32", "zero2-bf16-offload"]
ONE_RANK_A_NODE += ["zero3-bf16-offload", "zero2-fp32-ep1", "zero1-bf16-ep2", "zero1-fp32-pp2-tied"]
TWO_RANKS_A_NODE = ["zero2-bf16", "zero2-fp32-ep2", "zero1-bf16-pp4", "zero1-fp32-tied-pp2"]
REPLICATED = {"zero0-fp32", "zero1-bf16", "zero2-fp32-tied", "zero2-bf16-offload", "zero2-bf16"}
CASES = [(layout, 1) for layout in ONE_RANK_A_NODE] + [(layout, 2) for layout in TWO_RANKS_A_NODE]


class OnNodes(Trained):
    def sidecars(self, layout: str, tag: str) -> list[Sidecar]:
        """The sidecars of all ranks in order of rank, from the nodes that wrote them."""
        folders = [self.root / f"{layout}.whole/node-{node}/checkpoints/{tag}" for node in (0, 1)]
        return [one for folder in folders for one in sidecar.read_all(folder)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, pydocs_shards: TokenShards) -> OnNodes:
    """One launch of two ranks and one of four, each on two nodes."""
    root = tmp_path_factory.mktemp("nodes")
    for ranks_a_node in (1, 2):
        jobs: list[dict[str, Any]] = []
        for number, layout in enumerate(layout for layout, ranks in CASES if ranks == ranks_a_node):
            same = {"ranks": 2 * ranks_a_node, "ranks_a_node": ranks_a_node}
            brought = {"resume_tag": TAG, "brought_from": f"{root}/{layout}.whole", "intact": number % 2}
            jobs.append(job(f"{layout}.whole", layout, SHORT, **same))
            jobs.append(job(f"{layout}.resumed", layout, SHORT, **same, **brought))
        train(root, jobs, pydocs_shards, ranks=2 * ranks_a_node)
    return OnNodes(root)


@pytest.mark.parametrize(("layout", "ranks_a_node"), CASES)
def test_an_intact_node_and_one_that_was_wiped_resume_bit_equal_from_the_files_that_files_read_by_lists(
    trained: OnNodes, layout: str, ranks_a_node: int
) -> None:
    sidecars = trained.sidecars(layout, TAG)
    for rank in range(2 * ranks_a_node):
        whole, resumed = (trained.found(f"{layout}.{what}", rank) for what in ("whole", "resumed"))
        assert whole["step"] == resumed["step"] == 2
        assert whole["masters"] == resumed["masters"] == trained.found(f"{layout}.whole")["masters"]
        # Of the stages' mp_rank files, DeepSpeed opens two, and only counts the others.
        two = {f"mp_rank_{stage:02d}_model_states.pt" for stage in (0, sidecars[rank].layout.pipeline_rank)}
        expected = [name for name in files_read_by(rank, sidecars) if not name.startswith("mp_rank_") or name in two]
        assert resumed["opened"] == expected


@pytest.mark.parametrize(("layout", "ranks_a_node"), CASES)
def test_the_files_of_all_nodes_together_are_a_complete_checkpoint(
    trained: OnNodes, layout: str, ranks_a_node: int, tmp_path: Path
) -> None:
    gathered = trained.root / f"{layout}.whole/checkpoints"
    assert complete_tags(gathered) == [LAST, TAG]
    sidecars = tags.require_complete(gathered / LAST)
    names = [name for one in sidecars for name in one.files]
    assert sorted(names) == sorted({name for one in sidecars for name in files_read_by(one.rank, sidecars)})
    assert trained.consolidated(f"{layout}.whole", tmp_path) == trained.found(f"{layout}.whole")["masters"]


@pytest.mark.parametrize(("layout", "ranks_a_node"), CASES)
def test_every_file_of_a_node_is_listed_by_one_of_its_ranks_and_takes_about_the_estimated_disk_space(
    trained: OnNodes, layout: str, ranks_a_node: int, pydocs_shards: TokenShards
) -> None:
    once = {"optimizer.num_steps": 1, "optimizer.warmup_steps": 0}
    spec = spec_of(layout, ranks=2 * ranks_a_node).with_settings(SHORT | once)
    shape = resolve(spec.model, int(pydocs_shards.counts["vocab_size"]))
    for node in (0, 1):
        ranks = range(node * ranks_a_node, (node + 1) * ranks_a_node)
        folder = trained.root / f"{layout}.whole/node-{node}/checkpoints/{LAST}"
        written = sidecar.read_all(folder)
        assert [one.rank for one in written] == list(ranks)
        listed = [name for one in written for name in (*one.files, *one.replicas)]
        assert sorted(listed) == sorted(path.name for path in folder.glob("*.pt"))
        replicas = {"mp_rank_00_model_states.pt"} if node == 1 and layout in REPLICATED else set()
        assert {name for one in written for name in one.replicas} == replicas
        takes = sum(path.stat().st_size for path in folder.glob("*.pt"))
        expected = bytes_held(spec, shape, ranks)
        assert 0.95 * takes < expected < 2 * takes  # names and shapes add to the files of such a small model


def test_ranks_on_node_local_storage_do_not_prune(trained: OnNodes) -> None:
    for node in (0, 1):
        kept = (trained.root / f"zero2-bf16.whole/node-{node}/checkpoints").iterdir()
        assert sorted(path.name for path in kept if path.is_dir()) == [TAG, LAST]


def test_the_sidecars_of_a_pipeline_list_the_layers_that_each_rank_wrote(trained: OnNodes) -> None:
    sidecars = trained.sidecars("zero1-fp32-tied-pp2", LAST)
    positions = [(one.layout.pipeline_rank, one.layout.data_parallel_rank) for one in sidecars]
    assert positions == [(0, 0), (0, 1), (1, 0), (1, 1)]
    layers = [{name for name in one.files if name.startswith("layer_")} for one in sidecars]
    assert "layer_00-model_states.pt" in layers[0]
    assert layers[2]
    assert layers[1] == layers[3] == set()
    held = [{slot.name for group in one.groups for slot in group} for one in sidecars]
    assert held[0] == held[1]
    assert {"shared.weight"} <= held[0] & held[2]


def test_the_sidecar_of_a_rank_lists_the_experts_that_it_wrote(trained: OnNodes) -> None:
    sidecars = trained.sidecars("zero2-fp32-ep2", LAST)
    experts = [{int(name.split("_")[3]) for name in one.files if name.startswith("layer_")} for one in sidecars]
    assert experts == [{0, 1}, {2, 3}, set(), set()]
    held = [(one.layout.expert_rank, one.layout.expert_data_rank) for one in sidecars]
    assert held == [(0, 0), (1, 0), (0, 1), (1, 1)]
    slots = {slot.name for group in sidecars[3].groups for slot in group}
    assert "encoder.block.1.layer.1.mlp.experts.expert_2.wi.weight" in slots
    assert "encoder.block.1.layer.1.mlp.experts.expert_1.wi.weight" not in slots
