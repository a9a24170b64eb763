"""``t5-pretrain``: the command line."""

import os
import platform
import re
import signal
import sys
import traceback
from typing import Annotated, Any, NoReturn

import typer

from flows.cli.command_help import Group
from flows.cli.early_interruption import INTERRUPTED
from flows.cli.terminal import complain, say
from t5train.errors import SpecError, StorageError, T5TrainError, printable
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
    from importlib.metadata import PackageNotFoundError, version  # takes a tenth of a second, and help does without

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


_PLAIN = {
    "Value error, ": "",
    "Input should be": "it must be",
    "a valid number, unable to parse string as a number": "a number",
    "a valid integer, unable to parse string as an integer": "a whole number",
}
"""What pydantic says, and what it means."""
_USAGE_ERROR: Any = typer.BadParameter.__base__
"""What typer raises for words that it cannot parse; typer itself exports only this one subclass."""


def main() -> NoReturn:
    """Run a command.

    The exit code is 0 on success, 130 for Ctrl-C, and otherwise that of the kind of error (``t5train.errors``), which
    is one line on standard error. Wrong usage counts as a wrong setting (2). Any other exception is a bug: a traceback,
    and the code of an error without a kind, because 1 says that a check found something.
    """
    try:
        code = app(standalone_mode=False)
    except T5TrainError as error:
        complain(f"error: {_shown(str(error))}")
        sys.exit(error.exit_code)
    except _USAGE_ERROR as error:
        if said := _usage(error):  # empty if typer has printed help because there were no words
            complain(said)
        sys.exit(SpecError.exit_code)
    except BaseExceptionGroup as group:
        if group.subgroup(KeyboardInterrupt) is None:
            raise _exit_of_bug(group) from group
        code = INTERRUPTED  # Ctrl-C while Prefect's client was waiting, which wraps the interrupt
    except BrokenPipeError:
        # The reader of our output has gone; without this, Python reports another error when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)
    except OSError as error:
        complain(f"error: {_shown(explain(error))}")
        sys.exit(StorageError.exit_code)
    except Exception as error:
        raise _exit_of_bug(error) from error
    if code == INTERRUPTED:  # typer returns it for Ctrl-C
        complain("interrupted")
    sys.exit(code or 0)


def _shown(error: str) -> str:
    """Return an error in one line if the command has a name of several, which it may repeat."""
    return printable(error) if any("\n" in word for word in sys.argv) else error


def _exit_of_bug(error: BaseException) -> SystemExit:
    """Print the traceback of a bug; return what ends the command."""
    traceback.print_exception(error)
    return SystemExit(T5TrainError.exit_code)


def _usage(error: Any) -> str:
    """Return what is wrong with the words of a command, in one line, and where to read on."""
    said = " ".join(error.format_message().split()).rstrip(".")
    said = re.sub(r"\. Did you mean (.+)\?$", r" (did you mean \1?)", said)
    for pydantic, plain in _PLAIN.items():
        said = said.replace(pydantic, plain)
    said = re.sub(r"^Invalid value for '(--[\w-]+)': it must be", _with_value, said)
    command = error.ctx.command_path if error.ctx else app.info.name
    return f"error: {said}.{_setting_meant(error)} See `{command} --help`" if said else ""


def _with_value(match: re.Match[str]) -> str:
    """Return the beginning of a message about an option's value, with the value as it was typed."""
    option = match[1]
    for number, word in enumerate(sys.argv):
        if word == option and number + 1 < len(sys.argv):
            return f"{option} is {sys.argv[number + 1]!r}: it must be"
        if word.startswith(f"{option}="):
            return f"{option} is {word.removeprefix(f'{option}=')!r}: it must be"
    return match[0]


def _setting_meant(error: Any) -> str:
    """Return which setting is probably meant by an option that does not exist; empty if the command takes none."""
    option = getattr(error, "option_name", None)
    takes_settings = error.ctx and any(each.name == "changes" for each in error.ctx.command.params)
    if option is None or not takes_settings:
        return ""
    from t5train.spec import nearest, setting_names  # takes a second, and help does without

    meant = nearest(option.lstrip("-").replace("-", "_"), setting_names())
    return f" Settings are changed with `--set part.key=value`{meant}." if meant else ""


if __name__ == "__main__":
    main()
