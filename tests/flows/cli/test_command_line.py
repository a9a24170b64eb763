"""The console script: its output and its exit codes."""

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flows.cli import __main__, run_command
from infra.head.preflight import run_checks
from infra.node.attempts.run_lock import run_lock
from t5train import host_resources
from t5train.errors import NotGathered, T5TrainError

HELP = """
for command in sys.argv[1:]:
    sys.argv[1:] = [command, "--help"]
    try:
        main()
    except SystemExit as ended:
        if ended.code:
            raise
"""


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt(), BaseExceptionGroup("tasks", [KeyboardInterrupt()])])
def test_ctrl_c_prints_one_line_and_exits_with_130(
    t5_pretrain: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    interrupt: BaseException,
) -> None:
    def interrupted(_: str) -> None:
        raise interrupt

    monkeypatch.setattr(run_command, "show_rows", interrupted)
    assert t5_pretrain("recipes") == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.parametrize(
    ("error", "code"), [(ValueError("a bug"), 70), (T5TrainError("no kind"), 70), (BrokenPipeError(), 141)]
)
def test_only_a_check_that_found_something_exits_with_1(
    t5_pretrain: Callable[..., int], monkeypatch: pytest.MonkeyPatch, error: Exception, code: int
) -> None:
    def fail(_: object) -> None:
        raise error

    monkeypatch.setattr(run_command, "show_rows", fail)
    monkeypatch.setattr(os, "dup2", lambda *_: None)
    assert t5_pretrain("recipes") == code


@pytest.mark.parametrize(
    ("recipe", "num_steps"), [("smoke", 50), ("moe", 20_000), ("pipeline", 20_000), ("zero3", 20_000)]
)
def test_a_dry_run_shows_the_whole_plan_and_creates_nothing(
    t5_pretrain: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    golden: Callable[[str, str], None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    recipe: str,
    num_steps: int,
) -> None:
    root = tmp_path / "root"
    _on_a_machine_with_accelerators(monkeypatch, 2)
    asked = ("--set", f"optimizer.num_steps={num_steps}", "--set", "corpus.source=pydocs")
    assert t5_pretrain("run", recipe, "--dry-run", "--root", str(root), *asked) == 0
    output = capsys.readouterr().out.replace(str(root), "{root}").replace(sys.executable, "{python}")
    golden(f"{recipe}.dry-run", output)
    assert t5_pretrain("run", recipe, "--dry-run", "--json", "--root", str(root), *asked) == 0
    as_json = json.loads(capsys.readouterr().out)
    golden(f"{recipe}.deepspeed-config", json.dumps(as_json["deepspeed_config"], indent=1) + "\n")
    assert list(tmp_path.iterdir()) == []


def _on_a_machine_with_accelerators(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Let checks find accelerators, ample memory and disk space."""
    monkeypatch.setattr(run_checks, "can_have_any", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
    monkeypatch.setattr(host_resources, "host_memory_bytes", lambda: 10**12)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10**12))


def test_a_dry_run_says_first_that_the_machine_has_no_accelerator_and_describes_the_run(
    t5_pretrain: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert t5_pretrain("run", "base", "--dry-run", "--root", str(tmp_path / "root")) == 2
    output = capsys.readouterr()
    assert output.out.startswith("# would be refused\nthis machine has no GPU")
    assert "\n# memory of a rank" in output.out
    assert output.err.startswith("error: this machine has no GPU")
    assert t5_pretrain("run", "base", "--root", str(tmp_path / "root")) == 2
    assert capsys.readouterr().err == output.err, "a run is refused for the same reason"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_stage_commands_work_without_prefect(run_without: Callable[..., Any], tmp_path: Path) -> None:
    text = "\n".join(json.dumps({"id": str(number), "text": f"line {number} of a text"}) for number in range(200))
    (tmp_path / "text.jsonl").write_text(text + "\n")
    arguments = ("corpus", "--corpus", str(tmp_path / "text.jsonl"), "--root", str(tmp_path / "root"))
    made = run_without("prefect", *arguments)
    assert made.stdout.startswith("corpus: "), made.stderr
    folder = made.stdout.split()[1]
    assert "(reused)" in run_without("prefect", *arguments).stdout
    verified = run_without("prefect", "verify", folder)
    assert verified.stdout.startswith("verified: corpus"), verified.stderr
    commands = ("tokenizer", "tokenize", "train", "consolidate", "export", "certify", "publish", "status", "rm")
    helped = run_without("prefect", *commands, calls=HELP)
    assert helped.returncode == 0, helped.stderr
    assert all(f"Usage: t5-pretrain {command} " in helped.stdout for command in commands)
    assert run_without("prefect", "status").returncode == 0


@pytest.mark.parametrize("place", ["work/published/mine", "work/runs/mine", "work/runs/mine/export"])
def test_a_result_of_a_run_that_has_not_finished_is_refused_with_what_to_do(
    refused: Callable[..., str], tmp_path: Path, place: str
) -> None:
    run = tmp_path / "work" / "runs" / "mine"
    run.mkdir(parents=True)
    (run / "run.json").write_text('{"spec": {"optimizer": {"num_steps": 60}}}')
    (run / "metrics.jsonl").write_text('{"step": 8, "loss": 4.125}\n')
    shows = f"`t5-pretrain status mine --root {tmp_path / 'work'}` shows more"
    for command in (("verify", place), ("generate", place, "a text"), ("evaluate", place, "--corpus", "pydocs")):
        line = refused(4, *command)
        assert line.startswith(f"error: {tmp_path / place} has no manifest.json yet, because run mine has not finished")
        assert f"its state is 'stopped', at step 8 of 60. Continue it first; {shows}" in line
    with run_lock(run):
        assert f"'running', at step 8 of 60. Wait until it is published; {shows}" in refused(4, "verify", place)


def test_exit_code_3_means_that_training_is_done_but_its_result_is_not_gathered(
    t5_pretrain: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lose_a_host(**_: object) -> None:
        raise NotGathered("training is done, but node1 was lost")

    monkeypatch.setattr(__main__, "app", lose_a_host)
    assert t5_pretrain("run") == 3
    assert capsys.readouterr().err == "error: training is done, but node1 was lost\n"
