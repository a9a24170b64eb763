"""Leftover folders of ended attempts are removed once nothing needs them; those of running attempts never are."""

import json
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from infra.head.storage.garbage_collection import free_of_heads, free_on, garbage_of_heads, garbage_on, known_attempts
from infra.node import node_folders
from infra.node.attempts import attempt, head_lease
from infra.node.attempts.attempt import Attempt
from infra.node.attempts.run_lock import run_lock
from infra.node.attempts.run_ownership import Owner
from infra.node.node_folders import run_path
from infra.node.processes import ProcessIdentity
from infra.node.storage.left_attempts import KnownAttempts, left_attempts
from tests.infra.conftest import Start
from tests.support.simulated_nodes import RUN, Site

AGE_DAYS = 8


def leave_attempt(parent: Path, run_id: str, days: float = 0.0, spec: dict[str, Any] | None = None) -> Path:
    """Create the folder of an ended attempt over several hosts that was last changed ``days`` ago."""
    for folder in (parent.parent, parent):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
    folder = parent / run_id
    folder.mkdir(mode=0o700)
    Attempt(folder, run_id, "smoke", 1, None, 5.0, grace_seconds=1.0).write()
    (folder / "rank-00000.log").write_text("its log\n")
    if spec is not None:
        (folder / "spec.json").write_text(json.dumps(spec))
    age(folder, days)
    return folder


def age(folder: Path, days: float) -> None:
    then = time.time() - 86400 * days
    for path in (*folder.iterdir(), folder):
        os.utime(path, (then, then))


@pytest.fixture
def attempts(site: Site) -> Path:
    """The folder of the attempts of node a."""
    return site.scratch("a").parent / "attempts"


def left(parent: Path, known: KnownAttempts) -> list[str]:
    return [folder.name for folder, _ in left_attempts(parent, known)]


def test_an_attempt_not_collected_by_its_head_is_listed_with_the_reason_and_freed(site: Site, attempts: Path) -> None:
    run = site.root / "runs" / "smoke"
    begun = attempt.begin(run, None, 5.0, hosts={"a": (0,), "b": (0,)})
    folder = leave_attempt(attempts, begun.run_id)
    known = known_attempts(site.root)
    found = garbage_on(site.nodes, [], known)
    assert [(each.relative_path, each.why) for each in found["a"]] == [  # type: ignore[union-attr]
        (f"attempts/{begun.run_id}", "left by an attempt that has ended, and not collected by its head")
    ]
    with run_lock(run):
        assert garbage_on(site.nodes, [], known_attempts(site.root))["a"] == [], "its head is running"
    freed = free_on(site.nodes, [], known, found)  # type: ignore[arg-type]
    assert freed == {"a": [f"attempts/{begun.run_id}"], "b": []}
    assert not folder.exists()


def test_attempts_of_other_heads_are_kept_until_they_are_old(attempts: Path) -> None:
    leave_attempt(attempts, "young", AGE_DAYS - 2)
    leave_attempt(attempts, "old", AGE_DAYS)
    assert left(attempts, KnownAttempts()) == ["old"]
    assert left(attempts, KnownAttempts(busy=("old",))) == []


@pytest.mark.parametrize("how", ["rank", "guard", "launcher"])
def test_an_attempt_with_a_running_process_is_kept(attempts: Path, start: Start, how: str) -> None:
    folder = leave_attempt(attempts, "some", AGE_DAYS)
    given, variables = {
        "rank": ([], {"T5_RUN_ID": "some"}),
        "guard": ([str(folder)], {}),
        "launcher": ([], {"T5_RUN_ID": "some-head"}),
    }[how]
    process = start("-c", "import time; time.sleep(600)", *given, **variables)
    assert ProcessIdentity.of(process.pid).is_alive()
    known = KnownAttempts(idle=("some",))
    deadline = time.monotonic() + 20
    while left(attempts, known):  # until the process shows its own command line
        assert time.monotonic() < deadline
    process.kill()
    process.wait()
    assert left(attempts, known) == ["some"]


def test_an_attempt_with_an_unexpired_lease_or_that_is_being_prepared_is_kept(attempts: Path) -> None:
    folder = leave_attempt(attempts, "some", AGE_DAYS)
    head_lease.begin(folder)
    assert left(attempts, KnownAttempts(idle=("some",))) == []
    (folder / "lease").write_text(f"{time.monotonic() - 60:<24.3f}")
    assert left(attempts, KnownAttempts(idle=("some",))) == ["some"]
    (folder / "attempt.json").unlink()
    assert left(attempts, KnownAttempts(idle=("some",))) == []


def test_old_attempts_of_another_heads_active_run_are_kept(site: Site, attempts: Path) -> None:
    run = site.scratch("a") / run_path(RUN)
    run.mkdir(parents=True)
    (run / "owner.json").write_text(json.dumps(asdict(Owner("2" * 32, "other", "/shared/t5", "then", 60.0))))
    leave_attempt(attempts, "apart", AGE_DAYS, {"node_local": True, "run_folder": str(run)})
    shared = site.root / "runs" / "shared"
    shared.mkdir(parents=True)
    leave_attempt(attempts, "shared", AGE_DAYS, {"run_folder": str(shared)})
    head_lease.begin(run)
    with run_lock(shared):
        assert left(attempts, KnownAttempts()) == []
    (run / "lease").unlink()
    assert left(attempts, KnownAttempts()) == ["apart", "shared"]


def test_leftover_attempts_on_the_head_are_freed(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "head").mkdir()
    monkeypatch.setattr(node_folders, "PARENT", tmp_path / "head")
    folder = leave_attempt(node_folders.heads_folder(), "some")
    living = leave_attempt(node_folders.heads_folder(), "living")
    head_lease.begin(living)
    known = KnownAttempts(idle=("some", "living"))
    found = list(garbage_of_heads(known))
    assert [each.relative_path for each in found] == [str(folder)]
    assert free_of_heads(known, found) == [str(folder)]
    assert living.exists()
    assert not folder.exists()
