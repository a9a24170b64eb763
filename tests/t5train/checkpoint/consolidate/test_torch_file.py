"""The structure of a torch checkpoint file is read without running any of its code."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from t5train.checkpoint.consolidate.torch_file import StoredTensor, read_metadata
from t5train.errors import IncompleteCheckpoint


class PickledLikePython3112Enum:
    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, str]]:
        return getattr, ("the class", "upper")


def test_an_enum_pickled_by_early_python_3_11_is_skipped_without_attribute_lookup(tmp_path: Path) -> None:
    file = tmp_path / "optim_states.pt"
    torch.save({"zero_stage": PickledLikePython3112Enum(), "weight": torch.arange(6.0)}, file)
    content = read_metadata(file)
    assert isinstance(content["weight"], StoredTensor)
    assert content["weight"].shape == (6,)
    assert not callable(content["zero_stage"])


def test_a_changed_name_is_detected_by_the_checksum_that_torch_ignores(tmp_path: Path) -> None:
    file = tmp_path / "model_states.pt"
    torch.save({"layer0.weight0": torch.arange(6.0)}, file)
    content = file.read_bytes()
    file.write_bytes(content.replace(b"layer0.weight0", b"layer0.weight1"))
    assert "layer0.weight1" in torch.load(file)
    with pytest.raises(IncompleteCheckpoint, match=r"Bad CRC-32 for file .model_states/data\.pkl"):
        read_metadata(file)
