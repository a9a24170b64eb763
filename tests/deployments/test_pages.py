"""A deployed run, from Prefect's own command to the pages that a person looks at, publishing to an object store."""

import json
import os
import re
import subprocess
import sys
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

import pytest

from infra.node.ports import free_port
from infra.node.processes import RUN_ID_VARIABLE
from t5train.release.verification import verify

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
    """The command lines of all processes of this machine while it trained."""
    rank_environments: str
    """The environments of the ranks of this run."""
    root: Path
    ask: Callable[[str, dict[str, object]], Any]

    def artifact(self, key: str) -> str:
        """URL of the page of an artifact."""
        (found,) = self.ask("artifacts", {"artifacts": {"key": {"any_": [key]}}})
        return f"{self.server}/artifacts/artifact/{found['id']}"


@pytest.fixture(scope="module")
def watched(
    page: Any, up: Any, ask: Any, object_store: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Watched]:
    root, user, port = tmp_path_factory.mktemp("root"), tmp_path_factory.mktemp("user"), free_port()
    server, published = f"http://127.0.0.1:{port}", f"{object_store.url}/watched/t5"

    def filtered(what: str, query: dict[str, object]) -> Any:
        return ask(root / "prefect", f"{server}/api/{what}/filter", query)

    with up(root, port, PREFECT_HOME=str(user / ".prefect"), **object_store.environment):
        _deployment_run(user, {"settings": json.dumps(SETTINGS), "publish_to": published}, root / "pwned")
        (run,) = filtered("flow_runs", {})
        _wait(lambda: _says(filtered, "progress-train", "steps, loss"), filtered)
        page.log_in(server, (root / "prefect/api-key").read_text().strip())
        page.open(f"{server}/runs/flow-run/{run['id']}")
        page.click("Artifacts")
        seen = page.text("progress-train", "steps, loss")
        assert filtered("flow_runs", {})[0]["state_type"] == "RUNNING"
        command_lines, rank_environments = _of_processes("cmdline"), _of_processes("environ", f"{RUN_ID_VARIABLE}=")
        _wait(lambda: filtered("flow_runs", {})[0]["state_type"] == "COMPLETED", filtered)
        yield Watched(server, run["id"], published, seen, command_lines, rank_environments, root, filtered)


def _deployment_run(user: Path, parameters: dict[str, str], marker: Path) -> None:
    """Start the run from a fresh shell that sets only HOME, and ask for another command instead of the flow."""
    command = [str(Path(sys.executable).with_name("prefect")), "deployment", "run", "t5-pretrain/smoke"]
    command += [word for name, value in parameters.items() for word in ("--param", f"{name}={value}")]
    command += ["--job-variable", f"command=touch {marker}"]
    result = subprocess.run(command, env={"HOME": str(user)}, cwd="/", capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def _wait(condition: Callable[[], bool], ask: Callable[[str, dict[str, object]], Any]) -> None:
    deadline = time.monotonic() + 300  # ample, for machines that do other work too
    while not condition():
        (run,) = ask("flow_runs", {})
        assert run["state_type"] not in ("FAILED", "CRASHED"), run["state"]
        assert time.monotonic() < deadline, run
        time.sleep(0.2)


def _says(ask: Callable[[str, dict[str, object]], Any], key: str, text: str) -> bool:
    return any(text in each["description"] for each in ask("artifacts", {"artifacts": {"key": {"any_": [key]}}}))


def _of_processes(file: str, wanted: str = "") -> str:
    """The contents of a file in /proc of all processes whose environment contains ``wanted``."""
    found = []
    for path in Path("/proc").glob(f"[0-9]*/{file}"):
        try:
            if wanted.encode() in path.with_name("environ").read_bytes():
                found.append(path.read_bytes().replace(b"\0", b" ").decode("utf-8", "replace"))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # it has just ended, or is another user's
    return "\n".join(found)


def test_steps_and_loss_are_shown_while_a_run_trains(watched: Watched) -> None:
    assert re.search(rf"\d+ of {NUM_STEPS} steps, loss \d+\.\d+, [\d,]+ tokens/s", watched.artifacts_while_training)


def test_a_table_shows_the_result_of_each_stage(watched: Watched, page: Any) -> None:
    page.open(watched.artifact("stages"))
    page.text("Result of each stage", *STAGES)
    rows = page.value("[...document.querySelectorAll('tbody tr')].map(each => each.innerText)")
    assert [row.split()[:2] for row in rows] == [[stage, "made"] for stage in STAGES]


def test_the_summary_shows_the_losses_and_the_curve(watched: Watched, page: Any) -> None:
    page.open(watched.artifact("summary"))
    page.text("validation, non-sentinel targets", "unigram frequencies", "inputs shuffled", watched.published)
    page.text("checkpoints, which paused training for")
    page.wait_until("document.querySelector('img[alt=\"Training and validation loss\"]')?.naturalWidth > 0")


def test_the_publications_url_is_shown_and_the_publication_verifies(watched: Watched, page: Any, s3: Any) -> None:
    page.open(watched.artifact("published"))
    page.text(f"t5-pretrain verify {watched.published}", f"published: {watched.published}")
    verify(watched.published)


def test_a_run_cannot_replace_the_command_of_its_process(watched: Watched) -> None:
    (run,) = watched.ask("flow_runs", {})
    assert "touch" in run["job_variables"]["command"]
    assert not (watched.root / "pwned").exists()


def test_a_page_of_another_origin_can_neither_read_nor_start_runs(watched: Watched, page: Any, tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text("<title>elsewhere</title>")
    (deployment, *_) = watched.ask("deployments", {})
    create = f"{watched.server}/api/deployments/{deployment['id']}/create_flow_run"
    key = json.dumps((watched.root / "prefect/api-key").read_text().strip())
    authorized = f"{{method: 'POST', body: '{{}}', headers: {{Authorization: 'Basic ' + btoa({key})}}}}"
    with _pages_of(tmp_path) as other:
        page.open(other)
        page.wait_until("document.title === 'elsewhere'")
        assert (
            page.value(f"fetch('{watched.server}/api/health').then(() => 'read', error => error.name)") == "TypeError"
        )
        assert page.value(f"fetch('{create}', {authorized}).then(() => 'sent', error => error.name)") == "TypeError"
        blind = "{method: 'POST', body: '{}', mode: 'no-cors', credentials: 'include'}"  # sent without a preflight
        assert page.value(f"fetch('{create}', {blind}).then(each => each.type)") == "opaque"
    assert [run["id"] for run in watched.ask("flow_runs", {})] == [watched.id]
    page.open(watched.server)
    page.wait_until("document.title.includes('Prefect')")
    assert page.value(f"fetch('{watched.server}/api/health').then(each => each.status)") == 200


@contextmanager
def _pages_of(folder: Path) -> Iterator[str]:
    """A web server on its own port, which makes its pages another origin."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=folder)) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/index.html"
        finally:
            server.shutdown()
            thread.join()


def test_the_key_is_in_its_file_and_nowhere_else(watched: Watched) -> None:
    key = (watched.root / "prefect/api-key").read_text().strip()
    forms = [key.partition(":")[2].encode(), b64encode(key.encode())]
    contents = dict[Path, bytes]()
    for path in (Path(folder, name) for folder, _, names in os.walk(watched.root) for name in names):
        with suppress(FileNotFoundError):  # the server may remove a run's record while the test reads
            contents |= {path: path.read_bytes()} if path.is_file() else {}
    del contents[watched.root / "prefect/api-key"]
    assert {"prefect.db", "server.log", "worker.log"} < {path.name for path in contents}
    assert [path for path, content in contents.items() if any(form in content for form in forms)] == []
    assert "RANK=" in watched.rank_environments
    for form in forms:
        assert form.decode() not in watched.command_lines + watched.rank_environments


def test_credentials_reach_neither_prefect_nor_a_command_line(watched: Watched, object_store: Any) -> None:
    records = [watched.ask(what, {}) for what in ("flow_runs", "task_runs", "logs", "artifacts", "deployments")]
    assert all(records)
    content = json.dumps(records) + watched.command_lines
    assert watched.published in content
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        assert object_store.environment[name] not in content
