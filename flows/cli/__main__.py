"""``t5-pretrain``: the command line."""

import os
import signal
import sys
from typing import NoReturn

import typer

from flows.cli import (
    bench_command,
    gc_command,
    model_commands,
    preflight_command,
    regression_command,
    run_command,
    server_commands,
    stage_commands,
    status_command,
    team_commands,
    worker_command,
)
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
for commands in (
    run_command,
    preflight_command,
    stage_commands,
    model_commands,
    status_command,
    gc_command,
    bench_command,
    regression_command,
    server_commands,
    team_commands,
    worker_command,
):
    commands.register(app)
_INTERRUPTED = 128 + signal.SIGINT


def main() -> NoReturn:
    """Run a command.

    The exit code is 0 on success, 1 (and one line on standard error) for an error, 2 for wrong usage, 3 if training is
    done but its result is not yet gathered, and 130 for Ctrl-C.
    """
    try:
        app()
    except T5TrainError as error:
        complain(f"error: {error}")
        sys.exit(error.exit_code)
    except SystemExit as ended:
        if ended.code == _INTERRUPTED:  # typer's exit code for Ctrl-C, which prints nothing
            complain("interrupted")
        raise
    except BaseExceptionGroup as group:
        if group.subgroup(KeyboardInterrupt) is None:
            raise
        complain("interrupted")  # Ctrl-C while Prefect's client was waiting, which wraps the interrupt
        sys.exit(_INTERRUPTED)
    except BrokenPipeError:
        # The reader of our output has gone; without this, Python reports another error when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        complain(f"error: {explain(error)}")
    sys.exit(1)


if __name__ == "__main__":
    main()
