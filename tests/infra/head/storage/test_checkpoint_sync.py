"""While ranks train, the newest complete checkpoint is gathered to the head, and no needed checkpoint is removed."""

import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from infra.head.storage import checkpoint_sync, gather
from infra.head.storage.checkpoint_sync import CheckpointSync, keep_up
from infra.head.storage.node_paths import NodeRun
from t5train.checkpoint import tags as sidecar
from t5train.errors import HostUnreachable, Unreadable
from t5train.files.run_folder import PROFILES, WANDB, tag_of
from t5train.progress import silent
from t5train.spec import StorageSpec
from tests.support.simulated_nodes import PART_OF_B, Site, Unsteady, link_to_itself
from tests.support.waiting import await_that


def tags(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_newest_complete_checkpoint_is_gathered_and_older_ones_removed_everywhere(run: NodeRun, site: Site) -> None:
    for step in (8, 16, 24):
        site.save(step)
    (site.tag("b", 24) / "rank-00001.json").unlink()  # it is still being written
    keep_up(run, silent)
    assert sidecar.complete_tags(run.checkpoints) == [tag_of(16)]
    assert tags(site.tag("a", 8).parent) == tags(site.tag("b", 8).parent) == [tag_of(16), tag_of(24)]
    (run.checkpoints / "best").mkdir()
    site.save(24)
    keep_up(run, silent)
    assert tags(run.checkpoints) == ["best", tag_of(24)]
    assert tags(site.tag("a", 8).parent) == [tag_of(24)]


def test_a_file_that_cannot_be_read_now_is_an_error_and_is_gathered_the_next_time(run: NodeRun, site: Site) -> None:
    site.save(8)
    site.save(16)
    sidecar_of_b = site.tag("b", 16) / "rank-00001.json"
    text = sidecar_of_b.read_bytes()
    link_to_itself(sidecar_of_b)
    with pytest.raises(Unreadable, match=rf"{tag_of(16)} may be complete, but cannot be gathered now: b: .*00001.json"):
        keep_up(run, silent)
    assert sidecar.complete_tags(run.checkpoints) == [tag_of(8)]
    sidecar_of_b.unlink()
    sidecar_of_b.write_bytes(text)
    keep_up(run, silent)
    assert sidecar.complete_tags(run.checkpoints) == [tag_of(16)]


def test_leftovers_of_killed_removals_are_removed_even_if_nothing_else_is(run: NodeRun, site: Site) -> None:
    site.save(8)
    for checkpoints in (run.checkpoints, site.tag("a", 8).parent):
        (checkpoints / f".{tag_of(8)}.discarded").mkdir(parents=True)
        (checkpoints / f".{tag_of(8)}.discarded" / PART_OF_B).touch()
    keep_up(run, silent)
    for checkpoints in (run.checkpoints, site.tag("a", 8).parent):
        assert [path.name for path in checkpoints.iterdir()] == [tag_of(8)]


def test_every_checkpoint_to_be_kept_is_gathered_including_those_saved_in_between(run: NodeRun, site: Site) -> None:
    for step in (8, 16, 24):
        site.save(step)
    keep_up(replace(run, keep=StorageSpec(keep_last=2)), silent)
    assert sidecar.complete_tags(run.checkpoints) == [tag_of(24), tag_of(16)]
    assert tags(site.tag("b", 8).parent) == [tag_of(16), tag_of(24)]


def test_the_gathered_checkpoint_is_kept_until_the_next_one_is_gathered(
    run: NodeRun, site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    site.save(8)
    keep_up(run, silent)
    site.save(16)
    (site.tag("b", 16) / PART_OF_B).write_bytes(bytes(300_000))
    keep_up(run, silent)
    assert f"{tag_of(16)} is not gathered: no intact copy of {PART_OF_B}" in caplog.text
    assert sidecar.complete_tags(run.checkpoints) == [tag_of(8)]
    assert tags(site.tag("a", 8).parent) == [tag_of(8), tag_of(16)]


def test_files_that_grow_are_collected_again_and_those_replaced_meanwhile_the_next_time(
    run: NodeRun, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_node, note = site.scratch("a") / run.relative_path, f"{WANDB}/sent.json"
    for name in ("metrics.jsonl", f"{PROFILES}/trace", note):
        (on_node / name).parent.mkdir(parents=True, exist_ok=True)
        (on_node / name).write_bytes(b"1")
    real, contents = gather.pull, iter("23456789")

    def pull(source: Any, wanted: Any, *arguments: Any) -> None:
        (on_node / note).write_text(next(contents))
        real(source, wanted, *arguments)

    monkeypatch.setattr(gather, "pull", pull)
    checkpoint_sync.bring_monitored(run)
    assert (run.folder / "metrics.jsonl").exists()
    assert (run.folder / PROFILES / "trace").exists()
    assert not (run.folder / note).exists()
    monkeypatch.undo()
    (on_node / "metrics.jsonl").write_bytes(b"grown")
    checkpoint_sync.bring_monitored(run)
    assert (run.folder / "metrics.jsonl").read_bytes() == b"grown"
    assert (run.folder / note).read_bytes() == (on_node / note).read_bytes()


def test_what_people_watch_is_collected_with_two_commands_or_one_if_there_is_nothing(run: NodeRun, site: Site) -> None:
    counting = Unsteady(site.nodes.transport)
    counted = replace(run, nodes=replace(run.nodes, transport=counting))
    checkpoint_sync.bring_monitored(counted)
    assert len(counting.actions) == 1
    on_node = site.scratch("a") / run.relative_path
    for name in ("metrics.jsonl", f"{PROFILES}/trace", f"{WANDB}/sent.json"):
        (on_node / name).parent.mkdir(parents=True, exist_ok=True)
        (on_node / name).write_bytes(b"1")
    checkpoint_sync.bring_monitored(counted)
    assert len(counting.actions) == 1 + 2
    assert (run.folder / f"{WANDB}/sent.json").exists()


def test_a_failed_sync_is_retried_and_the_sync_ends_promptly(
    run: NodeRun, site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for seconds in ("_LOOK_SECONDS", "_RETRY_SECONDS", "_METRICS_SECONDS"):
        monkeypatch.setattr(checkpoint_sync, seconds, 0.05)
    cut = Unsteady(site.transport, "ab")
    site.save(8)
    sync = CheckpointSync(replace(run, nodes=replace(run.nodes, transport=cut)), lambda: 2)
    await_that(lambda: "cannot collect metrics" in caplog.text)
    assert "cannot collect metrics, will retry: a: the connection was lost" in caplog.text
    cut.unreachable = ""
    await_that(lambda: sidecar.complete_tags(run.checkpoints) == [tag_of(8)])
    for seconds in ("_LOOK_SECONDS", "_RETRY_SECONDS", "_METRICS_SECONDS"):
        monkeypatch.setattr(checkpoint_sync, seconds, 600.0)
    started = time.monotonic()
    sync.end()
    assert time.monotonic() - started < 300


def test_metrics_are_collected_in_a_gather_and_after_a_failure(run: NodeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    for seconds in ("_LOOK_SECONDS", "_RETRY_SECONDS", "_METRICS_SECONDS"):
        monkeypatch.setattr(checkpoint_sync, seconds, 0.01)
    gathering, done, collected = threading.Event(), threading.Event(), list[str]()

    def keep_up(*_: object) -> None:
        gathering.set()
        done.wait()

    def collect(_nodes: object, host: str, *_: object) -> None:
        if gathering.is_set():
            collected.append(host)
        if len(collected) == 1:
            raise HostUnreachable("a: no answer", ["a"])

    monkeypatch.setattr(checkpoint_sync, "keep_up", keep_up)
    monkeypatch.setattr(checkpoint_sync, "collect", collect)
    sync = CheckpointSync(run, lambda: 2)
    try:
        await_that(lambda: len(collected) > 3)
        assert not done.is_set()
    finally:
        done.set()
        sync.end()
