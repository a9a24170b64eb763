"""What a user sees when a stage is run by itself."""

import errno
import io
import logging
from unittest.mock import Mock

import pytest
from rich.console import Console

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


def test_escape_sequences_are_removed_from_output_and_cells_of_tables_stay_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    hostile = "b\x1b[2Jucket\x1b]0;title\x07 \x9b5mis\r gone\x08\n\tfor good"
    with stage_display():
        logging.getLogger("t5train.records.stage_records").warning("%s", hostile)
    terminal.say(hostile)
    terminal.complain(hostile)
    terminal.show_table(["what"], [[hostile]])
    captured = capsys.readouterr()
    fit = "bucket 5mis gone\n\tfor good\n"
    assert captured.err == fit.expandtabs(8) + fit
    assert captured.out == fit + "what\n" + "bucket 5mis gone\\n\\tfor good\n"


def test_lines_of_progress_say_how_long_the_rest_takes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [1000.0]
    monkeypatch.setattr(terminal.time, "monotonic", lambda: now[0])
    with terminal.progress_display() as progress:
        for done, loss in enumerate(("2.5", "2.4", "2.3")):
            progress(f"sequences evaluated, loss {loss}", done, 10)
            now[0] += 60
    assert capsys.readouterr().err.splitlines()[-1] == "2 of 10 (20 %) sequences evaluated, loss 2.3, 8 min 0 s left"


def test_a_bar_shows_the_amount_of_work_if_it_is_known_and_disappears_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=100, color_system=None)
    monkeypatch.setattr(terminal, "Console", lambda **_: console)
    with terminal.progress_display() as progress:
        assert isinstance(progress, terminal.BarProgress)
        progress("steps, loss 2.500", 1_250, 65_536)
        progress._bars.refresh()
        assert "steps, loss 2.500" in screen.getvalue()
        assert "1,250/65,536" in screen.getvalue()
        progress("s since the last step, saving", 12, None)
        progress._bars.refresh()
        assert "12 s since the last step, saving" in screen.getvalue()
        assert "12/?" not in screen.getvalue()
    assert screen.getvalue().endswith("\x1b[1A\x1b[2K"), "the line of the bar is erased"


def test_standard_output_is_named_if_its_disk_is_full_and_left_alone_if_it_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    full = Mock(write=Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    monkeypatch.setattr("sys.stdout", full)
    with pytest.raises(OSError, match="No space left on device: 'standard output'"):
        terminal.say("a line")
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(f"sys.{name}", None)
    terminal.say("nobody reads this")
    terminal.complain("nor this")
