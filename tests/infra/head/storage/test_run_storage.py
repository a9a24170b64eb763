import threading
import time
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from infra.head.hosts.agents import Agents
from infra.head.stop_signal import Stopped
from infra.head.storage import checkpoint_sync
from infra.head.storage.claim import Claim
from infra.head.storage.node_paths import NodeRun
from infra.head.storage.provisioning import provide
from infra.head.storage.run_storage import NodeLocalStorage
from infra.head.storage.staged_bytes import StagedBytes
from infra.node.node_folders import node_path
from t5train.checkpoint import tags
from t5train.errors import NotGathered, RankKilled
from t5train.files.run_folder import tag_of
from t5train.progress import Progress, relayed, silent
from t5train.records.stage_records import StartingModelFiles, TokenShards
from t5train.records.start_copy import START_NOTE, is_awaited
from t5train.spec.rank_job import TrainJob
from t5train.spec.recipes import recipe
from tests.support.simulated_nodes import Site, Unsteady
from tests.support.waiting import await_that


@pytest.mark.parametrize(("error", "gathered"), [(Stopped(), [tag_of(8)]), (RankKilled("rank 0"), [])])
def test_the_last_checkpoint_is_gathered_after_a_stop_but_not_after_a_killed_rank(
    run: NodeRun, site: Site, error: BaseException, gathered: list[str]
) -> None:
    def train(storage: NodeLocalStorage) -> None:
        with storage.syncing(lambda: 0):
            site.save(8)
            raise error

    with pytest.raises(type(error)):
        train(NodeLocalStorage(run, lambda folder: folder, silent, Claim(Agents())))
    assert tags.complete_tags(run.checkpoints) == gathered


def test_the_error_for_a_host_lost_at_the_last_gather_names_what_is_done_and_what_remains(
    run: NodeRun, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infra.head.storage.run_storage._AGAIN_SECONDS", (0.0, 0.0))
    site.save(4)
    checkpoint_sync.keep_up(run, silent)
    site.save(8)
    transport = Unsteady(site.nodes.transport, "b")
    cut = replace(run, nodes=replace(run.nodes, transport=transport))
    with pytest.raises(NotGathered) as caught:
        NodeLocalStorage(cut, lambda folder: folder, silent, Claim(Agents())).take_home()
    assert str(caught.value).startswith("training is done, but b was lost before the head had the whole result: b: ")
    assert "Start the same command again when b answers" in str(caught.value)
    assert str(caught.value).endswith(f"training then resumes from {tag_of(4)}")
    assert (caught.value.hosts, caught.value.exit_code, caught.value.retryable) == (("b",), 3, False)
    assert [host for host, _ in transport.actions].count("b") == 3


def test_progress_of_another_thread_is_reported_in_this_one_whose_exceptions_stop_it() -> None:
    reported: list[tuple[int, threading.Thread]] = []

    def act(progress: Progress) -> str:
        for done in range(3):
            progress("bytes", done, 3)
        return "done"

    assert relayed(act, lambda _what, done, _total: reported.append((done, threading.current_thread()))) == "done"
    assert reported[-1][0] == 2
    assert {thread for _, thread in reported} == {threading.main_thread()}

    def forever(progress: Progress) -> None:
        while True:
            progress("bytes", 1, None)
            time.sleep(0.01)

    with pytest.raises(Stopped):
        relayed(forever, Mock(side_effect=Stopped))


def test_work_without_progress_is_reported(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("t5train.progress._STALLED_SECONDS", 0.0)
    monkeypatch.setattr("t5train.progress._REPORT_SECONDS", 0.01)

    def act(progress: Progress) -> None:
        progress("checkpoint bytes gathered", 1000, 5000)
        await_that(lambda: "1,000 of 5,000" in caplog.text, seconds=20)

    relayed(act, silent, "gathering the last checkpoint")
    progress = "(checkpoint bytes gathered: 1,000 of 5,000)"
    assert f"no progress for 0 min while gathering the last checkpoint {progress}. Check" in caplog.text


def test_the_job_is_written_only_after_its_checkpoint_is_gathered(run: NodeRun, site: Site, tmp_path: Path) -> None:
    gathered_tags: list[str] = []

    def write_job(folder: Path) -> Path:
        gathered_tags.append(",".join(tags.complete_tags(run.checkpoints)))
        raise RankKilled("no further")

    site.save(8)
    with pytest.raises(RankKilled):
        NodeLocalStorage(run, write_job, silent, Claim(Agents())).make_ready(tmp_path)
    assert gathered_tags == [tag_of(8)]


def test_the_copy_of_a_model_from_the_hub_is_where_the_ranks_of_each_node_look_for_it(
    run: NodeRun, site: Site, tmp_path: Path
) -> None:
    copy, shards = tmp_path / "starts" / f"someone--t5@{'0a' * 20}", tmp_path / "shards"
    for folder in (copy, shards):
        folder.mkdir(parents=True)
    names = {"config.json", "model.safetensors", START_NOTE}
    for name in names:
        (copy / name).write_text("{}")
    StartingModelFiles(path=copy, fingerprint="5" * 64, files={}, inputs={}).commit()
    TokenShards(path=shards, fingerprint="6" * 64, files={}).commit()
    spec = recipe("smoke").with_settings({"model.start_from": str(copy)})
    run.folder.mkdir(parents=True, exist_ok=True)
    job = TrainJob(
        spec=spec,
        run_fingerprint="f" * 64,
        run_folder=run.folder,
        shards_folder=shards,
        resume_tag=None,
        start_fingerprint="5" * 64,
    )
    provide(run, job, silent, StagedBytes())
    begins_from = Path(str(run.job_on_nodes(job).spec.model.start_from))
    for host in run.nodes.hosts:
        staged = site.scratch(host) / begins_from.relative_to(node_path("scratch"))
        assert {path.name for path in staged.iterdir()} >= names
        assert not is_awaited(staged)
