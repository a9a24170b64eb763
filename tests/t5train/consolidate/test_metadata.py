"""The structure of a torch checkpoint file is read without running anything that it asks for."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from t5train.consolidate.metadata import StoredTensor, read_metadata


class PickledAsPython3112PicklesEnums:
    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, str]]:
        return getattr, ("the class", "upper")


def test_an_enum_of_an_early_python_3_11_is_read_past_and_no_attribute_is_looked_up(tmp_path: Path) -> None:
    file = tmp_path / "optim_states.pt"
    torch.save({"zero_stage": PickledAsPython3112PicklesEnums(), "weight": torch.arange(6.0)}, file)
    content = read_metadata(file)
    assert isinstance(content["weight"], StoredTensor)
    assert content["weight"].shape == (6,)
    assert not callable(content["zero_stage"])
