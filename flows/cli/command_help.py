"""All commands: the module and the panel of each, and examples. In one place, so that the help reads as one text.

A command's module is imported when the command is used. Help that only lists commands does without.
"""

import re
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

from flows.cli.early_interruption import ending_at_once


class Command(NamedTuple):
    """A command: the function of its name in ``module`` of this package. The docstring of the function is its help."""

    module: str
    panel: str | None = None
    examples: tuple[str, ...] = ()


class CommandGroup(NamedTuple):
    """A command that only has further commands."""

    help: str
    commands: Mapping[str, "Command | CommandGroup"]
    panel: str | None = None
    examples: tuple[str, ...] = ()


_TRAIN, _STAGES, _OPERATE = "Train", "Single stages", "Operate"
COMMANDS: Mapping[str, Command | CommandGroup] = {
    "run": Command(
        "run_command",
        _TRAIN,
        (
            "t5-pretrain run smoke",
            "t5-pretrain run base --corpus '/data/*.txt' --name mine",
            "t5-pretrain run --config run.yaml --dry-run",
            "t5-pretrain run moe --trial",
        ),
    ),
    "init": Command(
        "config_commands",
        _TRAIN,
        (
            "t5-pretrain init base > run.yaml",
            "t5-pretrain init smoke --set optimizer.num_steps=60 > run.yaml",
        ),
    ),
    "recipes": Command("run_command", _TRAIN, ("t5-pretrain recipes", "t5-pretrain recipes --json")),
    "status": Command(
        "runs.status_command",
        _TRAIN,
        ("t5-pretrain status", "t5-pretrain status mine --root /data/t5", "t5-pretrain status --json"),
    ),
    "board": Command(
        "operate.board_command",
        _TRAIN,
        ("t5-pretrain board", "t5-pretrain board mine --root /data/t5", "t5-pretrain board --port 6007"),
    ),
    "rm": Command("runs.rm_command", _TRAIN, ("t5-pretrain rm mine", "t5-pretrain rm mine --hostfile hosts --yes")),
    "generate": Command(
        "model_commands",
        _TRAIN,
        (
            "t5-pretrain generate work/published/mine 'A model <extra_id_0> text.'",
            "t5-pretrain generate MODEL 'Two <extra_id_0>' --top-p 0.9 --seed 7",
            "t5-pretrain generate work/published/mine - --json < texts.txt",
        ),
    ),
    "evaluate": Command(
        "model_commands",
        _TRAIN,
        (
            "t5-pretrain evaluate MODEL --corpus pydocs --max-sequences 1000",
            "t5-pretrain evaluate MODEL --corpus '/data/*.txt' --split test --json",
        ),
    ),
    "preflight": Command(
        "operate.preflight_command",
        _TRAIN,
        (
            "t5-pretrain preflight base --hostfile hosts --root /shared/t5",
            "t5-pretrain preflight --config run.yaml --exclude node7",
            "t5-pretrain preflight --hostfile hosts --install wheels --into /opt/t5",
        ),
    ),
    "bench": Command(
        "bench_command",
        _TRAIN,
        (
            "t5-pretrain bench smoke",
            "t5-pretrain bench base --set layout.micro_batch_sequences=64",
            "t5-pretrain bench base --shards work/shards/wiki-0123456789ab --alone",
        ),
    ),
    "data": CommandGroup(
        "Look at a text, also as the model sees it, or by its embeddings.",
        {
            "show": Command("data_commands"),
            "stats": Command("data_commands"),
            "check": Command("data_commands"),
            "index": CommandGroup(
                "Check a FAISS index of a text's embeddings, or search with one.",
                {"check": Command("index_commands"), "duplicates": Command("index_commands")},
            ),
        },
        _TRAIN,
        (
            "t5-pretrain data show base --corpus '/data/*.txt'",
            "t5-pretrain data stats --config run.yaml --plot lengths.png",
            "t5-pretrain data index check wiki_dpr --index compressed",
            "t5-pretrain data index duplicates '/data/*.parquet' --out pairs.jsonl",
        ),
    ),
    "corpus": Command(
        "stage_commands",
        _STAGES,
        (
            "t5-pretrain corpus --corpus '/data/*.jsonl.gz' --root /data/t5",
            "t5-pretrain corpus --config run.yaml",
        ),
    ),
    "tokenizer": Command(
        "stage_commands",
        _STAGES,
        (
            "t5-pretrain tokenizer smoke",
            "t5-pretrain tokenizer --config run.yaml --set tokenizer.vocab_size=8000",
        ),
    ),
    "tokenize": Command(
        "stage_commands", _STAGES, ("t5-pretrain tokenize --corpus '/data/*.txt' --tokenizer T5_MODEL --out tokens",)
    ),
    "train": Command(
        "stage_commands",
        _STAGES,
        (
            "t5-pretrain train smoke --shards tokens/shards",
            "t5-pretrain train --config run.yaml",
        ),
    ),
    "consolidate": Command(
        "stage_commands",
        _STAGES,
        (
            "t5-pretrain consolidate work/runs/mine/checkpoints weights",
            "t5-pretrain consolidate checkpoints weights --shard-size 5G --moments",
        ),
    ),
    "export": Command(
        "stage_commands", _STAGES, ("t5-pretrain export weights model --run work/runs/mine --tokenizer TOKENIZER",)
    ),
    "certify": Command("stage_commands", _STAGES, ("t5-pretrain certify model work/runs/mine/witness",)),
    "publish": Command(
        "stage_commands",
        _STAGES,
        ("t5-pretrain publish model /data/published/mine", "t5-pretrain publish model s3://bucket/t5/mine"),
    ),
    "verify": Command(
        "stage_commands",
        _STAGES,
        ("t5-pretrain verify work/published/mine", "t5-pretrain verify s3://bucket/t5/mine --json"),
    ),
    "fetch": Command("stage_commands", _STAGES, ("t5-pretrain fetch s3://bucket/t5/mine model",)),
    "gc": Command(
        "operate.gc_command",
        _OPERATE,
        ("t5-pretrain gc", "t5-pretrain gc --free", "t5-pretrain gc --hostfile hosts --root /data/t5"),
    ),
    "wheelhouse": Command(
        "operate.wheelhouse_command",
        _OPERATE,
        (
            "t5-pretrain wheelhouse wheels",
            "t5-pretrain wheelhouse wheels --python 3.12 --platform manylinux_2_28_x86_64",
            "t5-pretrain wheelhouse wheels --extra flows --extra s3",
        ),
    ),
    "up": Command(
        "operate.server_commands",
        _OPERATE,
        ("t5-pretrain up", "t5-pretrain up --root /data/t5 --corpus '/data/*.txt'"),
    ),
    "deploy": Command(
        "operate.server_commands", _OPERATE, ("t5-pretrain deploy --root /data/t5 --corpus '/data/*.txt'",)
    ),
    "server": Command("operate.team_commands", _OPERATE, ("t5-pretrain server --root /data/t5",)),
    "worker": Command("operate.worker_command", _OPERATE, ("t5-pretrain worker",)),
    "notifications": Command(
        "operate.team_commands", _OPERATE, ("T5_PRETRAIN_WEBHOOK=https://example.org/hook t5-pretrain notifications",)
    ),
    "regression": CommandGroup(
        "Check whether anything got worse since the baseline.",
        {
            "run": Command("operate.regression_command"),
            "show": Command("operate.regression_command"),
            "accept": Command("operate.regression_command"),
        },
        _OPERATE,
        ("t5-pretrain regression run", "t5-pretrain regression accept --why 'a new machine'"),
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
    about = {"help": entry.help, "epilog": _epilog(entry), "rich_help_panel": entry.panel}
    return Group(name=name, entries=entry.commands, no_args_is_help=True, **about)


def imported(name: str, entry: Command) -> Any:
    """Return a command with its function and parameters. Ctrl-C while its module is imported ends the process."""
    with ending_at_once():
        module = import_module(f"{__package__}.{entry.module}")
    app = typer.Typer(add_completion=False)
    described = app.command(name, cls=_Command, epilog=_epilog(entry), rich_help_panel=entry.panel)
    described(getattr(module, name))
    return typer.main.get_command(app)


def _summary(name: str, entry: Command) -> str:
    """Return the first line of the docstring of a command's function, read from the file without importing it."""
    source = (Path(__file__).parent / f"{entry.module.replace('.', '/')}.py").read_text("utf-8")
    found = re.search(rf'^def {name}\(.*?^    """(.+?)(""")?$', source, re.MULTILINE | re.DOTALL)
    if found is None:
        raise LookupError(f"{entry.module} has no function {name} with a docstring")
    return found[1]


def _epilog(entry: Command | CommandGroup) -> str | None:
    if not entry.examples:
        return None
    lines = "\n".join(f"  {example}" for example in entry.examples)
    return f"Example{'s' if len(entry.examples) > 1 else ''}:\n{lines}"
