"""A person operates runs in the browser: logs in, finds the deployments, starts runs from the form, and cancels one."""

import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from flows.deployment.definitions import Definitions
from infra.node.ports import free_port
from infra.node.processes import RUN_ID_VARIABLE
from t5train.checkpoint.resume_point import resume_tag
from t5train.spec.recipes import trial_settings
from tests.support import paced_training
from tests.support.generated_text import TINY, write_jsonl

pytestmark = [pytest.mark.slow, pytest.mark.ui]

CANCEL_SECONDS = 30.0
BUSY_SECONDS = 300.0
"""Ample time, for machines that do other work too."""
LONG = 100_000
"""So many steps that a run trains until it is cancelled."""
FIELD = """
(name) => {
    const labels = [...document.querySelectorAll("label, .p-label__label, .p-label")]
    const label = labels.find(each => each.innerText.split("\\n")[0].replace(" (Optional)", "").trim() === name)
    const field = label?.closest(".p-label")?.querySelector("input, textarea")
    field?.focus()
    return Boolean(field)
}
"""


class Operated(NamedTuple):
    """A server with a worker, whose deployments make small runs, and a browser in which a person has logged in."""

    page: Any
    server: str
    root: Path
    query: Callable[[str, dict[str, object]], Any]

    def deployment_id(self, name: str) -> str:
        (found,) = self.query("deployments", {"deployments": {"name": {"any_": [name]}}})
        return str(found["id"])

    def start(self, deployment: str, **fields: object) -> str:
        """Start a run from the form of a deployment, with these fields filled in; returns its id."""
        known = {each["id"] for each in self.query("flow_runs", {})}
        self.page.open(f"{self.server}/deployments/deployment/{self.deployment_id(deployment)}/run")
        self.page.text("Validate parameters", "Submit")
        for name, value in fields.items():
            self.page.wait_until(f"({FIELD})({json.dumps(name)})")
            self.page.send("Input.insertText", text=str(value))
            self.page.wait_until(f"document.activeElement.value === {json.dumps(str(value))}")
        (run,) = self._submitted(known)
        return run

    def _submitted(self, known: set[str]) -> set[str]:
        """Submit the form, and return the runs that are not among those known before."""
        deadline, click_at = time.monotonic() + BUSY_SECONDS, 0.0
        while not (new := {str(each["id"]) for each in self.query("flow_runs", {})} - known):
            assert time.monotonic() < deadline
            # Until the page has loaded its parts, it ignores a click. While it submits, it ignores another one.
            if time.monotonic() >= click_at and self.page.value("location.pathname.endsWith('/run')"):
                self.page.click("Submit")
                click_at = time.monotonic() + 5
            time.sleep(0.2)
        return new

    def state(self, run: str) -> tuple[str, str]:
        """The type and the message of a run's state."""
        (found,) = self.query("flow_runs", {"flow_runs": {"id": {"any_": [run]}}})
        return found["state_type"], found["state"]["message"] or ""

    def see(self, run: str, *awaited: str) -> str:
        """Open the page of a run, and return its text once it contains all that is awaited."""
        self.page.open(f"{self.server}/runs/flow-run/{run}")
        return str(self.page.text(*awaited))


@pytest.fixture(scope="module")
def operated(page: Any, up: Any, ask: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operated]:
    root, port = tmp_path_factory.mktemp("operated"), free_port()
    server = f"http://127.0.0.1:{port}"
    text = str(write_jsonl(tmp_path_factory.mktemp("text") / "text.jsonl", 400))
    small = trial_settings("smoke") | TINY | {"corpus.source": text, "storage.checkpoint_every_steps": 5}
    options = [word for name, value in small.items() for word in ("--set", f"{name}={json.dumps(value)}")]
    # Its ranks sleep in each step: one of the runs trains until it is cancelled.
    with up(root, port, *options, **paced_training.environment_of(tmp_path_factory.mktemp("paces"))):
        page.log_in(server, (root / "prefect/api-key").read_text().strip())
        yield Operated(
            page, server, root, lambda what, query: ask(root / "prefect", f"{server}/api/{what}/filter", query)
        )


def wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + BUSY_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def processes_of(run_folder: Path) -> list[str]:
    """The command lines of the processes that belong to a run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"{RUN_ID_VARIABLE}=".encode() in path.read_bytes():
                found.append(path.with_name("cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace"))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # it has just ended, or is another user's
    return [each for each in found if str(run_folder) in each]


def test_the_deployments_are_listed(operated: Operated, screenshot: Callable[[str], None]) -> None:
    names = {each.name for each in Definitions.load().deployments}
    operated.page.open(f"{operated.server}/deployments")
    listed = operated.page.text(f"{len(names)} Deployments", "Page 1 of 2").split()
    assert len(names & set(listed)) == 10, "a page lists ten"
    screenshot("deployments")


def test_a_run_that_cannot_start_fails_with_its_cause_on_the_first_screen(
    operated: Operated, screenshot: Callable[[str], None]
) -> None:
    run = operated.start("moe", steps=5)
    wait(lambda: operated.state(run)[0] == "FAILED")
    cause = "optimizer.warmup_steps is 10: it must be below optimizer.num_steps (5)"
    assert cause in operated.state(run)[1]
    operated.see(run, cause)
    operated.page.on_first_screen(re.escape(cause))
    screenshot("failed-run")


def test_a_run_that_is_cancelled_on_its_page_ends_everywhere_and_leaves_a_checkpoint(
    operated: Operated, screenshot: Callable[[str], None]
) -> None:
    run, folder = operated.start("moe", steps=LONG, run_name="cancelled"), operated.root / "runs/cancelled"
    checkpoints = folder / "checkpoints"
    wait(lambda: checkpoints.is_dir() and any(checkpoints.glob("step-*")))
    assert len(processes_of(folder)) > 2, "the ranks and their guard"
    operated.see(run, "Cancel", "steps, training loss")
    screenshot("running-run")
    operated.page.click("Cancel")
    operated.page.click("Confirm")
    asked = time.monotonic()
    wait(lambda: not processes_of(folder))
    ended = time.monotonic() - asked
    assert ended < CANCEL_SECONDS, f"the processes ended after {ended:.1f} s"
    wait(lambda: operated.state(run)[0] == "CANCELLED")
    assert resume_tag(folder) is not None
    operated.see(run, "Cancelled")
