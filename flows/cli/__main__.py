"""``t5-pretrain``: the command line."""

import os
import platform
import signal
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, NoReturn

import typer

from flows.cli import (
    bench_command,
    config_commands,
    data_commands,
    model_commands,
    preflight_command,
    run_command,
    stage_commands,
)
from flows.cli.command_help import Group, add_help
from flows.cli.operate import gc_command, regression_command, server_commands, team_commands, worker_command
from flows.cli.runs import rm_command, status_command
from flows.cli.terminal import complain, say
from t5train.errors import T5TrainError
from t5train.files.os_errors import explain

app = typer.Typer(
    name="t5-pretrain",
    help="From text to a published, certified T5 checkpoint.",
    cls=Group,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)


def _print_versions(asked: bool) -> None:
    if asked:
        others = ", ".join(f"{name} {_version(name)}" for name in ("torch", "deepspeed", "transformers", "prefect"))
        say(f"t5-pretrain {_version('t5-pretrain')}\nPython {platform.python_version()}, {others}")
        raise typer.Exit


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


@app.callback()
def _options(
    _: Annotated[
        bool,
        typer.Option("--version", callback=_print_versions, is_eager=True, help="Show the versions and exit."),
    ] = False,
) -> None:
    """Take the options before the name of a command."""


for commands in (
    run_command,
    config_commands,
    preflight_command,
    stage_commands,
    data_commands,
    model_commands,
    status_command,
    rm_command,
    gc_command,
    bench_command,
    regression_command,
    server_commands,
    team_commands,
    worker_command,
):
    commands.register(app)
add_help(app)
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
