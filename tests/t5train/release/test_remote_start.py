"""Models to start from that are on the Hub, asked for by processes of their own, as its client reads its URL once."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from secrets import token_hex

import pytest

from t5train.files.output_folder import DOWNLOADED
from t5train.records.stage_records import StartingModelFiles
from tests.support.hub_models import START, model_hub, prepared_site, printed_by
from tests.support.hub_server import Hub, HubSite

BEGIN = """
import sys
from pathlib import Path

from t5train.data.download import downloads
from t5train.errors import T5TrainError
from t5train.release.remote_start import begin, complete

downloads.BLOCK_BYTES, downloads.CONNECTIONS = 1 << 16, 1  # requests come in order
try:
    folder = begin(sys.argv[1], Path(sys.argv[2]))
    print(folder)
    if "complete" in sys.argv:
        complete(folder)
except T5TrainError as error:
    print(f"{type(error).__name__}: {error}")
"""
ONE = {
    "config.json": b"{}",
    "spiece.model": b"pieces",
    "tokenizer_config.json": b"{}",
    "model.safetensors": b"weights" * 999,
    "pytorch_model.bin": b"code",
    "README.md": b"card",
    "runs/config.json": b"{}",
}
INDEX = json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-1.safetensors"}})
SHARDED = {
    "config.json": b"{}",
    "model.safetensors.index.json": INDEX.encode(),
    **{f"model-{number}.safetensors": bytes([number]) * 5000 for number in (1, 2, 3)},
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[HubSite, str]]:
    with prepared_site(tmp_path_factory.mktemp("python"), ["t5train.release.remote_start"]) as prepared:
        yield prepared


@pytest.fixture
def hub(site: tuple[HubSite, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setattr(sys, "executable", site[1])
    with site[0].serving(model_hub(dict(ONE))) as hub:
        yield hub


def begun(hub: Hub, root: Path, start: str = START, *steps: str, **variables: str) -> str:
    return printed_by(BEGIN, hub, root, start, str(root), *steps, **variables)


def copied(folder: str) -> dict[str, bytes]:
    made = {"remote-start.json", "manifest.json"}
    paths = [path for path in Path(folder).iterdir() if path.name[0] != "." and not path.name.endswith(DOWNLOADED)]
    return {path.name: path.read_bytes() for path in paths if path.name not in made}


def test_the_weights_come_last_and_all_stays_at_one_commit_offline(hub: Hub, tmp_path: Path) -> None:
    wanted = {name: ONE[name] for name in ("config.json", "spiece.model", "tokenizer_config.json", "model.safetensors")}
    folder = begun(hub, tmp_path)
    assert folder == str(tmp_path / "starts" / f"someone--t5@{hub.main}")
    assert copied(folder).keys() == wanted.keys() - {"model.safetensors"}
    first = hub.main
    hub.commit(ONE | {"model.safetensors": b"later"})
    assert begun(hub, tmp_path, START, "complete") == folder
    record = StartingModelFiles.load(Path(folder))
    record.verify()
    assert record.files.keys() == wanted.keys()
    assert record.inputs == {"revision": first}
    assert copied(folder) == wanted
    hub.requests.clear()
    for start in (START, f"{START}@{first}"):
        assert begun(hub, tmp_path, start, "complete", HF_HUB_OFFLINE="1") == folder
    assert not hub.requests
    assert begun(hub, tmp_path / "other").endswith(hub.main)
    assert begun(hub, tmp_path / "another", f"{START}@{first}").endswith(first)
    assert "HF_HUB_OFFLINE does not allow" in begun(hub, tmp_path / "offline", HF_HUB_OFFLINE="1")


def test_of_weights_in_several_files_those_in_the_index_are_copied(hub: Hub, tmp_path: Path) -> None:
    hub.commit(SHARDED)
    folder = begun(hub, tmp_path, START, "complete")
    assert copied(folder).keys() == SHARDED.keys() - {"model-3.safetensors"}
    hub.commit({name: content for name, content in SHARDED.items() if name != "model-2.safetensors"})
    assert "lacks the weight file model-2.safetensors" in begun(hub, tmp_path / "other")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_file_that_arrives_changed_is_refused_and_copied_again(hub: Hub, tmp_path: Path, name: str) -> None:
    hub.sent[name] = bytes([ONE[name][0] ^ 1, *ONE[name][1:]])
    said = begun(hub, tmp_path, START, "complete").splitlines()[-1]
    assert ("Git blob id" if name.endswith("json") else "both times its sha256 was not") in said
    hub.sent.clear()
    StartingModelFiles.load(Path(begun(hub, tmp_path, START, "complete"))).verify()


def test_weights_that_were_cut_off_continue_where_they_ended(hub: Hub, tmp_path: Path) -> None:
    size = 300_000
    hub.commit(ONE | {"model.safetensors": bytes(size)})
    requests = []

    def status(path: str) -> int:
        requests.append(path)
        return 404 if path == "model.safetensors" and requests.count(path) == 4 else 206

    hub.status = status
    assert "cannot be downloaded" in begun(hub, tmp_path, START, "complete")
    before = hub.bytes_sent
    StartingModelFiles.load(Path(begun(hub, tmp_path, START, "complete"))).verify()
    assert hub.bytes_sent - before < size - (2 << 16)


def test_a_private_model_is_read_with_a_token_that_is_not_stored(hub: Hub, tmp_path: Path) -> None:
    token = hub.token = token_hex(20)
    assert "no such model, or it is private. Check the name; for a private model, set HF_TOKEN" in begun(hub, tmp_path)
    folder = begun(hub, tmp_path, START, "complete", HF_TOKEN=token)
    StartingModelFiles.load(Path(folder)).verify()
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and token.encode() in path.read_bytes()]


@pytest.mark.parametrize(
    ("start", "said"),
    [
        ("hf://someone/t6", "has no such model|no such model, or it is private"),
        (f"{START}@v9", "hf://someone/t5@v9, but the model has no such commit, tag or branch"),
    ],
)
def test_what_the_hub_does_not_have_is_named(hub: Hub, tmp_path: Path, start: str, said: str) -> None:
    assert any(each in begun(hub, tmp_path, start) for each in said.split("|"))


def test_a_model_with_pickles_only_is_refused_before_anything_is_copied(hub: Hub, tmp_path: Path) -> None:
    hub.commit({name: content for name, content in ONE.items() if name != "model.safetensors"})
    said = begun(hub, tmp_path)
    assert "no model.safetensors. Other weights, such as pytorch_model.bin, can run code" in said
    assert "save it with save_pretrained to a folder" in said
    assert not hub.downloads
