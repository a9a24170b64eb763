"""After Ctrl-C or SIGTERM, the last lines name the checkpoint and the command that continues the run."""

import json
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from flows.cli import stage_commands
from flows.cli.interruption import explaining_interruption
from infra.head.runs.run_state import what_is_saved
from infra.head.stop_signal import Stopped
from t5train.checkpoint import sidecar
from t5train.records.best_so_far import BestSoFar
from t5train.spec.recipes import recipe
from tests.support.simulated_nodes import make_sidecar


@pytest.fixture(autouse=True)
def typed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the user typed. To begin again would give up the checkpoint."""
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(sys, "argv", [".venv/bin/t5-pretrain", "run", "smoke", "--begin-again", "--name", "my run"])


@pytest.mark.parametrize("signal", [KeyboardInterrupt(), Stopped(), BaseExceptionGroup("", [KeyboardInterrupt()])])
def test_an_interrupted_run_names_its_checkpoint_and_how_to_continue(
    tmp_path: Path,
    record_only_rank: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
    signal: BaseException,
) -> None:
    tag = tmp_path / "checkpoints/step-00000003"
    tag.mkdir(parents=True)
    record_only_rank(tag, [], [])
    with pytest.raises(type(signal)), explaining_interruption(tmp_path, 400):
        raise signal
    assert capsys.readouterr().err == (
        f"training resumes after step 3, from {tag}\nto continue: .venv/bin/t5-pretrain run smoke --name 'my run'\n"
    )
    with pytest.raises(type(signal)), explaining_interruption(tmp_path, 3):
        raise signal
    assert "training is done, up to step 3; the next start gathers its result" in capsys.readouterr().err


@pytest.mark.parametrize(("validations_since", "is_done"), [(1, False), (2, True)])
def test_a_run_that_is_interrupted_after_it_ended_early_is_not_said_to_train_again(
    tmp_path: Path, validations_since: int, is_done: bool
) -> None:
    spec = recipe("smoke", {"evaluate.best_metric": "validation_loss", "evaluate.patience": 2})
    (tmp_path / "run.json").write_text(json.dumps({"spec": spec.model_dump(mode="json")}))
    tag = tmp_path / "checkpoints/step-00000003"
    tag.mkdir(parents=True)
    best = BestSoFar(step=1, value=0.5, validations_since=validations_since)
    sidecar.write(tag, make_sidecar(0, 3, {}, world_size=1, best=best))
    said = what_is_saved(tmp_path, 400)
    assert said.startswith("training is done, up to step 3;" if is_done else "training resumes after step 3,")


def interrupted_in(folder: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    with pytest.raises(KeyboardInterrupt), explaining_interruption(folder, 400):
        raise KeyboardInterrupt
    return capsys.readouterr().err.splitlines()


def test_the_command_can_be_pasted_and_without_a_checkpoint_training_begins_at_step_0(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "t5-pretrain").touch(mode=0o700)
    first, command = interrupted_in(tmp_path, capsys)
    assert first == "no checkpoint was saved: finished stages are kept, and training begins at step 0"
    assert command.startswith("to continue: .venv/bin/t5-pretrain run")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert interrupted_in(tmp_path, capsys)[1].startswith("to continue: t5-pretrain run")


def test_a_failure_says_itself_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="failed"), explaining_interruption(tmp_path, 400):
        raise ValueError("failed")
    assert capsys.readouterr().err == ""


def test_prefect_does_not_call_an_interruption_a_crash(tmp_path: Path) -> None:
    log, aborted = logging.getLogger("prefect.flow_runs"), "Execution was aborted by an interrupt signal."
    said = [
        f"Crash detected! {aborted}",
        f"Finished in state Crashed('{aborted}')",
        "Crash detected! Execution was interrupted by an unexpected exception: Boom",
    ]

    def shown() -> list[str]:
        records = [log.makeRecord(log.name, logging.ERROR, "", 0, text, (), None) for text in said]
        return [record.getMessage() for record in records if log.filter(record)]

    with explaining_interruption(tmp_path, 400):
        assert shown() == said[2:]
    assert shown() == said


@pytest.mark.parametrize(
    ("words", "continued"),
    [
        (["publish", "export", "s3://models/t5"], "t5-pretrain publish export s3://models/t5"),
        (["fetch", "s3://models/t5", "my model"], "t5-pretrain fetch s3://models/t5 'my model'"),
        (["publish", "export", "sftp://me:secret@host/t5"], "repeat the same command"),
    ],
)
def test_an_interrupted_copy_names_the_command_that_continues_it(
    t5_pretrain: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    continued: str,
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(stage_commands.Export, "load", lambda _: None)
    monkeypatch.setattr(stage_commands, "check_destination", lambda _: None)
    for name in ("publish_export", "fetch_publication"):
        monkeypatch.setattr(stage_commands, name, interrupted)
    assert t5_pretrain(*words) == 130
    assert capsys.readouterr().err.endswith(f"to continue: {continued}\ninterrupted\n")


@pytest.mark.parametrize(("imported", "at_the_end"), [("sys", ""), ("prefect", "at the end\n")])
def test_an_interrupted_command_ends_before_python_does_unless_prefect_sends_its_log_then(
    imported: str, at_the_end: str
) -> None:
    program = (
        "import atexit, sys; from flows.cli import __main__, main, run_command\n"
        f"sys.modules.setdefault({imported!r}, sys)\n"
        "def interrupted(_):\n"
        "    raise KeyboardInterrupt\n"
        "run_command.show_rows = interrupted\n"
        "atexit.register(print, 'at the end')\n"
        "main()"
    )
    result = subprocess.run([sys.executable, "-c", program, "recipes"], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (130, at_the_end, "interrupted\n")


def test_an_interruption_while_the_commands_are_imported_ends_the_process_without_a_traceback() -> None:
    program = (
        "import os, signal, sys; from flows.cli import main\n"
        "class Interrupting:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'flows.cli.options':\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupting())\n"
        "main()"
    )
    result = subprocess.run([sys.executable, "-c", program, "recipes"], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "interrupted\n")
