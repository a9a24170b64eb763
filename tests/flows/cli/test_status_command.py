"""`t5-pretrain status`: a table that fits a terminal, lines and JSON for other programs, and the story of one run."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.cells import cell_len

from flows.cli.status_command import show_runs, table_lines
from infra.head.launch.held_run import hold_run
from infra.head.runs.run_state import RunState, State
from t5train.errors import LaunchError
from t5train.spec.recipes import recipe

STATE_KEYS = [
    *("name", "folder", "state", "stage", "error", "step", "num_steps", "resumable_step", "loss"),
    *("tokens_per_second", "seconds_left", "seconds_since_activity", "holder", "published"),
]
STORY_KEYS = [
    *("recipe", "settings", "source", "tokens", "pairs", "last_start", "attempts", "checkpoints", "losses", "reports"),
    *("certificate", "next_command", "faults"),
]
ERROR = "rank 1 of 2 was killed by SIGKILL: check `dmesg` for the OOM killer.\nIts output ends:\n  " + "x" * 200
RUNNING = RunState(
    "base-1a2b3c4d",
    Path("/data/runs/base-1a2b3c4d"),
    State.RUNNING,
    stage="Train: saving",
    step=1200,
    num_steps=65536,
    resumable_step=1000,
    loss=3.21,
    tokens_per_second=12345.6,
    seconds_left=7800.0,
    seconds_since_activity=3.0,
)
FAILED = replace(RUNNING, name="n" * 80, state=State.FAILED, error=ERROR, tokens_per_second=None, seconds_left=None)
PUBLISHED = replace(RUNNING, name="モデル", state=State.PUBLISHED, published="s3://bucket/model")
NEW = RunState("new", Path("/data/runs/new"), State.NOT_BEGUN)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    spec = recipe("smoke", {"name": "mine", "optimizer.num_steps": 60, "storage.root": str(tmp_path / "work")})
    spec.run_folder.mkdir(parents=True)
    begun = {"fingerprint": "f" * 64, "spec": spec.model_dump(mode="json")}
    (spec.run_folder / "run.json").write_text(json.dumps(begun))
    (spec.run_folder / "metrics.jsonl").write_text('{"step": 8, "loss": 4.125}\n{"step": 9, "lo')
    with pytest.raises(LaunchError), hold_run(spec.run_folder):
        raise LaunchError(ERROR)
    return spec.run_folder


def test_a_pipe_gets_a_header_and_one_line_for_each_run_with_tabs(printed: Callable[..., str], run: Path) -> None:
    header, row = (line.split("\t") for line in printed("status").splitlines())
    assert header == ["name", "state", "step", "resumes at", "training loss", "tokens/s", "left", "active", "note"]
    assert row[:7] == ["mine", "failed", "8 of 60", "-", "4.1250", "-", "-"]
    assert row[7].endswith(" s ago")
    assert row[8] == " ".join(ERROR.split()), "the whole error, in one line"


def test_the_table_fits_100_columns_aligned_and_with_numbers_to_the_right(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")
    show_runs([RUNNING, FAILED, PUBLISHED, NEW])
    header, running, doing, failed, error, published, where, new = capsys.readouterr().out.splitlines()
    assert all(cell_len(line) <= 100 for line in (header, running, failed, error, published, new))
    for column in ("step", "resumes at", "training loss", "tokens/s", "left"):
        end = header.index(column) + len(column)
        assert running[end - 1] != " ", column
        assert running[end : end + 1] in {"", " "}, column
        assert new[end - 1] == "-", column
    assert running.split()[:9] == [
        "base-1a2b3c4d",
        "running",
        "1,200",
        "of",
        "65,536",
        "1,000",
        "3.2100",
        "12,346",
        "2",
    ]
    assert (doing.strip(), where.strip()) == ("Train: saving", "s3://bucket/model")
    assert error.startswith("    rank 1 of 2 was killed by SIGKILL: check `dmesg` for the OOM killer. Its output")
    assert error.endswith("…")
    assert failed.startswith("nnnn")
    assert "… " in failed, "the name is shortened, because it is all that can be"


def test_a_run_that_ended_early_says_so(printed: Callable[..., str], run: Path) -> None:
    (run / "manifest.json").write_text("{}")
    with hold_run(run):
        pass
    row = printed("status").splitlines()[1].split("\t")
    assert (row[1], row[2], row[-1]) == ("trained", "8 of 60", "training ended early")
    assert "step          8 of 60, where training ended early\n" in printed("status", "mine")


def test_a_narrow_terminal_shortens_every_line() -> None:
    row = ("n" * 80, "failed", "1,200 of 65,536", "1,000", "3.2100", "-", "-", "3 s ago", "an error " * 20)
    assert all(cell_len(line) <= 40 for line in table_lines([row], 40))


def test_json_has_the_documented_keys_and_plain_values(printed: Callable[..., str], run: Path) -> None:
    found = json.loads(printed("status", "--json"))
    assert [*found] == ["schema_version", "root", "runs"]
    assert found["schema_version"] == 1
    (state,) = found["runs"]
    assert [*state] == STATE_KEYS
    assert (state["state"], state["step"], state["error"], state["folder"]) == ("failed", 8, ERROR, str(run))
    story = json.loads(printed("status", "mine", "--json"))
    assert [*story] == ["schema_version", *STATE_KEYS, *STORY_KEYS]
    assert story["last_start"]["how"] == "failed"
    assert story["settings"] == {"optimizer.num_steps": 60}


def test_before_the_first_run_there_are_no_runs_under_the_default_root(
    printed: Callable[..., str], tmp_path: Path
) -> None:
    assert json.loads(printed("status", "--json"))["runs"] == []
    assert printed("status") == f"no runs yet under {tmp_path / 'work'}; --root names another folder\n"


def test_a_root_that_was_named_and_does_not_exist_is_an_error(refused: Callable[..., str], tmp_path: Path) -> None:
    for command in (("status",), ("status", "--json"), ("status", "mine"), ("gc",), ("gc", "--json")):
        said = refused(4, *command, "--root", "wrok")
        assert said.startswith(f"error: --root is wrok, but there is no folder {tmp_path / 'wrok'}. Give the --root")


def test_the_story_of_a_run_has_the_whole_error_and_the_command_that_continues(
    printed: Callable[..., str], run: Path
) -> None:
    for named in ("mine", str(run)):
        lines = printed("status", named).splitlines()
        assert lines[0] == "mine: failed"
        error = lines.index("what went wrong") + 1
        assert lines[error : error + 3] == [f"  {line}" for line in ERROR.splitlines()]
        assert lines[lines.index("settings that differ from the recipe") + 1] == "  optimizer.num_steps=60"
        assert "  step          8 of 60" in lines
        assert lines[-2] == "to continue"
        assert lines[-1].startswith("  ")


def test_an_unknown_run_is_an_error_with_the_nearest_name(refused: Callable[..., str], run: Path) -> None:
    assert re.search(r"there is no run 'mime'.*did you mean 'mine'\?", refused(4, "status", "mime"))
