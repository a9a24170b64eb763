"""The story of a run: its settings, attempts, checkpoints and losses, and the command that continues it."""

import json
import os
import shlex
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from infra.head.launch.held_run import hold_run
from infra.head.runs.run_lookup import find_run
from infra.head.runs.run_state import State
from infra.head.runs.run_story import Losses, StoredCheckpoint, changed_settings, run_story
from infra.node.attempts import attempt
from infra.node.attempts.attempt import Attempt, rank_name
from infra.node.attempts.exit_record import Cause, ExitRecord
from infra.node.processes import ProcessIdentity
from t5train.checkpoint import sidecar
from t5train.errors import InputError, LaunchError, Preempted, StorageError
from t5train.files import error_report, heartbeat
from t5train.files.heartbeat import Beat
from t5train.records.digests import digest_files
from t5train.spec import RunSpec
from t5train.spec.recipes import recipe
from tests.support.simulated_nodes import make_sidecar

SETTINGS = {"corpus.source": "/data/it's.txt", "optimizer.num_steps": 60, "storage.keep_last": 5}
EXITED = ExitRecord("", 0, Cause.EXITED, "exited", "2026-01-01T00:00:00+00:00", "2026-01-01T00:10:00+00:00")


@pytest.fixture
def spec(tmp_path: Path) -> RunSpec:
    """The settings of a run that has begun."""
    spec = recipe("smoke", SETTINGS | {"storage.root": json.dumps(str(tmp_path)), "name": "mine"})
    spec.run_folder.mkdir(parents=True)
    shards = "5eed" * 16
    begun = {"fingerprint": "f" * 64, "identity": {"shards": shards}, "spec": spec.model_dump(mode="json")}
    (spec.run_folder / "run.json").write_text(json.dumps(begun))
    (tmp_path / "shards" / f"text-{shards[:12]}").mkdir(parents=True)
    counts = {"train_tokens": 15425}
    (tmp_path / "shards" / f"text-{shards[:12]}" / "manifest.json").write_text(json.dumps({"counts": counts}))
    return spec


def add_attempt(
    spec: RunSpec, *exits: ExitRecord | None, step: int = 8, phase: Any = "step", begun_at: int = 0, **facts: Any
) -> Attempt:
    """Add an attempt whose ranks ended in these ways."""
    this = attempt.begin(spec.run_folder, **{"head": ProcessIdentity(1, 1), **facts})
    job = {"resume_tag": f"step-{begun_at:08d}" if begun_at else None, "consolidated": None}
    (this.folder / "spec.json").write_text(json.dumps(job))
    for rank, record in enumerate(exits):
        heartbeat.write(this.folder / f"{rank_name(rank)}.beat", Beat(0.0, phase, 0.0, 0.0, step))
        if record is not None:
            this.write_exit(replace(record, name=rank_name(rank)))
    return this


def ended(spec: RunSpec) -> list[tuple[int, int | None, int | None, str]]:
    return [(each.number, each.from_step, each.to_step, each.ended) for each in run_story(spec.run_folder).attempts]


def test_the_settings_that_differ_from_the_recipe_are_told_and_give_the_same_run_again(spec: RunSpec) -> None:
    story = run_story(spec.run_folder)
    assert story.settings == SETTINGS
    assert (story.recipe, story.source, story.tokens) == ("smoke", "/data/it's.txt", 15425)
    program, command, name, *options = shlex.split(str(story.next_command))
    assert (program, command, name) == ("t5-pretrain", "run", "smoke")
    assert options[:4] == ["--root", str(spec.storage.root), "--name", "mine"]
    changes = dict(option.split("=", 1) for option in options[5::2])
    assert recipe("smoke", changes | {"storage.root": json.dumps(options[1]), "name": "mine"}) == spec
    assert not story.faults


def test_the_command_that_continues_is_the_last_one_without_begin_again(
    spec: RunSpec, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "a folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["t5-pretrain", "train", "smoke", "--begin-again", "--set", "corpus.source=a b"])
    with pytest.raises(LaunchError), hold_run(spec.run_folder):
        raise LaunchError("rank 0 was killed")
    story = run_story(spec.run_folder)
    assert story.next_command == f"cd '{folder}' && t5-pretrain train smoke --set 'corpus.source=a b'"
    assert story.last_start is not None
    assert story.last_start.error == "rank 0 was killed"
    with hold_run(spec.run_folder):
        story = run_story(spec.run_folder)
        assert story.next_command is None, "it is running"
        assert f"process {os.getpid()} on" in str(story.state.holder)
    for name in ("manifest.json", "published.json"):
        (spec.run_folder / name).write_text("{}")
    assert run_story(spec.run_folder).next_command is None, "it is published"


def test_each_attempt_is_told_with_its_steps_and_how_it_ended(spec: RunSpec) -> None:
    killed = replace(EXITED, returncode=-9)
    told = replace(EXITED, returncode=1, cause=Cause.REQUESTED, reason="SIGTERM")
    stopped = replace(EXITED, returncode=None, cause=Cause.PARENT, reason="its parent died")
    add_attempt(spec, EXITED, killed)
    add_attempt(spec, None, stopped, begun_at=4, step=6, phase="save")
    this = add_attempt(spec, stopped, begun_at=4, step=0)
    error_report.report(this.rank_files(rank_name(0)), StorageError("the disk is full.\nFree some"))
    this = add_attempt(spec, told, replace(EXITED, returncode=1), begun_at=6)
    for rank in range(2):
        error_report.report(this.rank_files(rank_name(rank)), Preempted("saved step 7"))
    add_attempt(spec)
    add_attempt(spec, EXITED, EXITED, begun_at=6, step=60, phase="validate")
    assert ended(spec) == [
        (1, 0, 7, "rank 1 was killed by SIGKILL"),
        (2, 4, 6, "rank 0 was killed together with its guard"),
        (3, 4, 4, "the disk is full."),
        (4, 6, 7, "stopped as requested"),
        (5, 0, 0, "no rank started: the launcher was killed"),
        (6, 6, 60, "trained to the last step"),
    ]
    with hold_run(spec.run_folder):
        add_attempt(spec, None, begun_at=60)
        assert ended(spec)[-1] == (7, 60, 60, "running")
    this = add_attempt(spec, head=None, lease_seconds=60.0, hosts={"node1": (0,), "node0": (0, 1)})
    (this.folder / "spec.json").write_text('{"resume_tag": null, "consolidated": {"clock": {"step": 12}}}')
    found = run_story(spec.run_folder).attempts[-1]
    assert (found.hosts, found.from_step, found.to_step) == (("node1", "node0"), 12, 12)


def test_an_attempt_that_ended_early_is_not_said_to_have_trained_to_the_last_step(spec: RunSpec) -> None:
    patient = spec.with_settings({"evaluate.best_metric": "validation_loss", "evaluate.patience": 3})
    for step in (40, patient.optimizer.num_steps):
        this = add_attempt(spec, EXITED, EXITED, step=step, phase="save")
        (this.folder / "spec.json").write_text(json.dumps({"spec": patient.model_dump(mode="json")}))
    early = "ended early after step 40, without a better validation for too long"
    assert [each[-1] for each in ended(spec)] == [early, "trained to the last step"]


def test_checkpoints_are_told_with_size_and_whether_they_are_complete_without_reading_them(spec: RunSpec) -> None:
    for step in (4, 8, 12):
        tag = spec.run_folder / "checkpoints" / f"step-{step:08d}"
        tag.mkdir(parents=True)
        (tag / "weights.pt").write_bytes(bytes(1000 + step))
        sidecar.write(tag, make_sidecar(0, step, digest_files(tag, ["weights.pt"]), 1))
    (tag / "rank-00000.json").unlink()
    (spec.run_folder / "checkpoints" / "step-00000008" / "weights.pt").write_bytes(b"\1" * 1008)
    found = run_story(spec.run_folder).checkpoints
    assert [(each.step, each.is_complete) for each in found] == [(4, True), (8, True), (12, False)]
    assert found[2] == StoredCheckpoint(12, 1012, False)


def test_the_losses_are_those_of_the_first_and_last_step_and_the_best_validation(spec: RunSpec) -> None:
    lines: list[dict[str, Any]] = [
        {"step": 0, "unigram_content_loss": 6.5},
        {"step": 1, "loss": 8.0},
        {"step": 4, "validation_loss": 3.0, "validation_content_loss": 6.0},
        {"step": 8, "validation_loss": 3.1, "validation_content_loss": 6.2},
        {"step": 9, "loss": 4.0},
    ]
    (spec.run_folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert run_story(spec.run_folder).losses == Losses(8.0, 4.0, 6.0, 4, 6.5)


def test_of_a_run_on_pairs_losses_are_those_of_all_target_tokens(spec: RunSpec) -> None:
    lines = [{"step": 0, "unigram_loss": 6.5}, {"step": 4, "loss": 4.0}, {"step": 4, "validation_loss": 3.0}]
    (spec.run_folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert run_story(spec.run_folder).losses == Losses(4.0, 4.0, 3.0, 4, 6.5)


def test_what_cannot_be_read_is_named_and_hides_nothing_else(spec: RunSpec) -> None:
    for _ in range(2):
        add_attempt(spec, EXITED)
    for name in ("run.json", "published.json", "attempts/0001/attempt.json"):
        (spec.run_folder / name).write_text("{")
    (spec.run_folder / "export").mkdir()
    (spec.run_folder / "export" / "certificate.json").write_text("{}{")
    story = run_story(spec.run_folder)
    assert story.state.state == State.UNREADABLE
    damaged, intact = (each.ended for each in story.attempts)
    assert damaged.startswith("unknown: its files are damaged")
    assert intact == "trained to the last step"
    assert {Path(fault.split()[0]).name for fault in story.faults} == {"run.json", "certificate.json"}
    assert json.dumps(asdict(story), default=str)


def test_a_run_of_a_recipe_that_no_longer_exists_is_told_without_its_settings(spec: RunSpec) -> None:
    path = spec.run_folder / "run.json"
    path.write_text(path.read_text().replace('"recipe": "smoke"', '"recipe": "smok"'))
    story = run_story(spec.run_folder)
    assert (story.recipe, story.settings, story.source) == ("smok", {}, "/data/it's.txt")
    assert any("unknown recipe 'smok'" in fault for fault in story.faults)
    assert changed_settings(recipe("smoke").model_dump(mode="json")) == {}


def test_a_run_is_found_by_name_or_path_and_an_unknown_name_names_the_nearest(spec: RunSpec, tmp_path: Path) -> None:
    assert find_run(tmp_path, "mine") == spec.run_folder
    assert find_run(Path("/elsewhere"), f"{spec.run_folder}/") == spec.run_folder
    with pytest.raises(InputError, match=r"no run 'min' in .*/runs \(did you mean 'mine'\?\)"):
        find_run(tmp_path, "min")
    (tmp_path / "runs" / "notes").mkdir()
    with pytest.raises(InputError, match="not the folder of a run"):
        find_run(tmp_path, "notes")


@pytest.mark.parametrize(
    "named", ["..", "../runs/mine", "/", "runs/../../x", "/etc", "", ".mine.removing", "a/runs/.x"]
)
def test_a_name_that_leads_out_of_the_runs_is_refused(tmp_path: Path, named: str) -> None:
    with pytest.raises(InputError, match="neither the name of a run nor the path of its folder"):
        find_run(tmp_path, named)


def test_a_run_on_pairs_is_told_with_its_pairs_and_continues_with_the_command_for_pairs(tmp_path: Path) -> None:
    chosen_by = {"evaluate.best_metric": "validation_chrf"}
    spec = recipe("reverse_and_sort", {"storage.root": json.dumps(str(tmp_path)), "name": "mine"} | chosen_by)
    shards = "e" * 64
    spec.run_folder.mkdir(parents=True)
    begun = {"fingerprint": "f" * 64, "identity": {"shards": shards}, "spec": spec.model_dump(mode="json")}
    (spec.run_folder / "run.json").write_text(json.dumps(begun))
    made = tmp_path / "pair-shards" / f"digits-{shards[:12]}"
    made.mkdir(parents=True)
    (made / "manifest.json").write_text(json.dumps({"counts": {"train_tokens": 77, "train_pairs": 9}}))
    lines = [
        {"step": 1, "loss": 5.0},
        {"step": 250, "validation_loss": 0.5, "validation_exact_match": 0.9, "unigram_loss": 2.0}
        | {"validation_chrf": 31.5},
        {"step": 500, "validation_loss": 0.7, "validation_exact_match": 0.8}
        | {"validation_exact_match_of_task_0": 0.75, "validation_exact_match_of_task_1": 0.9}
        | {"validation_chrf": 32.5},
    ]
    (spec.run_folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    story = run_story(spec.run_folder)
    assert (story.source, story.tokens, story.pairs) == ("reverse_digits, sort_digits", 77, 9)
    assert str(story.next_command).startswith("t5-pretrain finetune reverse_and_sort --root ")
    found = story.losses
    assert (found.best_validation, found.best_validation_step, found.exact_match) == (0.5, 250, 0.8)
    assert found.unigram_baseline == 2.0
    assert (found.best_metric, found.best, found.best_step) == ("validation_chrf", 32.5, 500)
    assert found.exact_match_of_tasks == {"reverse_digits": 0.75, "sort_digits": 0.9}
