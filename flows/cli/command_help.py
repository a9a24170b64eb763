"""All commands: the module and the panel of each. The docstring of a command is its help, and ends with examples.

A command's module is imported when the command is used. Help that only lists commands does without.
"""

import re
from collections.abc import Mapping, Sequence
from importlib import import_module
from inspect import getdoc
from pathlib import Path
from typing import Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

from flows.cli.early_interruption import ending_at_once


class Command(NamedTuple):
    """A command: the function of its name in ``module`` of this package."""

    module: str
    panel: str | None = None


class CommandGroup(NamedTuple):
    """A command that only has further commands."""

    help: str
    commands: Mapping[str, "Command | CommandGroup"]
    panel: str | None = None
    examples: tuple[str, ...] = ()


_EXAMPLE = "$ "
"""Begins the line of an example in the docstring of a command."""

_TRAIN, _STAGES, _OPERATE = "Train", "Single stages", "Operate"
COMMANDS: Mapping[str, Command | CommandGroup] = {
    "run": Command("run_command", _TRAIN),
    "finetune": Command("run_command", _TRAIN),
    "init": Command("run_command", _TRAIN),
    "recipes": Command("run_command", _TRAIN),
    "status": Command("status_command", _TRAIN),
    "board": Command("operate.board_command", _TRAIN),
    "rm": Command("operate.removal_commands", _TRAIN),
    "generate": Command("models.model_commands", _TRAIN),
    "predict": Command("models.prediction_command", _TRAIN),
    "evaluate": Command("models.model_commands", _TRAIN),
    "score": Command("models.score_command", _TRAIN),
    "serve": Command("models.serve_command", _TRAIN),
    "preflight": Command("operate.host_commands", _TRAIN),
    "bench": Command("bench_command", _TRAIN),
    "data": CommandGroup(
        "Look at a text or at pairs, also as the model sees them, or at a text's embeddings.",
        {
            "show": Command("data_commands"),
            "stats": Command("data_commands"),
            "check": Command("data_commands"),
            "pairs": Command("data_commands"),
            "index": CommandGroup(
                "Check a FAISS index of a text's embeddings, or search with one.",
                {
                    "check": Command("index_commands"),
                    "duplicates": Command("index_commands"),
                },
            ),
        },
        _TRAIN,
        (
            "t5-pretrain data show base --corpus '/data/*.txt'",
            "t5-pretrain data stats --config run.yaml --plot lengths.png",
            "t5-pretrain data pairs 'wmt.jsonl#source=en&target=de' --tokenizer T5_MODEL",
            "t5-pretrain data index check wiki_dpr --index compressed",
            "t5-pretrain data index duplicates '/data/*.parquet' --out pairs.jsonl",
        ),
    ),
    "corpus": Command("stage_commands", _STAGES),
    "tokenizer": Command("stage_commands", _STAGES),
    "tokenize": Command("stage_commands", _STAGES),
    "train": Command("stage_commands", _STAGES),
    "consolidate": Command("stage_commands", _STAGES),
    "export": Command("stage_commands", _STAGES),
    "measure": Command("models.measure_command", _STAGES),
    "certify": Command("stage_commands", _STAGES),
    "publish": Command("stage_commands", _STAGES),
    "verify": Command("stage_commands", _STAGES),
    "fetch": Command("stage_commands", _STAGES),
    "gc": Command("operate.removal_commands", _OPERATE),
    "wheelhouse": Command("operate.host_commands", _OPERATE),
    "up": Command("operate.server_commands", _OPERATE),
    "deploy": Command("operate.server_commands", _OPERATE),
    "server": Command("operate.server_commands", _OPERATE),
    "worker": Command("operate.worker_command", _OPERATE),
    "notifications": Command("operate.server_commands", _OPERATE),
    "regression": CommandGroup(
        "Check whether anything got worse since the baseline.",
        {
            "run": Command("operate.regression_command"),
            "show": Command("operate.regression_command"),
            "accept": Command("operate.regression_command"),
        },
        _OPERATE,
        (
            "t5-pretrain regression run",
            "t5-pretrain regression accept --why 'a new machine'",
        ),
    ),
}
"""The commands in the order in which they are listed."""


class _Command(TyperCommand):
    """A command whose flags are shown without a type."""

    def get_params(self, ctx: Any) -> Any:
        """Return the parameters, flags with an empty type."""
        return _without_types(super().get_params(ctx))


class _ListedCommand(TyperCommand):
    """A command as help and shells list it. Its module is imported, which takes a second, when it is used."""

    def __init__(self, name: str, entry: Command) -> None:
        super().__init__(name, help=_summary(name, entry), rich_help_panel=entry.panel)
        self._entry = entry

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Import the command, and return the context of its use."""
        return imported(str(self.name), self._entry).make_context(info_name, args, parent, **extra)


class Group(TyperGroup):
    """A group of the commands in a table, which shows flags without a type."""

    def __init__(self, *, entries: Mapping[str, Command | CommandGroup] | None = None, **settings: Any) -> None:
        commands = {name: _listed(name, entry) for name, entry in (COMMANDS if entries is None else entries).items()}
        super().__init__(**settings | {"commands": commands})

    def get_params(self, ctx: Any) -> Any:
        """Return the parameters, flags with an empty type."""
        return _without_types(super().get_params(ctx))


def _without_types(parameters: Any) -> Any:
    """Empty the type that is shown for flags: typer shows ``<bool>``, but they take no value."""
    for parameter in parameters:
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
    return parameters


def _listed(name: str, entry: Command | CommandGroup) -> TyperCommand | TyperGroup:
    if isinstance(entry, Command):
        return _ListedCommand(name, entry)
    about = {"help": entry.help, "epilog": _epilog(entry.examples), "rich_help_panel": entry.panel}
    return Group(name=name, entries=entry.commands, no_args_is_help=True, **about)


def imported(name: str, entry: Command) -> Any:
    """Return a command with its function and parameters. Ctrl-C while its module is imported ends the process."""
    with ending_at_once():
        function = getattr(import_module(f"{__package__}.{entry.module}"), name)
    lines = str(getdoc(function)).splitlines()
    text = "\n".join(line for line in lines if not line.startswith(_EXAMPLE)).rstrip()
    epilog = _epilog([line.removeprefix(_EXAMPLE) for line in lines if line.startswith(_EXAMPLE)])
    app = typer.Typer(add_completion=False)
    app.command(name, cls=_Command, help=text, epilog=epilog, rich_help_panel=entry.panel)(function)
    return typer.main.get_command(app)


def _summary(name: str, entry: Command) -> str:
    """Return the first line of the docstring of a command's function, read from the file without importing it."""
    source = (Path(__file__).parent / f"{entry.module.replace('.', '/')}.py").read_text("utf-8")
    found = re.search(rf'^def {name}\(.*?^    """(.+?)(""")?$', source, re.MULTILINE | re.DOTALL)
    if found is None:
        raise LookupError(f"{entry.module} has no function {name} with a docstring")
    return found[1]


def _epilog(examples: Sequence[str]) -> str | None:
    if not examples:
        return None
    lines = "\n".join(f"  {example}" for example in examples)
    return f"Example{'s' if len(examples) > 1 else ''}:\n{lines}"
