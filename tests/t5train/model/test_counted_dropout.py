"""Masks of dropout by counters: pure, of the right share, and independent of each other."""

import numpy as np
import pytest
import torch
from torch import Tensor

from t5train.data.samples import keyed_random
from t5train.model.counted_dropout import CountedDropout, branch, dropped

KEYS = torch.from_numpy(keyed_random.keys(7, np.arange(512)).view(np.int64))
GOLDEN = ["1110001101011111", "1000011000101001", "0110010110100010", "1111101101010001"]


def _mask(keys: Tensor, rate: float = 0.5, columns: int = 256) -> Tensor:
    """1 where a value is dropped, and 0 elsewhere."""
    return (dropped(torch.ones(len(keys), columns), rate, keys, torch.arange(columns, dtype=torch.int32)) == 0).double()


def _correlation(one: Tensor, other: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([one.flatten(), other.flatten()]))[0, 1])


def test_keys_branch_as_keyed_random_does() -> None:
    expected = keyed_random.keys(7, np.arange(512), 3).view(np.int64)
    assert branch(KEYS, 3).tolist() == expected.tolist()


def test_a_mask_never_changes() -> None:
    """Runs that were started with one version go on with the next."""
    columns = torch.arange(16, dtype=torch.int32)
    kept = dropped(torch.ones(4, 16), 0.5, KEYS[:4], columns).bool().int()
    assert ["".join(map(str, row)) for row in kept.tolist()] == GOLDEN


@pytest.mark.parametrize("rate", [0.05, 0.1, 0.5, 0.9])
def test_the_share_of_dropped_values_is_the_rate_and_the_mean_stays(rate: float) -> None:
    mask = _mask(KEYS, rate)
    deviation = (rate * (1 - rate)) ** 0.5
    assert abs(float(mask.mean()) - rate) < 4 * deviation / mask.numel() ** 0.5
    assert float((mask.mean(0) - rate).abs().max()) < 5 * deviation / len(mask) ** 0.5
    assert float((mask.mean(1) - rate).abs().max()) < 5 * deviation / mask.shape[1] ** 0.5
    scaled = CountedDropout(rate)(torch.full((512, 256), 3.0), KEYS)
    assert scaled.unique().tolist() == pytest.approx([0, 3 / (1 - rate)])


def test_masks_of_other_tokens_features_and_places_are_independent() -> None:
    mask, bound = _mask(KEYS), 4 / (512 * 256) ** 0.5
    others = {
        "next token": mask.roll(1, 0),
        "next feature": mask.roll(1, 1),
        "another place": _mask(branch(KEYS, 0)),
        "other places": _mask(branch(KEYS, 1)),
        "low half of the key": _mask(KEYS ^ 1),
        "high half of the key": _mask(KEYS ^ (1 << 40)),
    }
    correlations = {name: _correlation(mask, other) for name, other in others.items()}
    assert {name: each for name, each in correlations.items() if abs(each) > bound} == {}


def test_without_keys_and_in_evaluation_it_is_torchs_dropout() -> None:
    layer, values = CountedDropout(0.3), torch.rand(4, 8)
    torch.manual_seed(1)
    drawn = layer(values)
    torch.manual_seed(1)
    assert torch.equal(drawn, torch.nn.functional.dropout(values, 0.3))
    assert torch.equal(layer.eval()(values, KEYS[:4]), values)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
def test_compiled_code_draws_the_same_mask() -> None:
    compiled = torch.compile(_mask, fullgraph=True)
    assert torch.equal(compiled(KEYS, 0.1), _mask(KEYS, 0.1))
