"""The verdict on a night does not depend on whether it can be shown."""

import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from infra.head.regression.night_run import Night
from t5train.regression.night_report import PLOT
from tasks import regression_tasks, run_page
from tasks.regression_tasks import show_night
from tests.support.night_cases import case_result, night_result

SHOWING = [
    (regression_tasks, "emit_event"),
    (run_page, "create_table_artifact"),
    (run_page, "create_image_artifact"),
]


@pytest.mark.parametrize(
    "broken", [[], SHOWING, SHOWING[:1], SHOWING[1:]], ids=["nothing", "everything", "events", "artifacts"]
)
def test_what_cannot_be_shown_is_a_warning_and_the_rest_is_shown(
    broken: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shown = list[str]()

    def gone(*_arguments: object, **_more: object) -> None:
        raise ConnectionError("All connection attempts failed")

    def noting(name: str) -> Callable[..., None]:
        return lambda *_arguments, **_more: shown.append(name)

    for each in SHOWING:
        monkeypatch.setattr(*each, gone if each in broken else noting(each[1]))
    (tmp_path / PLOT).write_bytes(b"a picture")
    with caplog.at_level(logging.WARNING):
        show_night.fn(cast(Night, SimpleNamespace(folder=tmp_path)), night_result(case_result()))
    assert shown == [name for module, name in SHOWING if (module, name) not in broken], "the event comes first"
    assert caplog.text.count("All connection attempts failed") == len(broken)
