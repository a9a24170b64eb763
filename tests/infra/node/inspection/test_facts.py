"""The facts that a node reports, asked of this machine."""

import fcntl
import json
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from infra.node.code_bundle import own_bundle
from infra.node.inspection import accelerators, gather, network_interfaces, software
from infra.node.inspection.facts import Facts, Question
from infra.node.messages import decode, encode
from infra.node.storage.disk_usage import pin
from t5train.records.identity import fingerprint
from t5train.spec.recipes import recipe

ROOT = Path("/")
GATHERED_ONLY_LIGHTLY = """
import sys
from pathlib import Path
from infra.node.inspection.facts import Question
from infra.node.inspection import gather
gather(Question(root=Path("/"), nonce_path=Path("/"), accelerator=sys.argv[1] or None))
assert not {"torch", "deepspeed", "transformers"} & set(sys.modules), "something large was imported"
"""


@pytest.fixture
def question(tmp_path: Path) -> Question:
    nonce = tmp_path / "nonce"
    nonce.write_text("f00d", "utf-8")
    cache = {"TORCH_EXTENSIONS_DIR": str(tmp_path / "cache")}
    spec = recipe("smoke").model_dump_json()
    return Question(tmp_path, nonce, accelerator="cpu", slots=(0,), environment=cache, spec=spec)


def test_facts_survive_the_journey(question: Question) -> None:
    facts = gather(question)
    assert decode(encode(facts), Facts) == facts


def test_a_node_tells_its_versions_clock_room_and_what_the_head_wrote(question: Question) -> None:
    before = time.time()
    facts = gather(question)
    assert before <= facts.started_at <= facts.ended_at <= time.time()
    assert facts.software.packages["torch"] == version("torch")
    assert facts.software.spec_digest == fingerprint(json.loads(question.spec))
    assert facts.room.nonce == "f00d"
    assert (facts.room.root_error, facts.room.node_folder_error, facts.software.libgomp_error) == ("", "", "")
    assert facts.build.ninja is not None
    assert facts.network.hostname == socket.gethostname()
    assert facts.network.interfaces["lo"][0] == "127.0.0.1/8"


@pytest.mark.parametrize("accelerator", ["cpu", ""])
def test_no_large_package_is_imported_to_tell_of_a_host_without_accelerators(
    run_python: Callable[..., CompletedProcess[str]], accelerator: str
) -> None:
    if not accelerator and software.torch_runtime():
        pytest.skip("torch is built for an accelerator here, and must be asked")
    result = run_python(GATHERED_ONLY_LIGHTLY, accelerator)
    assert result.returncode == 0, result.stderr


def test_the_code_is_known_by_the_digest_of_its_bundle() -> None:
    assert software.software("").code_digest == own_bundle().digest


def test_a_spec_that_the_nodes_code_does_not_know_is_told() -> None:
    assert software.spec_digest('{"recipe": "smoke", "novelty": 1}').startswith("refused: ")


def test_the_port_where_ranks_meet_is_tried(question: Question) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        answer = network_interfaces.network(Question(ROOT, ROOT, wants_port=True, master_port=port))
        assert (answer.port, answer.port_is_free) == (port, False)
    found = network_interfaces.network(Question(ROOT, ROOT, wants_port=True))
    assert found.port is not None
    assert found.port_is_free


def test_a_root_that_is_not_there_is_told(question: Question, tmp_path: Path) -> None:
    gone = Question(tmp_path / "gone", tmp_path / "gone" / "nonce", accelerator="cpu")
    room = gather(gone).room
    assert (room.nonce, room.root_error) == (None, "No such file or directory")


def test_a_lock_that_is_held_is_found_with_its_holder(tmp_path: Path) -> None:
    lock = tmp_path / "cuda-0.lock"
    assert accelerators.holder(lock) is None
    lock.write_text("base-0001-ab12cd34", "utf-8")
    assert accelerators.holder(lock) is None
    with open(lock, encoding="utf-8") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert accelerators.holder(lock) == "base-0001-ab12cd34"


def test_stale_locks_are_removed_and_compiled_operators_found(question: Question, tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "cpu_adam"
    folder.mkdir(parents=True)
    (folder / "cpu_adam.so").touch()
    (folder / "lock").touch()
    build = gather(question).build
    assert build.compiled == ["cpu_adam"]
    assert build.cleared_locks == [str(folder / "lock")]
    assert not (folder / "lock").exists()


def test_ninja_is_looked_for_where_ranks_will(question: Question, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert gather(question).build.ninja == str(Path(sys.executable).parent / "ninja")


def test_two_names_of_this_machine_are_one(question: Question) -> None:
    assert gather(question).identity == gather(question).identity
    assert str(Path("/proc/self/ns/net").readlink()) in gather(question).identity


def test_what_gives_way_on_a_disk_of_its_own_is_the_runs_and_what_no_other_run_uses(
    question: Question, tmp_path: Path
) -> None:
    scratch = tmp_path / "scratch"
    for place, size in (("runs/it-f00d/checkpoints/step-00000001", 1), ("runs/other-f00d", 10)):
        (scratch / place).mkdir(parents=True)
        (scratch / place / "file").write_bytes(bytes(size))
    for name, user in (("its", "it-f00d"), ("others", "other-f00d"), ("nobodys", None)):
        (scratch / "shards" / name).mkdir(parents=True)
        (scratch / "shards" / name / "file").write_bytes(bytes(100))
        if user:
            pin(scratch, f"shards/{name}", user)
    apart = replace(question, nonce_path=tmp_path / "gone", scratch=scratch)
    for run, expected in (("it-f00d", 201), (None, 100)):
        room = gather(replace(apart, run_on_nodes=run)).room
        assert (room.scratch, room.scratch_error, room.scratch_yielding_bytes) == (str(scratch), "", expected)


def test_the_head_too_has_a_disk_of_its_own_where_its_ranks_write(question: Question) -> None:
    facts, scratch = gather(question), question.root / "scratch"
    assert facts.room.scratch == ""
    assert gather(replace(question, head=facts.identity, scratch=scratch)).room.scratch == str(scratch)
