"""``status``: the runs under a root and their progress, or the whole story of one run. Only reads files."""

import json
from dataclasses import asdict
from typing import Annotated

import typer

from flows.cli.options import RootOption, existing_root, runs_like
from flows.cli.runs.run_table import show_runs
from flows.cli.runs.story_text import story_lines
from flows.cli.terminal import say
from infra.head.runs.run_lookup import find_run
from infra.head.runs.run_state import run_states
from infra.head.runs.run_story import RunStory, run_story

RunArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="[RUN]", help="Run to tell everything about: its name, or its folder", autocompletion=runs_like
    ),
]
JSON_SCHEMA_VERSION = 1


def status(
    run: RunArgument = None,
    root: RootOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with keys that do not change")] = False,
) -> None:
    """List the runs under a root: state, step, loss, speed, time left, last error. With RUN, tell its whole story.

    Examples: `t5-pretrain status`, `t5-pretrain status smoke-1a2b3c4d`, `t5-pretrain status --json`.
    """
    folder = existing_root(root)
    if run is not None:
        story = run_story(find_run(folder, run))
        if as_json:
            _say_json(_story_values(story))
        else:
            for line in story_lines(story):
                say(line)
        return
    states = run_states(folder)
    if as_json:
        _say_json({"root": str(folder), "runs": [asdict(state) for state in states]})
    elif states:
        show_runs(states)
    else:
        say(f"no runs yet under {folder}; --root names another folder")


def _story_values(story: RunStory) -> dict[str, object]:
    """The values of a story, with those of its state beside the others."""
    return asdict(story.state) | {name: value for name, value in asdict(story).items() if name != "state"}


def _say_json(values: dict[str, object]) -> None:
    say(json.dumps({"schema_version": JSON_SCHEMA_VERSION} | values, indent=1, default=str))
