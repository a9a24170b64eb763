import math
from pathlib import Path

import pytest
import torch
from torch import nn

from t5train.checkpoint import state_loading
from t5train.checkpoint.state_loading import fill_of, require_replaced
from t5train.engine.optimizer import Segment
from t5train.errors import IncompleteCheckpoint
from t5train.model.model_shape import resolve
from t5train.spec.rank_job import TrainJob
from t5train.spec.recipes import recipe


def test_weights_that_a_checkpoint_replaces_are_not_drawn_but_set_to_nan(
    tmp_path: Path,
) -> None:
    new = TrainJob(
        spec=recipe("smoke"), run_fingerprint="0" * 64, resume_tag=None, run_folder=tmp_path, shards_folder=tmp_path
    )
    shape, parameter = resolve(new.spec.model, 512), nn.Parameter(torch.zeros(4, 8))
    fill_of(new.model_copy(update={"resume_tag": "step-00000002"}), shape, None)("shared.weight", parameter)
    assert parameter.isnan().all()
    fill_of(new, shape, None)("shared.weight", parameter)
    assert parameter.isfinite().all()


@pytest.mark.parametrize("forgotten", ["model.bias", "a.master"])
def test_a_weight_or_a_master_that_the_checkpoint_did_not_replace_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forgotten: str
) -> None:
    model, flat = nn.ModuleDict({"model": nn.Linear(4, 2)}), torch.ones(8)
    flat[7] = math.nan  # padding
    monkeypatch.setattr(state_loading, "model_of", lambda _: model)
    monkeypatch.setattr(state_loading, "_held", lambda _: iter([(flat, [("a.master", Segment(2, 7, 0, 5, 0))])]))
    require_replaced(None, tmp_path)
    with torch.no_grad():
        (flat if forgotten == "a.master" else model["model"].bias)[-2] = math.nan
    with pytest.raises(IncompleteCheckpoint, match=f"{forgotten} is NaN"):
        require_replaced(None, tmp_path)
