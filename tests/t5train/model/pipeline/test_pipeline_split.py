"""The stages of a pipeline are as even as whole layers allow."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from t5train.data.samples.span_corruption import geometry
from t5train.errors import SpecError
from t5train.model.model_shape import T5Shape, count_parameters, resolve
from t5train.model.pipeline.pipeline_split import balanced, stage_bounds, stage_parameters, unit_costs
from t5train.spec import ModelSpec, ObjectiveSpec

SAMPLE = geometry(ObjectiveSpec())


def _base(**settings: object) -> T5Shape:
    return resolve(ModelSpec.model_validate({"preset": "base", **settings}), 32100)


@given(costs=st.lists(st.integers(0, 50), min_size=1, max_size=9), data=st.data())
def test_the_split_minimises_the_cost_of_the_costliest_stage(costs: list[int], data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, len(costs)))
    bounds = balanced(costs, parts)
    assert (bounds[0], bounds[-1], len(bounds)) == (0, len(costs), parts + 1)
    assert all(start < stop for start, stop in pairwise(bounds))
    cuts = [(0, *inner, len(costs)) for inner in combinations(range(1, len(costs)), parts - 1)]
    assert _costliest(costs, bounds) == min(_costliest(costs, cut) for cut in cuts)


def _costliest(costs: list[int], bounds: list[int] | tuple[int, ...]) -> int:
    return max(sum(costs[start:stop]) for start, stop in pairwise(bounds))


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
def test_stages_of_the_base_model_have_similar_costs(stages: int) -> None:
    costs = unit_costs(_base(), SAMPLE)
    assert _costliest(costs, stage_bounds(_base(), stages, SAMPLE)) < 1.25 * sum(costs) / stages


def test_the_split_counts_decoder_layers_as_cheaper_than_encoder_layers() -> None:
    assert stage_bounds(_base(), 2, SAMPLE)[1] < 12
    assert stage_bounds(_base(num_decoder_layers=36), 2, SAMPLE)[1] > 12


def test_more_stages_than_layers_are_refused_with_both_numbers() -> None:
    shape = _base(num_layers=1, num_decoder_layers=2)
    assert stage_bounds(shape, 4, SAMPLE) == [0, 1, 2, 3, 4]
    with pytest.raises(SpecError, match=r"pipeline_stages is 5: the model can be split into at most 4 stages"):
        stage_bounds(shape, 5, SAMPLE)


@pytest.mark.parametrize("version", ["v1.0", "v1.1"])
def test_stages_add_up_to_the_model_plus_a_copy_of_a_tied_embedding(version: str) -> None:
    shape = _base(version=version)
    assert stage_parameters(shape, 1, SAMPLE) == [count_parameters(shape)]
    first, last = stage_parameters(shape, 2, SAMPLE)
    copies = first + last - count_parameters(shape)
    assert copies - shape.tied * shape.vocab_size * shape.d_model < 10_000  # biases and norms
