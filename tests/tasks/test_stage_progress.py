"""Progress of stages as Prefect artifacts."""

import logging

import pytest

from tasks import stage_progress
from tasks.stage_progress import StageProgress


def test_a_stage_continues_if_the_server_does_not_respond(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def gone(*_arguments: object) -> None:
        raise ConnectionError("connection refused")

    monkeypatch.setattr(stage_progress, "create_progress_artifact", gone)
    monkeypatch.setattr(stage_progress, "SECONDS_UNTIL_SHOWN", 0)
    with caplog.at_level(logging.WARNING):
        StageProgress("train")("steps", 3, 10)
    assert "could not show the progress of train: ConnectionError: connection refused" in caplog.text
