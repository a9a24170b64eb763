"""Checkpoints saved with ``exclude_frozen_parameters``, as is usual for adapters."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from t5train.checkpoint.consolidate import consolidate


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_excluded_frozen_tied_weight_is_written_under_an_alias_that_has_its_values(
    write_checkpoint: Callable[..., Any], tmp_path: Path, stage: int
) -> None:
    """DeepSpeed deletes only the first name. The aliases stay, with values at ZeRO 1 and 2, and empty at ZeRO 3."""
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
    found = load_file(tmp_path / "out" / "model.safetensors")
    expected = written.expected if stage == 3 else written.expected | {"alias": weight.float()}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
