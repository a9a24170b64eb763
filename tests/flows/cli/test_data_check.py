"""``data check`` finds what a text repeats, and removes nothing."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.documented_json import require_documented
from tests.support.generated_text import write_copies


def test_a_check_finds_copies_and_shared_text_without_removing_them(
    t5_pretrain: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text = write_copies(tmp_path / "text.jsonl")
    options = ("smoke", "--corpus", str(text), "--set", "corpus.split=[700,200,100]", "--root", str(tmp_path / "root"))
    assert t5_pretrain("data", "check", *options, "--plot", str(tmp_path / "plot.png")) == 0
    shown = capsys.readouterr().out
    assert "400 passages and 0 empty ones" in shown
    rows = {row.split("\t")[0]: row.split("\t")[1:] for row in shown.splitlines() if "\t" in row}
    assert rows["copies of an earlier passage of the split"][3] == "0"
    copies, across = (
        [int(number) for number in rows[name]]
        for name in ("copies of an earlier passage of the split", "copies between training and held-out text")
    )
    assert copies[0] > 30
    assert across[0] == across[1] + across[2] > 10
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert not list((tmp_path / "root").glob("checks/*/.compared"))
    assert t5_pretrain("data", "check", *options, "--test-set", str(text), "--json") == 0
    value = json.loads(capsys.readouterr().out)
    require_documented("data check", value)
    found = value["repetitions"]
    assert found["test_sets_passages"] == 400
    assert found["train_duplicates_across"] == found["train_passages"], "all of it is in the test set"
    assert t5_pretrain("data", "check", *options, "--test-set", str(tmp_path / "absent.txt")) == 4
    assert "corpus.test_sets" in capsys.readouterr().err
