"""A run resumes from the newest checkpoint that is complete anywhere, or the error names what is missing."""

import json
import shutil
from dataclasses import replace

import pytest

from infra.head.hosts.hostfile import Host, Hosts
from infra.head.storage import checkpoint_record, recovery
from infra.head.storage.checkpoint_sync import keep_up
from infra.head.storage.node_paths import NodeRun
from infra.head.storage.recovery import recover
from t5train.checkpoint import tags
from t5train.checkpoint.resume_point import ask_to_begin_again, resume_tag
from t5train.errors import NothingVerifies, UnlistedFile, Unreadable
from t5train.files.run_folder import WANDB_SENT, tag_of
from t5train.progress import silent
from t5train.records.best_so_far import BestSoFar
from tests.support.simulated_nodes import PART_OF_B, Site, link_to_itself


def test_a_run_that_never_had_a_complete_checkpoint_starts_from_the_beginning(run: NodeRun, site: Site) -> None:
    recover(run, silent)
    site.save(8)
    shutil.rmtree(site.tag("b", 8))
    recover(run, silent)
    assert tags.complete_tags(run.checkpoints) == []


def test_a_damaged_checkpoint_is_set_aside_and_the_previous_one_is_used(run: NodeRun, site: Site) -> None:
    site.save(8)
    site.save(16)
    (site.tag("b", 16) / PART_OF_B).write_bytes(bytes(300_000))
    recover(run, silent)
    assert tags.complete_tags(run.checkpoints) == [tag_of(8)]
    # The damaged tag is set aside. Otherwise, pruning would keep it as the newest, and remove the one resumed from.
    for host in "ab":
        assert not site.tag(host, 16).exists()
        (aside,) = (site.scratch(host) / "set-aside" / run.name).iterdir()
        assert aside.name.startswith(f"{tag_of(16)}.")
        assert len(list(aside.iterdir())) == 3
    keep_up(run, silent)
    assert tags.complete_tags(run.checkpoints) == [tag_of(8)]


def test_the_best_checkpoint_is_kept_everywhere_and_gathered_with_the_newest(run: NodeRun, site: Site) -> None:
    site.save(8, best=BestSoFar(step=8, value=0.5))
    for step in (16, 24, 32):
        site.save(step, best=BestSoFar(step=8, value=0.5, validations_since=step // 8 - 1))
    recover(run, silent)
    assert tags.complete_tags(run.checkpoints) == [tag_of(32), tag_of(8)]
    keep_up(run, silent)
    assert tags.complete_tags(run.checkpoints) == [tag_of(32), tag_of(8)]
    assert [step for step in (8, 16, 24, 32) if site.tag("a", step).exists()] == [8, 32]


def test_older_checkpoints_are_kept_until_the_best_one_of_the_newest_is_gathered(run: NodeRun, site: Site) -> None:
    site.save(8, best=BestSoFar(step=8, value=0.1))
    keep_up(run, silent)
    site.save(16, best=BestSoFar(step=16, value=0.5))
    (site.tag("b", 16) / PART_OF_B).write_bytes(bytes(300_000))
    site.save(24, best=BestSoFar(step=16, value=0.5, validations_since=1))
    keep_up(run, silent)
    recover(run, silent)
    assert resume_tag(run.folder) == tag_of(8)


def test_a_run_does_not_resume_after_its_best_checkpoint_if_that_is_damaged(run: NodeRun, site: Site) -> None:
    site.save(8, best=BestSoFar(step=8, value=0.1))
    site.save(16, best=BestSoFar(step=16, value=0.5))
    site.save(24, best=BestSoFar(step=16, value=0.5, validations_since=1))
    (site.tag("b", 16) / PART_OF_B).write_bytes(bytes(300_000))
    recover(run, silent)
    assert resume_tag(run.folder) == tag_of(8)


@pytest.mark.parametrize("name", [PART_OF_B, "rank-00001.json"])
def test_a_checkpoint_that_cannot_be_read_now_is_not_replaced_by_an_older_one(
    run: NodeRun, site: Site, name: str
) -> None:
    site.save(8)
    site.save(16)
    link_to_itself(site.tag("b", 16) / name)
    with pytest.raises(Unreadable, match=rf"{tag_of(16)} may be complete.* b: .*{name} cannot be read now"):
        recover(run, silent)
    assert site.tag("a", 16).exists()
    assert site.tag("a", 8).exists()


def test_pruning_keeps_a_checkpoint_with_a_file_that_a_host_cannot_read_now(run: NodeRun, site: Site) -> None:
    site.save(8)
    link_to_itself(site.tag("b", 8) / "rank-00001.json")
    site.save(16)
    keep_up(run, silent)
    assert tags.complete_tags(run.checkpoints) == [tag_of(16)]
    assert all((site.tag(host, 8) / f"rank-0000{rank}.json").is_symlink() == rank for rank, host in enumerate("ab"))
    assert (site.tag("b", 8) / PART_OF_B).exists()


@pytest.mark.parametrize("name", [PART_OF_B, "rank-00001.json"])
def test_a_heads_copy_that_cannot_be_read_is_replaced_from_the_hosts(run: NodeRun, site: Site, name: str) -> None:
    site.save(8)
    site.save(16)
    recover(run, silent)
    link_to_itself(run.checkpoints / tag_of(16) / name)
    recover(run, silent)
    tags.require_complete(run.checkpoints / tag_of(16))
    (aside,) = (run.folder / "set-aside").iterdir()
    assert aside.name.startswith(f"{tag_of(16)}-{name}.")


def test_a_file_on_a_host_that_no_rank_recorded_is_refused_and_named(run: NodeRun, site: Site) -> None:
    site.save(8)
    site.save(16)
    (site.tag("b", 16) / "mp_rank_01_model_states.pt").write_bytes(b"stray")
    words = rf"{tag_of(16)} on b holds mp_rank_01_model_states\.pt, a file that no rank"
    with pytest.raises(UnlistedFile, match=words):
        recover(run, silent)
    assert (site.tag("b", 16) / "mp_rank_01_model_states.pt").exists()


def test_a_run_whose_checkpoints_are_all_damaged_begins_again_only_on_request(run: NodeRun, site: Site) -> None:
    site.save(8)
    (site.tag("b", 8) / PART_OF_B).write_bytes(bytes(300_000))
    with pytest.raises(NothingVerifies, match=rf"no intact copy of {PART_OF_B} was found.*--begin-again"):
        recover(run, silent)
    ask_to_begin_again(run.folder)
    recover(run, silent)
    assert resume_tag(run.folder) is None
    assert not any(site.tag(host, 8).exists() for host in "ab")
    assert all(len(list((site.scratch(host) / "set-aside" / run.name).iterdir())) == 1 for host in "ab")
    recover(run, silent)
    assert resume_tag(run.folder) is None, "the run must still begin again if it was killed before its first checkpoint"


def test_old_checkpoints_of_a_host_that_returns_after_begin_again_are_set_aside(run: NodeRun, site: Site) -> None:
    site.save(8)
    checkpoint_record.note(run.folder, site.newest())
    owner = site.scratch("b") / run.relative_path / "owner.json"
    owner.write_text("{")  # which makes every request to this host fail
    without_b = replace(run, hosts=Hosts((Host("a", (0, 1)),)), nodes=run.nodes.on("a"))
    ask_to_begin_again(run.folder)
    recover(without_b, silent)
    assert resume_tag(run.folder) is None
    owner.unlink()
    recover(run, silent)
    assert resume_tag(run.folder) is None
    assert not site.tag("b", 8).exists()
    assert [len(list((site.scratch(host) / "set-aside" / run.name).iterdir())) for host in "ab"] == [1, 1]
    site.save(16)
    recover(run, silent)
    assert resume_tag(run.folder) == tag_of(16), "checkpoints from after the new start must not be set aside"


@pytest.mark.parametrize(("code", "are_sent"), [(None, []), ("c0de", ["b"])])
def test_hosts_that_left_the_run_get_the_shipped_code_before_their_parts_are_gathered(
    run: NodeRun, site: Site, monkeypatch: pytest.MonkeyPatch, code: str | None, are_sent: list[str]
) -> None:
    sent: list[str] = []

    def send(_transport: object, hosts: list[str], _consequence: str) -> list[str]:
        sent.extend(hosts)
        return hosts

    monkeypatch.setattr(recovery, "hosts_with_code", send)
    site.save(8)
    checkpoint_record.note(run.folder, site.newest())
    without_b = replace(run, hosts=Hosts((Host("a", (0, 1)),)), nodes=replace(run.nodes.on("a"), code=code))
    recover(without_b, silent)
    assert tags.complete_tags(run.checkpoints) == [tag_of(8)]
    assert sent == are_sent


def test_a_lost_file_is_named_with_the_host_that_last_had_it(run: NodeRun, site: Site) -> None:
    site.save(8)
    checkpoint_record.note(run.folder, site.newest())
    shutil.rmtree(site.tag("b", 8))
    with pytest.raises(NothingVerifies, match=rf"{tag_of(8)} lacks {PART_OF_B} \(last seen \S+ on b\)"):
        recover(run, silent)


def test_metrics_and_the_note_on_what_wandb_has_got_are_copied_from_a_node_only_if_they_say_more(
    run: NodeRun, site: Site
) -> None:
    site.save(8)
    metrics = [json.dumps({"step": step, "loss": 1.0}) + "\n" for step in range(1, 9)]
    (run.folder / "metrics.jsonl").write_text("".join(metrics[:6]))
    for steps in (8, 3):
        (site.scratch("a") / run.relative_path / "metrics.jsonl").write_text("".join(metrics[:steps]))
        recover(run, silent)
        assert (run.folder / "metrics.jsonl").read_text() == "".join(metrics)
    on_node, on_head = site.scratch("a") / run.relative_path / WANDB_SENT, run.folder / WANDB_SENT
    for path in (on_node, on_head):
        path.parent.mkdir(parents=True)
    for theirs, ours, kept in (((1, 180), (1, 103), (1, 180)), ((1, 90), (2, 4), (2, 4)), ((2, 4), (1, 180), (2, 4))):
        for path, (number, step) in ((on_node, theirs), (on_head, ours)):
            path.write_text(json.dumps({"number": number, "step": step}))
        recover(run, silent)
        found = json.loads(on_head.read_text())
        assert (found["number"], found["step"]) == kept
    on_head.unlink()
    recover(run, silent)
    assert json.loads(on_head.read_text())["step"] == 4
