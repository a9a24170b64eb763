"""The memory estimate of a run agrees with what its engines' tensors take."""

import json

import pytest

from t5train.engine.memory_estimate import FETCHED, PROCESS, WITNESS, held_by_a_rank, host_bytes
from t5train.model.model_shape import count_parameters, resolve
from t5train.records.stage_records import TokenShards
from t5train.spec.recipes import RECIPES, recipe
from tests.support.training.launched import launch, spec_of

LAYOUTS = ["zero0-bf16", "zero1-bf16", "zero2-fp32-ep2", "zero2-bf16-offload", "zero3-bf16-offload"]
# Large enough that hardly anything else counts.
LARGE = {"model.d_model": 256, "model.d_ff": 512, "model.num_heads": 8}


@pytest.fixture(scope="module")
def live_bytes(tmp_path_factory: pytest.TempPathFactory, pydocs_shards: TokenShards) -> dict[str, int]:
    """The peak bytes of tensors on rank 0 during a step of each layout."""
    root = tmp_path_factory.mktemp("memory")
    jobs = [
        {
            "name": layout,
            "spec": spec_of(layout).with_settings(LARGE).model_dump(mode="json"),
            "run_folder": str(root),
            "shards": str(pydocs_shards.path),
        }
        for layout in LAYOUTS
    ]
    (root / "jobs.json").write_text(json.dumps(jobs))
    launch(root / "jobs.json", program="memory_program")
    return {layout: int((root / f"{layout}.bytes").read_text()) for layout in LAYOUTS}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_memory_estimate_agrees_with_the_live_tensors(
    live_bytes: dict[str, int], layout: str, pydocs_shards: TokenShards
) -> None:
    spec = spec_of(layout).with_settings(LARGE)
    held = held_by_a_rank(spec, resolve(spec.model, int(pydocs_shards.counts["vocab_size"])))
    estimated = sum(one.accelerator + one.host for one in held if one.what not in (PROCESS, WITNESS, FETCHED))
    assert 0.7 * estimated < live_bytes[layout] < 1.01 * estimated  # the formula adds up different moments of a step


def test_more_ranks_hold_less_memory_each() -> None:
    spec = recipe("t5_3b_one_gpu")
    shape = resolve(spec.model, 32_100)
    on_four = spec.with_settings({"cluster.ranks": 4, "layout.micro_batch_sequences": 32})
    alone, shared = ({one.what: one.host for one in held_by_a_rank(each, shape)} for each in (spec, on_four))
    assert shared["masters"] == -(-alone["masters"] // 4)
    assert host_bytes(spec, shape) < host_bytes(on_four, shape) < 1.1 * host_bytes(spec, shape)


@pytest.mark.parametrize(
    ("name", "gigabytes"), [("base", 3), ("zero3", 8), ("t5_3b_one_gpu", 70), ("t5_11b_one_gpu", 291)]
)
def test_recipes_need_the_expected_host_memory(name: str, gigabytes: int) -> None:
    spec = recipe(name)
    assert gigabytes - 1 < host_bytes(spec, resolve(spec.model, 32_100)) / 1e9 < gigabytes + 1
    assert RECIPES[name].__doc__


def test_a_stage_of_a_pipeline_holds_its_layers_and_an_embedding() -> None:
    spec = recipe("pipeline")
    stages, shape = spec.layout.pipeline_stages, resolve(spec.model, 32_100)
    weights = next(one.accelerator for one in held_by_a_rank(spec, shape) if one.what == "weights")
    embedding = shape.vocab_size * shape.d_model
    assert stages > 1
    assert weights == 2 * (count_parameters(shape) // stages + embedding)
