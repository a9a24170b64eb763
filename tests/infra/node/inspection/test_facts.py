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
from infra.node.inspection import collect_facts, hardware, network_interfaces, software
from infra.node.inspection.facts import Facts, Question
from infra.node.messages import decode, encode
from infra.node.storage.disk_usage import pin
from t5train.records.identity import fingerprint
from t5train.spec.recipes import recipe

ROOT = Path("/")
COLLECTED_ONLY_LIGHTLY = """
import sys
from pathlib import Path
from infra.node.inspection.facts import Question
from infra.node.inspection import collect_facts
collect_facts(Question(root=Path("/"), nonce_path=Path("/"), accelerator=sys.argv[1] or None))
assert not {"torch", "deepspeed", "transformers"} & set(sys.modules), "something large was imported"
"""


@pytest.fixture
def question(tmp_path: Path) -> Question:
    nonce = tmp_path / "nonce"
    nonce.write_text("f00d", "utf-8")
    cache = {"TORCH_EXTENSIONS_DIR": str(tmp_path / "cache")}
    spec = recipe("smoke").model_dump_json()
    return Question(tmp_path, nonce, accelerator="cpu", slots=(0,), environment=cache, spec=spec)


def test_a_node_reports_its_versions_clock_resources_and_the_nonce_that_the_head_wrote(
    question: Question, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    before = time.time()
    facts = collect_facts(question)
    assert decode(encode(facts), Facts) == facts
    assert before <= facts.started_at <= facts.ended_at <= time.time()
    assert facts.software.packages["torch"] == version("torch")
    assert facts.software.code_digest == own_bundle().digest
    assert facts.software.spec_digest == fingerprint(json.loads(question.spec))
    assert facts.resources.nonce == "f00d"
    assert (facts.resources.root.error, facts.resources.node_folder.error, facts.software.libgomp_error) == ("", "", "")
    assert facts.build.ninja == str(Path(sys.executable).parent / "ninja"), "it is on the path that ranks get"
    assert facts.network.hostname == socket.gethostname()
    assert facts.network.interfaces["lo"][0] == "127.0.0.1/8"


def test_a_node_reports_whether_it_has_packages_of_extras_only_if_the_run_asks_for_it() -> None:
    dask = {"cluster.hostfile": "hosts", "shards.executor": "dask"}
    scored = {"pairs.train": ["pairs.jsonl"], "evaluate.best_metric": "validation_bleu"}
    of_scoring = ((package, scored) for package in software.SCORING)
    for package, settings in (("wandb", {"monitor.wandb": True}), (software.DASK, dask), *of_scoring):
        assert package in software.software(recipe("smoke", settings).model_dump_json()).packages
        assert package not in software.software(recipe("smoke").model_dump_json()).packages
        assert package not in software.software("").packages


@pytest.mark.parametrize("accelerator", ["cpu", ""])
def test_inspecting_a_host_without_accelerators_imports_no_large_package(
    run_python: Callable[..., CompletedProcess[str]], accelerator: str
) -> None:
    if not accelerator and software.torch_runtime():
        pytest.skip("torch is built for an accelerator here, and must be asked")
    result = run_python(COLLECTED_ONLY_LIGHTLY, accelerator)
    assert result.returncode == 0, result.stderr


def test_the_rendezvous_port_is_checked_or_a_free_one_is_chosen() -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        answer = network_interfaces.network(Question(ROOT, ROOT, wants_port=True, master_port=port))
        assert (answer.port, answer.port_is_free) == (port, False)
    found = network_interfaces.network(Question(ROOT, ROOT, wants_port=True))
    assert found.port is not None
    assert found.port_is_free


def test_a_missing_root_is_reported(tmp_path: Path) -> None:
    gone = Question(tmp_path / "gone", tmp_path / "gone" / "nonce", accelerator="cpu")
    resources = collect_facts(gone).resources
    assert resources.nonce is None
    assert resources.root.error == f"{gone.root} cannot be written: No such file or directory; check the path"


def test_the_holder_of_an_accelerator_lock_is_reported_only_while_it_is_held(tmp_path: Path) -> None:
    lock = tmp_path / "cuda-0.lock"
    assert hardware.holder(lock) is None
    lock.write_text("base-0001-ab12cd34", "utf-8")
    assert hardware.holder(lock) is None
    with open(lock, encoding="utf-8") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert hardware.holder(lock) == "base-0001-ab12cd34"


def test_stale_locks_are_removed_and_compiled_operators_found(question: Question, tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "cpu_adam"
    folder.mkdir(parents=True)
    (folder / "cpu_adam.so").touch()
    (folder / "lock").touch()
    build = collect_facts(question).build
    assert build.compiled == ["cpu_adam"]
    assert build.cleared_locks == [str(folder / "lock")]
    assert not (folder / "lock").exists()


def test_a_spec_that_the_nodes_code_cannot_read_is_reported_as_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert software.spec_digest('{"recipe": "smoke", "novelty": 1}').startswith("refused: ")
    monkeypatch.setitem(sys.modules, "t5train.spec", None)
    assert software.spec_digest("{}").startswith("refused: import of t5train.spec halted")


def test_a_machine_has_a_stable_identity_and_the_heads_reports_its_scratch_folder_too(question: Question) -> None:
    facts, scratch = collect_facts(question), question.root / "scratch"
    assert str(Path("/proc/self/ns/net").readlink()) in facts.identity
    assert facts.resources.scratch.path == ""
    assert collect_facts(replace(question, head=facts.identity, scratch=scratch)).resources.scratch.path == str(scratch)


def test_reclaimable_scratch_space_is_the_runs_own_and_what_no_other_uses(question: Question, tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    for relative_path, size in (("runs/it-f00d/checkpoints/step-00000001", 1), ("runs/other-f00d", 10)):
        (scratch / relative_path).mkdir(parents=True)
        (scratch / relative_path / "file").write_bytes(bytes(size))
    for name, user in (("its", "it-f00d"), ("others", "other-f00d"), ("nobodys", None)):
        (scratch / "shards" / name).mkdir(parents=True)
        (scratch / "shards" / name / "file").write_bytes(bytes(100))
        if user:
            pin(scratch, f"shards/{name}", user)
    node_local = replace(question, nonce_path=tmp_path / "gone", scratch=scratch)
    for run, expected in (("it-f00d", 201), (None, 100)):
        resources = collect_facts(replace(node_local, run_on_nodes=run)).resources
        assert (resources.scratch.path, resources.scratch.error) == (str(scratch), "")
        assert resources.scratch_yielding_bytes == expected
