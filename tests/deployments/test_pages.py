"""A deployed run, from Prefect's own command to the pages that a person looks at, publishing to an object store."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from infra.ports import free_port
from t5train.verify import verify

pytestmark = pytest.mark.slow

NUM_STEPS = 100
SETTINGS = {
    "tokenizer.vocab_size": 500,
    "model.d_model": 32,
    "model.d_ff": 64,
    "objective.input_tokens": 32,
    "optimizer.num_steps": NUM_STEPS,
    "optimizer.warmup_steps": 10,
    "storage.checkpoint_every_steps": 50,
    "storage.validate_every_steps": 50,
    "storage.validate_sequences": 32,
}
STAGES = ("corpus", "tokenizer", "shards", "train", "consolidate", "export", "certify", "publish")


class Watched(NamedTuple):
    """A run that has ended, and what was seen of it while it trained."""

    server: str
    id: str
    published: str
    artifacts_while_training: str
    command_lines: str
    """Of all processes of this machine while it trained."""
    ask: Callable[[str, dict[str, object]], Any]

    def artifact(self, key: str) -> str:
        """URL of the page of an artifact."""
        (found,) = self.ask("artifacts", {"artifacts": {"key": {"any_": [key]}}})
        return f"{self.server}/artifacts/artifact/{found['id']}"


@pytest.fixture(scope="module")
def watched(
    page: Any, up: Any, post: Any, object_store: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Watched]:
    root, port = tmp_path_factory.mktemp("root"), free_port()
    server, published = f"http://127.0.0.1:{port}", f"{object_store.url}/watched/t5"

    def ask(what: str, query: dict[str, object]) -> Any:
        return post(f"{server}/api/{what}/filter", query)

    with up(root, port, **object_store.environment):
        _deployment_run(root / "prefect", f"{server}/api", {"settings": json.dumps(SETTINGS), "publish_to": published})
        (run,) = ask("flow_runs", {})
        _wait(lambda: _says(ask, "progress-train", "steps, loss"), ask)
        page.open(f"{server}/runs/flow-run/{run['id']}")
        page.click("Artifacts")
        seen = page.text("progress-train", "steps, loss")
        assert ask("flow_runs", {})[0]["state_type"] == "RUNNING"
        command_lines = _command_lines()
        _wait(lambda: ask("flow_runs", {})[0]["state_type"] == "COMPLETED", ask)
        yield Watched(server, run["id"], published, seen, command_lines, ask)


def _deployment_run(home: Path, api_url: str, parameters: dict[str, str]) -> None:
    command = [str(Path(sys.executable).with_name("prefect")), "deployment", "run", "t5-pretrain/smoke"]
    command += [word for name, value in parameters.items() for word in ("--param", f"{name}={value}")]
    environment = os.environ | {"PREFECT_HOME": str(home), "PREFECT_API_URL": api_url, "DO_NOT_TRACK": "1"}
    subprocess.run(command, env=environment, check=True, capture_output=True)


def _wait(condition: Callable[[], bool], ask: Callable[[str, dict[str, object]], Any]) -> None:
    deadline = time.monotonic() + 300  # ample, for machines that do other work too
    while not condition():
        (run,) = ask("flow_runs", {})
        assert run["state_type"] not in ("FAILED", "CRASHED"), run["state"]
        assert time.monotonic() < deadline, run
        time.sleep(0.2)


def _says(ask: Callable[[str, dict[str, object]], Any], key: str, text: str) -> bool:
    return any(text in each["description"] for each in ask("artifacts", {"artifacts": {"key": {"any_": [key]}}}))


def _command_lines() -> str:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_bytes().replace(b"\0", b" ").decode("utf-8", "replace"))
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has just ended
    return "\n".join(found)


def test_steps_and_loss_are_seen_while_it_trains(watched: Watched) -> None:
    assert re.search(rf"\d+ of {NUM_STEPS} steps, loss \d+\.\d+, [\d,]+ tokens/s", watched.artifacts_while_training)


def test_a_table_shows_what_each_stage_made(watched: Watched, page: Any) -> None:
    page.open(watched.artifact("stages"))
    page.text("What each stage made", *STAGES)
    rows = page.value("[...document.querySelectorAll('tbody tr')].map(each => each.innerText)")
    assert [row.split()[:2] for row in rows] == [[stage, "made"] for stage in STAGES]


def test_the_summary_shows_the_losses_and_the_curve(watched: Watched, page: Any) -> None:
    page.open(watched.artifact("summary"))
    page.text("validation, non-sentinel targets", "unigram frequencies", "inputs shuffled", watched.published)
    page.text("checkpoints, for which training stood still")
    page.wait_until("document.querySelector('img[alt=\"Training and validation loss\"]')?.naturalWidth > 0")


def test_the_published_place_is_told_and_verifies(watched: Watched, page: Any, s3: Any) -> None:
    page.open(watched.artifact("published"))
    page.text(f"t5-pretrain verify {watched.published}", f"published: {watched.published}")
    verify(watched.published)


def test_credentials_reach_neither_prefect_nor_a_command_line(watched: Watched, object_store: Any) -> None:
    told = [watched.ask(what, {}) for what in ("flow_runs", "task_runs", "logs", "artifacts", "deployments")]
    assert all(told)
    said = json.dumps(told) + watched.command_lines
    assert watched.published in said
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        assert object_store.environment[name] not in said
