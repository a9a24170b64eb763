"""Whatever a host answers, it cannot make the head read or write files that were not requested."""

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from infra.head.hosts.nodes import Nodes
from infra.head.storage.checkpoint_inventory import complete_tags, survey
from infra.head.storage.gather import collect
from infra.node.channel import BrokenOff, Channel
from infra.node.storage.file_channel import fetch_over
from t5train.errors import T5TrainError
from tests.support.simulated_nodes import RUN, Site, make_sidecar


class Answering:
    """A transport on which every host gives the same answer to every request."""

    def __init__(self, folder: Path, answer: Mapping[str, Any]) -> None:
        self._answer = folder / "answer.json"
        self._answer.write_text(json.dumps(answer) + "\n")

    def command(self, host: str, argv: Sequence[str]) -> list[str]:  # noqa: ARG002 - part of Transport
        return ["sh", "-c", 'head -n 1 >/dev/null; cat "$0"', str(self._answer)]


def hostile_tags(text: str) -> dict[str, Any]:
    return {
        "../../escaped": {"sidecars": {"rank-00000.json": text}, "files": {}, "unreadable": {}},
        "step-00000008": {
            "sidecars": {"../rank-00000.json": text},
            "files": {"../x.pt": 1, "/etc/passwd": 1},
            "unreadable": {"": "Input/output error"},
        },
    }


def test_tags_and_files_with_paths_outside_the_checkpoints_are_ignored(
    site: Site, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = make_sidecar(0, 8, {}, world_size=1).model_dump_json()
    nodes = Nodes(Answering(tmp_path, {"StoredTags": {"tags": hostile_tags(text)}}), ("a",))
    found = survey(nodes, RUN, site.checkpoints).found
    assert list(found["a"]) == ["step-00000008"]
    assert not found["a"]["step-00000008"].sidecars
    assert not found["a"]["step-00000008"].files
    assert found["a"]["step-00000008"].unreadable == {"": "Input/output error"}, "of the folder itself"
    assert not complete_tags(found)
    assert "ignoring a file in the checkpoints on a: a names '../../escaped'" in caplog.text


@pytest.mark.parametrize("name", ["run.json", "../run.json", "tensorboard/../run.json"])
def test_a_host_cannot_send_files_that_were_not_requested(tmp_path: Path, name: str) -> None:
    answer = {"FileList": {"files": [{"name": name, "size": 1, "sha256": "0" * 64, "as_good": []}]}}
    with pytest.raises(T5TrainError, match=r"run\.json"):
        collect(Nodes(Answering(tmp_path, answer), ("a",)), "a", "runs/x", ["tensorboard"], tmp_path / "into")
    assert not list(tmp_path.rglob("run.json"))


@pytest.mark.parametrize(
    ("count", "words"),
    [
        *((count, "but 10 were requested") for count in (-1, 11, 1 << 40)),
        *((count, r"Chunk\.count is .*, not an integer") for count in ("many", None)),
    ],
)
def test_a_sender_cannot_send_more_bytes_than_requested(count: object, words: str) -> None:
    sent = io.BytesIO(json.dumps({"Chunk": {"count": count}}).encode() + b"\n" + b"x" * 100)
    with pytest.raises(BrokenOff, match=words):
        list(fetch_over(Channel(sent, io.BytesIO()))("a", 0, 10))
