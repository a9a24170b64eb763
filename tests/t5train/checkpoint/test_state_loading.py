from pathlib import Path

import torch
from torch import nn

from t5train.checkpoint.state_loading import fill_of
from t5train.model.model_shape import resolve
from t5train.spec.rank_job import TrainJob
from t5train.spec.recipes import recipe


def test_weights_that_a_checkpoint_replaces_are_not_drawn_and_a_forgotten_one_would_make_the_loss_nan(
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
