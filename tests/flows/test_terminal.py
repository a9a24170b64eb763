"""What a person sees of a stage that is run by itself."""

import logging

import pytest

from flows.terminal import stage_display


def test_what_the_library_logs_is_seen_while_a_stage_runs_and_not_afterwards(
    capsys: pytest.CaptureFixture[str],
) -> None:
    log = logging.getLogger("t5train.train.run")
    with stage_display():
        log.info("resuming %s from %s", "mine", "step-00000010")
        log.warning("[bold] is no markup, text:100: no picture, and a long line stays one: %s", "x" * 200)
    log.info("later")
    assert capsys.readouterr().err == (
        "resuming mine from step-00000010\n"
        f"[bold] is no markup, text:100: no picture, and a long line stays one: {'x' * 200}\n"
    )
