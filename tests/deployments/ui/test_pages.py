"""A deployed run, from Prefect's own command to the pages that a person looks at, publishing to an object store."""

import json
import os
import re
import sqlite3
import subprocess
import sys
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

import pytest

from infra.node.ports import free_port
from infra.node.processes import RUN_ID_VARIABLE
from t5train.release.verification import verify
from t5train.spec.recipes import trial_settings
from tests.support import paced_training
from tests.support.generated_text import TINY, write_jsonl

pytestmark = [pytest.mark.slow, pytest.mark.ui]

NUM_STEPS = paced_training.HELD + 20
SETTINGS = trial_settings("smoke") | TINY
SETTINGS |= {
    "optimizer.global_batch_sequences": 4,
    "layout.micro_batch_sequences": 2,
    "optimizer.num_steps": NUM_STEPS,
    "storage.checkpoint_every_steps": NUM_STEPS // 2,
    "storage.validate_every_steps": NUM_STEPS // 4,
}
del SETTINGS["corpus.source"]  # the run has a smaller text
STAGES = ("Get the text", "Train the tokenizer", "Tokenise", "Train", "Consolidate to fp32", "Export to Hugging Face")
STAGES += ("Certify", "Publish")
LOSS = r"training loss \(all target tokens\) \d+\.\d+ nats/token"
TITLE = rf"moe: Train: [\d,]+ of {NUM_STEPS:,} steps, training loss \d+\.\d+ nats/token, .* left"


class Watched(NamedTuple):
    """A run that has ended, and what was seen of it while it trained."""

    server: str
    id: str
    published: str
    title_while_training: str
    """The text on the first screen of its page."""
    artifacts_while_training: str
    plot_while_training: str
    """The URL of the picture."""
    failed_id: str
    """A run that failed."""
    command_lines: str
    """The command lines of all processes of this machine while it trained."""
    rank_environments: str
    """The environments of the ranks of this run."""
    root: Path
    text: Path
    ask: Callable[[str, dict[str, object]], Any]

    def artifact(self, key: str, run_id: str | None = None) -> str:
        """URL of the page of an artifact of a run; of the one that succeeded if left out."""
        return f"{self.server}/artifacts/artifact/{_artifact(self.ask, key, run_id or self.id)['id']}"


@pytest.fixture(scope="module")
def watched(
    page: Any, up: Any, ask: Any, object_store: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Watched]:
    root, user, port = tmp_path_factory.mktemp("root"), tmp_path_factory.mktemp("user"), free_port()
    server, bucket = f"http://127.0.0.1:{port}", f"{object_store.url}/watched"
    text, paces = write_jsonl(user / "text.jsonl", 400), user / "paces"
    options = ["--corpus", str(text), "--publish-to", bucket]
    options += [word for name, value in SETTINGS.items() for word in ("--set", f"{name}={json.dumps(value)}")]
    paced = paced_training.environment_of(paces)

    def filtered(what: str, query: dict[str, object]) -> Any:
        return ask(root / "prefect", f"{server}/api/{what}/filter", query)

    with up(root, port, *options, PREFECT_HOME=str(user / ".prefect"), **object_store.environment, **paced):
        page.log_in(server, (root / "prefect/api-key").read_text().strip())
        page.open(f"{server}/runs")
        page.text("Runs")  # the parts of pages are loaded before training begins
        _deployment_run(user)
        (run,) = filtered("flow_runs", {})
        _wait(lambda: re.search(TITLE, filtered("flow_runs", {})[0]["name"]) is not None, filtered)
        page.open(f"{server}/runs/flow-run/{run['id']}")
        title = page.on_first_screen(TITLE)
        page.click("Artifacts")
        seen = page.text("progress-train", "steps, training loss")
        _wait(lambda: _artifact(filtered, "training", run["id"]) is not None, filtered)
        page.open(f"{server}/artifacts/artifact/{_artifact(filtered, 'training', run['id'])['id']}")
        plot = _picture(page)
        assert filtered("flow_runs", {})[0]["state_type"] == "RUNNING"
        command_lines, rank_environments = _of_processes("cmdline"), _of_processes("environ", f"{RUN_ID_VARIABLE}=")
        paced_training.go_on(paces)
        page.open("about:blank")  # a page that shows a run is drawn again and again
        _wait(lambda: filtered("flow_runs", {})[0]["state_type"] == "COMPLETED", filtered)
        published = f"{bucket}/{next((root / 'runs').iterdir()).name}"
        failed = _failed_run(user, root, filtered, run["id"])
        shown = title, seen, plot, failed
        yield Watched(server, run["id"], published, *shown, command_lines, rank_environments, root, text, filtered)


def _failed_run(user: Path, root: Path, ask: Callable[[str, dict[str, object]], Any], other: str) -> str:
    """Start a run that fails in its second stage, and return its id once it has failed."""
    # Too large for the checks before a run to try the vocabulary, which the repeated lines give too few pieces for.
    lines = "".join(f"The note {n} is about {n * n} things.\n" for n in range(300))
    (root / "notes.txt").write_text(lines * ((5 << 20) // len(lines)))
    settings = json.dumps({"corpus.source": str(root / "notes.txt"), "tokenizer.vocab_size": 30_000})
    parameters = ["--param", f"settings={settings}", "--param", "run_name=doomed"]
    _deployment_run(user, *parameters, "--job-variable", f"command=touch {root / 'pwned'}")
    deadline = time.monotonic() + 900
    while (found := [run for run in ask("flow_runs", {}) if run["id"] != other])[0]["state_type"] != "FAILED":
        assert time.monotonic() < deadline, found
        time.sleep(0.2)
    return str(found[0]["id"])


def _picture(page: Any) -> str:
    """The URL of the plot on the page of its artifact, once it is rendered."""
    picture = "[...document.images].find(each => each.src.startsWith('data:image/png') && each.naturalWidth === 900)"
    page.wait_until(f"Boolean({picture})")
    return str(page.value(f"{picture}.src"))


def _deployment_run(user: Path, *options: str) -> None:
    """Type ``prefect deployment run t5-pretrain/moe`` in a fresh shell that sets only HOME."""
    command = [str(Path(sys.executable).with_name("prefect")), "deployment", "run", "t5-pretrain/moe", *options]
    result = subprocess.run(command, env={"HOME": str(user)}, cwd="/", capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def _wait(condition: Callable[[], bool], ask: Callable[[str, dict[str, object]], Any]) -> None:
    deadline = time.monotonic() + 900  # ample, for machines that do other work too
    while not condition():
        (run,) = ask("flow_runs", {})
        assert run["state_type"] not in ("FAILED", "CRASHED"), run["state"]
        assert time.monotonic() < deadline, run
        time.sleep(0.2)


def _artifact(ask: Callable[[str, dict[str, object]], Any], key: str, run_id: str) -> Any:
    """The artifact of a run with this key; None if there is none."""
    query: dict[str, object] = {"artifacts": {"key": {"any_": [key]}}, "flow_runs": {"id": {"any_": [run_id]}}}
    return next(iter(ask("artifacts", query)), None)


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
    assert re.search(
        rf"\d+ of {NUM_STEPS:,} steps, {LOSS}, [\d,]+ tokens/s",
        watched.artifacts_while_training,
    )


def test_the_first_screen_of_a_run_shows_step_loss_and_time_left_while_it_trains(watched: Watched, page: Any) -> None:
    assert re.search(TITLE, watched.title_while_training)
    page.open(f"{watched.server}/runs/flow-run/{watched.id}")
    assert "tokens/s" not in page.on_first_screen("^moe$")


def test_the_plot_of_training_is_rendered_and_grows(
    watched: Watched, page: Any, screenshot: Callable[[str], None]
) -> None:
    page.open(watched.artifact("training"))
    page.text(f"Training up to step {NUM_STEPS:,} of {NUM_STEPS:,}")
    assert _picture(page) != watched.plot_while_training
    screenshot("plot")


def test_the_data_report_shows_text_vocabulary_tokens_and_epochs(watched: Watched, page: Any) -> None:
    page.open(watched.artifact("data"))
    page.text(
        f"Text from {watched.text}", "400 pieces", "tokens per passage", "epochs over the train split", "unknown piece"
    )


def test_the_proof_shows_what_was_compared(watched: Watched, page: Any) -> None:
    page.open(watched.artifact("proof"))
    page.text(
        "The certificate passed",
        "sha256 of each fp32 master",
        "Logits may differ by",
        "were joined",
        "certificate.json",
    )


def test_a_failed_runs_cause_is_on_the_first_screen_and_in_an_artifact(watched: Watched, page: Any) -> None:
    cause = "tokenizer.vocab_size is 30000: this corpus gives at most"
    page.open(f"{watched.server}/runs/flow-run/{watched.failed_id}")
    page.on_first_screen(f"doomed: Train the tokenizer failed: {cause}")
    run = next(run for run in watched.ask("flow_runs", {}) if run["id"] == watched.failed_id)
    assert run["state"]["message"].startswith(f"Train the tokenizer failed: {cause}")
    page.open(watched.artifact("failure", watched.failed_id))
    page.text("Train the tokenizer failed", f"Why: {cause}", "What to do:")
    assert cause in (watched.root / "runs/doomed/report/failure.md").read_text()


def test_every_report_is_in_the_folder_of_the_run(watched: Watched) -> None:
    (folder,) = (watched.root / "runs").glob("moe-*/report")
    names = ["data.md", "proof.md", "publication.md", "stages.md", "summary.md", "training.png"]
    assert sorted(path.name for path in folder.iterdir()) == names


def test_updates_of_artifacts_leave_nothing_in_the_servers_database(watched: Watched) -> None:
    with closing(sqlite3.connect(watched.root / "prefect/prefect.db")) as database:
        counts = dict(database.execute("SELECT event, COUNT(*) FROM events GROUP BY event").fetchall())
    assert counts["prefect.artifact.created"] >= len(STAGES)
    assert "prefect.artifact.updated" not in counts
    assert counts["prefect.flow-run.Running"] == 2


def test_a_table_shows_the_result_of_each_stage(watched: Watched, page: Any) -> None:
    page.open(watched.artifact("stages"))
    page.text("Result of each stage", *STAGES)
    rows = page.value("[...document.querySelectorAll('tbody tr')].map(each => each.innerText)")
    assert [row.split("\t")[0].strip() for row in rows] == list(STAGES)
    assert all("made" in row for row in rows)


def test_the_summary_shows_the_losses_and_the_curve(watched: Watched, page: Any) -> None:
    page.open(watched.artifact("summary"))
    page.text("validation, masked tokens", "unigram baseline", "inputs shuffled", watched.published)
    page.text("checkpoints, which paused training for")
    page.wait_until("document.querySelector('img[alt=\"Training and validation loss\"]')?.naturalWidth > 0")


def test_the_publications_url_is_shown_and_it_can_be_verified_fetched_and_loaded(
    watched: Watched, page: Any, s3: Any, tmp_path: Path
) -> None:
    page.open(watched.artifact("summary"))
    link = "[...document.links].find(each => each.textContent === 'Published model')"  # it opens in another tab
    page.wait_until(f"Boolean({link})")
    page.open(page.value(f"{link}.href"))
    page.text(f"t5-pretrain verify {watched.published}", f"published: {watched.published}")
    verify(watched.published)
    (report,) = (watched.root / "runs").glob("moe-*/report/publication.md")
    blocks = dict(
        re.findall("```(python|sh)\n(.*?)```", report.read_text(), re.DOTALL)
    )  # the last one of each language
    assert blocks["sh"].startswith(f"t5-pretrain fetch {watched.published} ")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for command in (["sh", "-c", blocks["sh"]], [sys.executable, "-c", blocks["python"]]):
        result = subprocess.run(
            command, cwd=tmp_path, env=os.environ | {"PATH": path}, capture_output=True, text=True, check=False
        )
        assert result.returncode == 0, result.stderr


def test_a_run_cannot_replace_the_command_of_its_process(watched: Watched) -> None:
    (run,) = (run for run in watched.ask("flow_runs", {}) if run["id"] == watched.failed_id)
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
    assert {run["id"] for run in watched.ask("flow_runs", {})} == {watched.id, watched.failed_id}
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
