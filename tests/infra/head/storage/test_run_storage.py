import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from infra.head.hosts.ssh import Transport
from infra.head.stop_signal import Stopped
from infra.head.storage import checkpoint_sync
from infra.head.storage.node_paths import NodeRun
from infra.head.storage.run_storage import NodeLocalStorage
from t5train.checkpoint import tags
from t5train.errors import NotGathered, RankKilled
from t5train.files.run_folder import tag_of
from t5train.progress import Progress, relayed, silent
from tests.support.simulated_nodes import Site


@pytest.mark.parametrize(("error", "gathered"), [(Stopped(), [tag_of(8)]), (RankKilled("rank 0"), [])])
def test_what_ranks_saved_that_were_told_to_end_is_gathered_before_their_hosts_go(
    run: NodeRun, site: Site, error: BaseException, gathered: list[str]
) -> None:
    def train(storage: NodeLocalStorage) -> None:
        with storage.syncing(lambda: 0):
            site.save(8)
            raise error

    with pytest.raises(type(error)):
        train(NodeLocalStorage(run, lambda folder: folder, silent))
    assert tags.complete_tags(run.checkpoints) == gathered


class Severed:
    """A transport that cannot reach host b, and counts how often that was tried."""

    def __init__(self, way: Transport) -> None:
        self.way, self.tried = way, 0

    def command(self, host: str, argv: Sequence[str]) -> list[str]:
        self.tried += host == "b"
        return ["sh", "-c", "exit 255"] if host == "b" else self.way.command(host, argv)


def test_a_host_that_is_lost_at_the_last_gather_is_told_with_what_is_done_and_what_remains(
    run: NodeRun, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infra.head.storage.run_storage._AGAIN_SECONDS", (0.0, 0.0))
    site.save(4)
    checkpoint_sync.keep_up(run, silent)
    site.save(8)
    way = Severed(site.nodes.transport)
    cut = replace(run, nodes=replace(run.nodes, transport=way))
    with pytest.raises(NotGathered) as told:
        NodeLocalStorage(cut, lambda folder: folder, silent).take_home()
    assert str(told.value).startswith("training is done, but b was lost before the head had the whole result: b: ")
    assert "Start the same command again when b answers" in str(told.value)
    assert str(told.value).endswith(f"training then resumes from {tag_of(4)}")
    assert (told.value.hosts, told.value.exit_code, told.value.retryable, way.tried) == (("b",), 3, False, 3)


def test_progress_of_other_threads_is_told_in_this_one() -> None:
    told: list[tuple[int, threading.Thread]] = []

    def act(progress: Progress) -> str:
        for done in range(3):
            progress("bytes", done, 3)
        return "done"

    assert relayed(act, lambda _what, done, _total: told.append((done, threading.current_thread()))) == "done"
    assert told[-1][0] == 2
    assert {thread for _, thread in told} == {threading.main_thread()}


def test_what_is_left_by_an_exception_breaks_off() -> None:
    def forever(progress: Progress) -> None:
        while True:
            progress("bytes", 1, None)
            time.sleep(0.01)

    def stop(what: str, done: int, total: int | None) -> None:
        raise Stopped

    with pytest.raises(Stopped):
        relayed(forever, stop)


def test_a_job_is_given_to_nodes_only_when_all_that_it_names_is_there(run: NodeRun, site: Site, tmp_path: Path) -> None:
    order: list[str] = []

    def write_job(folder: Path) -> Path:
        order.append(",".join(tags.complete_tags(run.checkpoints)))
        raise RankKilled("no further")

    site.save(8)
    with pytest.raises(RankKilled):
        NodeLocalStorage(run, write_job, silent).make_ready(tmp_path)
    assert order == [tag_of(8)]
