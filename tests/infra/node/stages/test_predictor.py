"""What a host checks before it predicts, and what it leaves when it ends."""

import os
from pathlib import Path

import pytest

from infra.node import node_folders
from infra.node.channel import Channel
from infra.node.node_folders import locks_folder, scratch_folder
from infra.node.stages.makers import Makers, own_makers
from infra.node.stages.predictor import (
    PREDICTING_PACKAGES,
    FindDevice,
    FoundDevice,
    PredictParts,
    device,
    predict,
)
from infra.node.storage.disk_usage import pin, users
from t5train.errors import AcceleratorBusy, HostMisconfigured
from t5train.files.locks import try_lock
from t5train.inference.predict.devices import device_bytes

OWN = own_makers(PREDICTING_PACKAGES)


@pytest.mark.parametrize(
    ("makers", "said"),
    [
        (
            Makers(OWN.code, {**OWN.versions, "none-such": "1.2"}),
            r"^none-such missing, the head has none-such 1\.2\. .*",
        ),
        (Makers("0" * 64, OWN.versions), r"^the code of this project is not the head's.*--ship-code"),
    ],
)
def test_a_host_without_the_packages_or_the_code_of_the_head_is_refused(makers: Makers, said: str) -> None:
    with pytest.raises(HostMisconfigured, match=said):
        device(FindDevice(makers, "cpu", (0,)))


def test_a_host_has_a_device_for_each_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    assert device(FindDevice(OWN, "cpu", (0, 7))) == FoundDevice("cpu", device_bytes("cpu"))
    monkeypatch.setattr("t5train.inference.model_folder.chosen_device", lambda _: "cuda")
    monkeypatch.setattr("torch.accelerator.device_count", lambda: 4)
    with pytest.raises(HostMisconfigured, match=r"slot 7 of this host is chosen, but it has 4 of cuda\. Write slots=4"):
        device(FindDevice(OWN, None, (0, 7)))


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A scratch folder in which the head has staged a model and rows."""
    monkeypatch.setattr(node_folders, "PARENT", tmp_path)
    scratch = scratch_folder(None)
    for name in ("staged/model", "staged/rows"):
        (scratch / name).mkdir(parents=True)
        pin(scratch, name, "predict-1")
    return scratch


def ended(kind: str) -> None:
    """Predict with slots 0 and 1 for a head that closes the connection at once."""
    request = PredictParts(None, "predict-1", "os:getcwd", "staged/model", "staged/rows", kind, (0, 1))
    with open(os.devnull, "rb") as reader, open(os.devnull, "wb") as writer:
        predict(request, Channel(reader, writer))


def test_the_rows_are_removed_at_the_end_and_the_model_is_kept_for_others(scratch: Path) -> None:
    ended("cpu")
    assert [path.name for path in (scratch / "staged").iterdir()] == ["model"]
    assert not users(scratch, "staged/model")


def test_an_accelerator_in_use_is_named_with_its_holder(scratch: Path) -> None:
    with open(locks_folder() / "cuda-1.lock", "w+") as lock:
        print("attempt mine", end="", file=lock, flush=True)
        assert try_lock(lock.fileno())
        with pytest.raises(AcceleratorBusy, match=r"cuda-1 is in use by attempt mine\. .*hostfile$"):
            ended("cuda")
    assert [path.name for path in (scratch / "staged").iterdir()] == ["model"]
    ended("cuda")
    assert (locks_folder() / "cuda-0.lock").read_text().startswith("predict, process ")
