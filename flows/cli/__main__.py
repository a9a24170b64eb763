"""``t5-pretrain``: the one console script."""

import os
import signal
import sys
from typing import NoReturn

import typer

from flows.cli import gc_command, preflight_command, run_command, server_commands, stage_commands, status_command
from flows.cli.terminal import complain
from t5train.errors import T5TrainError
from t5train.files.os_errors import explain

app = typer.Typer(
    name="t5-pretrain",
    help="From text to a published, certified T5 checkpoint.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for commands in (run_command, preflight_command, stage_commands, status_command, gc_command, server_commands):
    commands.register(app)
_INTERRUPTED = 128 + signal.SIGINT


def main() -> NoReturn:
    """Run a command.

    The exit code is 0 when it succeeded, 1 with one line for an error, 2 for wrong usage, 3 when training is done and
    its result is still to be gathered, and 130 for Ctrl-C.
    """
    try:
        app()
    except T5TrainError as error:
        complain(f"error: {error}")
        sys.exit(error.exit_code)
    except SystemExit as ended:
        if ended.code == _INTERRUPTED:  # what typer makes of Ctrl-C, without a word
            complain("interrupted")
        raise
    except BrokenPipeError:
        # Who read our output has gone; without this, Python complains once more while it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        complain(f"error: {explain(error)}")
    sys.exit(1)
