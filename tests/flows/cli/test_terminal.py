"""What a user sees when a stage is run by itself."""

import logging

import pytest

from flows.cli import terminal
from flows.cli.terminal import stage_display


def test_library_log_lines_are_shown_only_while_a_stage_runs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    log = logging.getLogger("t5train.checkpoint.resume")
    with stage_display():
        log.info("resuming %s from %s", "mine", "step-00000010")
        log.warning("[bold] is no markup, text:100: no picture, and a long line stays one: %s", "x" * 200)
    log.info("later")
    assert capsys.readouterr().err == (
        "resuming mine from step-00000010\n"
        f"[bold] is no markup, text:100: no picture, and a long line stays one: {'x' * 200}\n"
    )


def test_escape_sequences_from_stores_and_hosts_are_removed_from_output(capsys: pytest.CaptureFixture[str]) -> None:
    hostile = "b\x1b[2Jucket\x1b]0;title\x07 \x9b5mis\r gone\x08\n\tfor good"
    with stage_display():
        logging.getLogger("t5train.records.stage_records").warning("%s", hostile)
    terminal.say(hostile)
    terminal.complain(hostile)
    terminal.show_table(["what"], [[hostile]])
    captured = capsys.readouterr()
    fit = "bucket 5mis gone\n\tfor good\n"
    assert captured.err == fit.expandtabs(8) + fit
    assert captured.out == fit + "what\n" + fit
