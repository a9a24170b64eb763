"""Consolidating generated checkpoints of every layout gives the tensors that they were made from."""

import tempfile
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from t5train.checkpoint.consolidate import consolidate
from t5train.records.stage_records import Weights
from tests.support.checkpoints.deepspeed_files import Layout
from tests.support.checkpoints.live_tensors import consolidated, require_equal
from tests.support.checkpoints.pipeline_files import Pipeline, write_pipeline
from tests.support.checkpoints.sidecar_files import write

SHAPES = st.lists(st.integers(1, 9), min_size=0, max_size=3).map(tuple)
GROUPS = st.lists(st.lists(SHAPES, min_size=1, max_size=5), min_size=1, max_size=3)
PRECISIONS = st.sampled_from([torch.bfloat16, torch.float16, torch.float32])


@st.composite
def layouts(draw: st.DrawFn, stages: Sequence[int], *, sidecars: bool) -> Layout:
    """Any layout that can be determined from its files. At ZeRO 0 without sidecars, some layouts cannot."""
    stage, ranks = draw(st.sampled_from(stages)), draw(st.sampled_from([1, 2, 3, 4, 6]))
    layout = Layout(
        groups=draw(GROUPS),
        stage=stage,
        ranks=ranks,
        precision=draw(PRECISIONS),
        alignment=draw(st.sampled_from([1, 4, 8])) if stage in (1, 2) else 1,
        keep_padding=stage == 1 and draw(st.booleans()),
        experts=draw(experts(ranks)) if stage < 3 else (),
        expert_shapes=draw(st.lists(SHAPES, min_size=1, max_size=3)),
        group_elements=draw(st.integers(1, 200)),
        consecutive=draw(st.booleans()),
        flat=draw(st.booleans()),
        frozen=draw(st.lists(SHAPES, max_size=2)),
        ties=draw(st.integers(0, 1)),
        buffers=draw(st.integers(0, 2)),
        prefix=draw(st.sampled_from(["", "module."])),
        seed=draw(st.integers(0, 1 << 30)),
    )
    if layout.keep_padding:
        layout = replace(layout, alignment=1)
    if stage == 0 and not sidecars and layout.precision != torch.float32:
        one_size = layout.experts[:1] * len(layout.experts)
        layout = replace(layout, groups=layout.groups[:1], frozen=(), experts=one_size)
    return layout


def experts(ranks: int) -> st.SearchStrategy[list[tuple[int, int]]]:
    """MoE layers: the number of experts, and the number of ranks they are spread over."""
    sizes = st.sampled_from([size for size in range(1, ranks + 1) if ranks % size == 0])
    layer = st.tuples(st.integers(1, 3), sizes).map(lambda drawn: (drawn[0] * drawn[1], drawn[1]))
    return st.lists(layer, max_size=3)


SIDECARS = pytest.mark.parametrize("sidecars", [False, True], ids=["without-sidecars", "with-sidecars"])


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@SIDECARS
@pytest.mark.parametrize("stages", [(0,), (1, 2), (3,)], ids=["zero0", "zero12", "zero3"])
@given(data=st.data())
def test_any_layout_is_consolidated_bit_for_bit(data: st.DataObject, stages: Sequence[int], sidecars: bool) -> None:
    layout = data.draw(layouts(stages, sidecars=sidecars))
    require_reassembled(layout, sidecars, moments=layout.stage > 0 and data.draw(st.booleans()))


@SIDECARS
@pytest.mark.parametrize(
    ("stage", "precision", "experts"),
    [(1, torch.bfloat16, ()), (2, torch.float16, ((3, 3), (2, 1))), (3, torch.float16, ())],
    ids=["zero1", "zero2-experts", "zero3"],
)
def test_parameters_of_every_kind_are_consolidated_with_their_moments(
    stage: int, precision: torch.dtype, experts: Sequence[tuple[int, int]], sidecars: bool
) -> None:
    """Three ranks, over which no parameter but one divides evenly."""
    layout = Layout(
        groups=[[(5, 3), (7,)], [(4,), (2, 2)]],
        stage=stage,
        ranks=3,
        precision=precision,
        experts=experts,
        group_elements=20,
        frozen=[(2, 2)],
        ties=1,
        buffers=2,
    )
    require_reassembled(layout, sidecars, moments=True)


def require_reassembled(layout: Layout, sidecars: bool, moments: bool) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        written = write(Path(scratch) / "checkpoint", layout, sidecars=sidecars)
        consolidate(written.folder, Path(scratch) / "out", moments=moments)
        require_equal(consolidated(Path(scratch) / "out"), written.expected)
        if moments:
            require_moments(Path(scratch) / "out", written.expected)


def require_moments(out: Path, expected: dict[str, torch.Tensor]) -> None:
    """Moments must be half and a quarter of each trained parameter's master, as in the generated files."""
    trained = {name: tensor for name, tensor in expected.items() if "frozen" not in name and "buffer" not in name}
    for key, part in (("exp_avg", 0.5), ("exp_avg_sq", 0.25)):
        require_equal(consolidated(out, key), {name: part * tensor for name, tensor in trained.items()})


@st.composite
def pipelines(draw: st.DrawFn) -> Pipeline:
    """Two to four stages. Layers have weights of zero to three dimensions, or none at all."""
    layers = st.lists(st.lists(SHAPES, max_size=3), min_size=1, max_size=3)
    layout = Layout(
        groups=(),
        stage=1,
        ranks=draw(st.integers(1, 3)),
        precision=draw(PRECISIONS),
        alignment=draw(st.sampled_from([1, 8])),
        seed=draw(st.integers(0, 1 << 30)),
    )
    padding = {"keep_padding": True, "alignment": 1} if draw(st.booleans()) else {}
    return Pipeline(draw(st.lists(layers, min_size=2, max_size=4)), replace(layout, **padding), draw(SHAPES))


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@SIDECARS
@given(pipeline=pipelines())
def test_any_pipeline_is_consolidated_bit_for_bit(pipeline: Pipeline, sidecars: bool) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        written = write_pipeline(Path(scratch) / "checkpoint", pipeline, sidecars=sidecars)
        consolidate(written.folder, Path(scratch) / "out")
        require_equal(consolidated(Path(scratch) / "out"), written.expected)


@pytest.mark.parametrize("shard_bytes", [1, 40, 100, 10_000])
def test_weights_split_into_several_files_equal_those_in_one_file(
    write_checkpoint: Callable[..., Any], tmp_path: Path, shard_bytes: int
) -> None:
    written = write_checkpoint(groups=[[(5, 3), (7,), (40,)], [(4,), (2, 2)]])
    weights = consolidate(written.folder, tmp_path / "out", shard_bytes=shard_bytes)
    names = [name for name in weights.files if name.endswith(".safetensors")]
    require_equal(consolidated(tmp_path / "out"), written.expected)
    assert ("model.safetensors.index.json" in weights.files) == (len(names) > 1)
    for name in names:
        held = load_file(tmp_path / "out" / name)
        assert len(held) == 1 or sum(tensor.nbytes for tensor in held.values()) <= shard_bytes


def test_the_record_counts_tied_parameters_once_and_buffers_not_as_parameters(
    write_checkpoint: Callable[..., Any], tmp_path: Path
) -> None:
    written = write_checkpoint(groups=[[(5, 3)], [(4,)]], frozen=[(2, 2)], buffers=1, ties=1, sidecars=True)
    weights = consolidate(written.folder, tmp_path / "out")
    assert weights.counts == {"parameters": 15 + 4 + 4, "tensors": 4, "bytes": 4 * 23 + 8 * 3, "step": 7}
    assert Weights.load(tmp_path / "out") == weights
    weights.verify()


def test_tensors_larger_than_the_copy_buffer_are_written_completely(
    write_checkpoint: Callable[..., Any], tmp_path: Path
) -> None:
    written = write_checkpoint(groups=[[(3_000_001,), (700, 3001)]], ranks=3, frozen=[(2_500_000, 2)])
    seen: list[int] = []
    weights = consolidate(written.folder, tmp_path / "out", progress=lambda _what, done, _total: seen.append(done))
    require_equal(consolidated(tmp_path / "out"), written.expected)
    weights.verify()
    assert seen == sorted(seen)
    assert seen[-1] == weights.counts["bytes"]


def test_transposed_weights_are_written_in_row_major_order(
    write_checkpoint: Callable[..., Any], tmp_path: Path
) -> None:
    written = write_checkpoint(frozen=[(4, 3, 2)])
    path = written.tag / "mp_rank_00_model_states.pt"
    model = torch.load(path, weights_only=False)  # a file that this test wrote
    frozen = model["module"]["frozen0"].permute(2, 0, 1)
    model["module"]["frozen0"] = frozen
    model["module"]["buffer"] = torch.arange(5).expand(3, 5)
    model["buffer_names"] = ["buffer"]
    torch.save(model, path)
    consolidate(written.folder, tmp_path / "out")
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert torch.equal(file.get_tensor("frozen0"), frozen.contiguous().float())
        assert torch.equal(file.get_tensor("buffer"), torch.arange(5).expand(3, 5))


def test_zero_0_in_fp32_uses_the_modules_own_weights(tmp_path: Path) -> None:
    module, optimizer = {"a": torch.randn(5, 3), "b": torch.randn(4)}, {"state": {}, "param_groups": []}
    model = {"module": module, "buffer_names": [], "optimizer": optimizer, "global_steps": 1, "dp_world_size": 2}
    (tmp_path / "in/step").mkdir(parents=True)
    torch.save(model, tmp_path / "in/step/mp_rank_00_model_states.pt")
    consolidate(tmp_path / "in/step", tmp_path / "out")
    require_equal(consolidated(tmp_path / "out"), module)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_excluded_frozen_tied_weight_is_written_under_an_alias_that_has_its_values(
    write_checkpoint: Callable[..., Any], tmp_path: Path, stage: int
) -> None:
    """With ``exclude_frozen_parameters``, DeepSpeed deletes only the first name.

    The aliases stay, with values at ZeRO 1 and 2, and empty at ZeRO 3.
    """
    written = write_checkpoint(stage=stage, frozen=[(3, 2)])
    owner = "frozen0"
    weight = written.expected.pop(owner).bfloat16()
    kept = torch.empty(0, dtype=torch.bfloat16) if stage == 3 else weight
    for path in written.tag.glob("*model_states.pt"):
        model = torch.load(path, weights_only=False)  # a file that this test wrote
        del model["module"][owner]
        model["module"] |= {"alias": kept, "other": kept}
        model |= {"frozen_param_shapes": None, "frozen_param_fragments": None}
        torch.save(model | {"shared_params": {"alias": owner, "other": owner}}, path)
    consolidate(written.folder, tmp_path / "out")
    expected = written.expected if stage == 3 else written.expected | {"alias": weight.float()}
    require_equal(consolidated(tmp_path / "out"), expected)


LAYER = "layer_02-model_states.pt"


def tag_with(folder: Path, embedding: tuple[int, int], **more: Any) -> Path:
    """A pipeline of two stages. ``more`` adds tensors to the file of its last layer, or replaces its ``w0``."""
    layers = Pipeline([[[(3, 2)]], [[(4,)]]], Layout((), stage=1), embedding=embedding)
    tag = write_pipeline(folder, layers, sidecars=False).tag
    torch.save(torch.load(tag / LAYER) | more, tag / LAYER)
    return tag


def test_a_large_tied_weight_is_never_held_in_memory_whole(tmp_path: Path) -> None:
    embedding = (2000, 3000)
    weight = torch.load(tag_with(tmp_path / "first", embedding) / "layer_00-model_states.pt")["weight"]
    tag = tag_with(tmp_path / "second", embedding, tie=weight.clone())
    tracemalloc.start()
    try:
        consolidate(tag, tmp_path / "out")
        assert tracemalloc.get_traced_memory()[1] < 0.9 * weight.nbytes
    finally:
        tracemalloc.stop()
    assert "2.tie" not in consolidated(tmp_path / "out")


def test_different_parts_of_one_storage_are_not_taken_for_tied_weights(tmp_path: Path) -> None:
    w0 = torch.load(tag_with(tmp_path / "first", (5, 3)) / LAYER)["w0"]
    parts = torch.stack([torch.zeros(4), w0.float(), torch.arange(4.0)]).bfloat16()
    consolidate(tag_with(tmp_path / "second", (5, 3), w0=parts[1], frozen=parts[2]), tmp_path / "out")
    assert torch.equal(consolidated(tmp_path / "out")["2.frozen"], torch.arange(4.0))
