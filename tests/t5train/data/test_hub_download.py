"""Text of a dataset of the Hugging Face Hub, read from a server that behaves like the Hub."""

import io
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from tests.support.hub_server import REPOSITORY, Hub, serving_hub
from tests.support.hub_texts import build_one

TEXT = {"source": f"hf://datasets/{REPOSITORY}@main/data/train-*.parquet", "workers": 1}


def parquet(number: int) -> bytes:
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": [f"text {number} {row}" for row in range(400)]}), file)
    return file.getvalue()


@pytest.mark.slow
def test_files_of_a_dataset_are_downloaded_compared_with_the_hubs_digests_and_used_offline(tmp_path: Path) -> None:
    files = {f"data/train-{number:05d}.parquet": parquet(number) for number in range(3)}
    first = next(iter(files))
    with serving_hub(Hub(files)) as hub:
        hub.sent[first] = bytes([*files[first][:-200], files[first][-200] ^ 1, *files[first][-199:]])
        said = build_one(hub, tmp_path, TEXT)["error"]
        assert f"{first} was downloaded twice, and both times its sha256 was not" in said
        hub.sent.clear()
        hub.downloads.clear()
        made = build_one(hub, tmp_path, TEXT)
        assert made["counts"]["passages"] == 1200
        assert set(hub.downloads) == set(files)
        hub.downloads.clear()
        assert build_one(hub, tmp_path, TEXT) == made
        assert not hub.downloads
    assert build_one(hub, tmp_path, TEXT, offline="HF_HUB_OFFLINE") == made
    said = build_one(hub, tmp_path / "other", TEXT, offline="HF_HUB_OFFLINE")["error"]
    assert "does not allow downloading it" in said
