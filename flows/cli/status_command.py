"""``status``: the runs under a root and their progress. Only reads files."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import typer

from flows.cli.options import RootOption, root_of
from flows.cli.terminal import say, show_table
from infra.node.attempts.run_lock import holder
from t5train.files.presence import visible_in
from t5train.files.run_folder import EXPORT, METRICS, PUBLISHED, RUNS, WEIGHTS
from t5train.records.metrics import last_metrics
from t5train.records.stage_records import MANIFEST
from t5train.release.certificate import CERTIFICATE


class RunStatus(NamedTuple):
    """The status of a run, as read from its folder."""

    name: str
    stage: str
    """The last finished stage."""
    step: str
    loss: str
    locked_by: str
    published: str


def register(app: typer.Typer) -> None:
    """Add the command of this module."""
    app.command()(status)


def status(root: RootOption = None) -> None:
    """List the runs under a root: last stage, step, last loss, process that holds its lock, and publication."""
    runs = root_of(root) / RUNS
    folders = [path for path in visible_in(runs) if path.is_dir()]
    if not folders:
        say(f"there are no runs in {runs}")
        return
    rows = [list(run_status(folder)) for folder in folders]
    show_table([name.replace("_", " ") for name in RunStatus._fields], rows)


def run_status(folder: Path) -> RunStatus:
    """Return the status of one run."""
    line = last_metrics(folder / METRICS) or {}
    loss = line.get("loss")
    published = _read(folder / PUBLISHED).get("url")
    return RunStatus(
        name=folder.name,
        stage=_stage(folder),
        step=f"{line['step']:,}" if line else "-",
        loss=f"{loss:.4f}" if loss is not None else "-",
        locked_by=holder(folder) or "-",
        published=published or "-",
    )


def _stage(folder: Path) -> str:
    """Return the last finished stage. Every stage writes a file when it is done."""
    consolidated = [weights / MANIFEST for weights in visible_in(folder / WEIGHTS)]
    signs = {
        "published": [folder / PUBLISHED],
        "certified": [folder / EXPORT / CERTIFICATE],
        "exported": [folder / EXPORT / MANIFEST],
        "consolidated": consolidated,
        "trained": [folder / MANIFEST],
        "training": [folder / METRICS],
    }
    return next((stage for stage, made in signs.items() if any(path.exists() for path in made)), "begun")


def _read(path: Path) -> dict[str, Any]:
    """Read a small JSON file; empty if it is missing or incomplete."""
    try:
        found: dict[str, Any] = json.loads(path.read_text("utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return {}
    return found
