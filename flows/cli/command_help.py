"""The help of every command: the panel that lists it, and examples. In one place, so that they read as one text."""

from typing import Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup


class CommandHelp(NamedTuple):
    """Where a command is listed, and how it is used."""

    panel: str
    examples: tuple[str, ...]


_TRAIN, _STAGES, _OPERATE = "Train", "Single stages", "Operate"
COMMANDS = {
    "run": CommandHelp(
        _TRAIN,
        (
            "t5-pretrain run smoke",
            "t5-pretrain run base --corpus '/data/*.txt' --name mine",
            "t5-pretrain run --config run.yaml --dry-run",
            "t5-pretrain run moe --trial",
        ),
    ),
    "init": CommandHelp(
        _TRAIN,
        (
            "t5-pretrain init base > run.yaml",
            "t5-pretrain init smoke --set optimizer.num_steps=60 > run.yaml",
        ),
    ),
    "recipes": CommandHelp(_TRAIN, ("t5-pretrain recipes", "t5-pretrain recipes --json")),
    "status": CommandHelp(
        _TRAIN, ("t5-pretrain status", "t5-pretrain status mine --root /data/t5", "t5-pretrain status --json")
    ),
    "board": CommandHelp(
        _TRAIN, ("t5-pretrain board", "t5-pretrain board mine --root /data/t5", "t5-pretrain board --port 6007")
    ),
    "rm": CommandHelp(_TRAIN, ("t5-pretrain rm mine", "t5-pretrain rm mine --hostfile hosts --yes")),
    "generate": CommandHelp(
        _TRAIN,
        (
            "t5-pretrain generate work/published/mine 'A model <extra_id_0> text.'",
            "t5-pretrain generate MODEL 'Two <extra_id_0>' --top-p 0.9 --seed 7",
            "t5-pretrain generate work/published/mine - --json < texts.txt",
        ),
    ),
    "evaluate": CommandHelp(
        _TRAIN,
        (
            "t5-pretrain evaluate MODEL --corpus pydocs --max-sequences 1000",
            "t5-pretrain evaluate MODEL --corpus '/data/*.txt' --split test --json",
        ),
    ),
    "preflight": CommandHelp(
        _TRAIN,
        (
            "t5-pretrain preflight base --hostfile hosts --root /shared/t5",
            "t5-pretrain preflight --config run.yaml --exclude node7",
            "t5-pretrain preflight --hostfile hosts --install wheels --into /opt/t5",
        ),
    ),
    "bench": CommandHelp(
        _TRAIN,
        (
            "t5-pretrain bench smoke",
            "t5-pretrain bench base --set layout.micro_batch_sequences=64",
            "t5-pretrain bench base --shards work/shards/wiki-0123456789ab --alone",
        ),
    ),
    "data": CommandHelp(
        _TRAIN,
        (
            "t5-pretrain data show base --corpus '/data/*.txt'",
            "t5-pretrain data stats --config run.yaml --plot lengths.png",
            "t5-pretrain data index check wiki_dpr --index compressed",
            "t5-pretrain data index duplicates '/data/*.parquet' --out pairs.jsonl",
        ),
    ),
    "corpus": CommandHelp(
        _STAGES,
        (
            "t5-pretrain corpus --corpus '/data/*.jsonl.gz' --root /data/t5",
            "t5-pretrain corpus --config run.yaml",
        ),
    ),
    "tokenizer": CommandHelp(
        _STAGES,
        (
            "t5-pretrain tokenizer smoke",
            "t5-pretrain tokenizer --config run.yaml --set tokenizer.vocab_size=8000",
        ),
    ),
    "tokenize": CommandHelp(
        _STAGES, ("t5-pretrain tokenize --corpus '/data/*.txt' --tokenizer T5_MODEL --out tokens",)
    ),
    "train": CommandHelp(
        _STAGES,
        (
            "t5-pretrain train smoke --shards tokens/shards",
            "t5-pretrain train --config run.yaml",
        ),
    ),
    "consolidate": CommandHelp(
        _STAGES,
        (
            "t5-pretrain consolidate work/runs/mine/checkpoints weights",
            "t5-pretrain consolidate checkpoints weights --shard-size 5G --moments",
        ),
    ),
    "export": CommandHelp(_STAGES, ("t5-pretrain export weights model --run work/runs/mine --tokenizer TOKENIZER",)),
    "certify": CommandHelp(_STAGES, ("t5-pretrain certify model work/runs/mine/witness",)),
    "publish": CommandHelp(
        _STAGES, ("t5-pretrain publish model /data/published/mine", "t5-pretrain publish model s3://bucket/t5/mine")
    ),
    "verify": CommandHelp(
        _STAGES, ("t5-pretrain verify work/published/mine", "t5-pretrain verify s3://bucket/t5/mine --json")
    ),
    "fetch": CommandHelp(_STAGES, ("t5-pretrain fetch s3://bucket/t5/mine model",)),
    "gc": CommandHelp(
        _OPERATE, ("t5-pretrain gc", "t5-pretrain gc --free", "t5-pretrain gc --hostfile hosts --root /data/t5")
    ),
    "wheelhouse": CommandHelp(
        _OPERATE,
        (
            "t5-pretrain wheelhouse wheels",
            "t5-pretrain wheelhouse wheels --python 3.12 --platform manylinux_2_28_x86_64",
            "t5-pretrain wheelhouse wheels --extra flows --extra s3",
        ),
    ),
    "up": CommandHelp(
        _OPERATE,
        ("t5-pretrain up", "t5-pretrain up --root /data/t5 --corpus '/data/*.txt'"),
    ),
    "deploy": CommandHelp(_OPERATE, ("t5-pretrain deploy --root /data/t5 --corpus '/data/*.txt'",)),
    "server": CommandHelp(_OPERATE, ("t5-pretrain server --root /data/t5",)),
    "worker": CommandHelp(_OPERATE, ("t5-pretrain worker",)),
    "notifications": CommandHelp(_OPERATE, ("T5_PRETRAIN_WEBHOOK=https://example.org/hook t5-pretrain notifications",)),
    "regression": CommandHelp(
        _OPERATE, ("t5-pretrain regression run", "t5-pretrain regression accept --why 'a new machine'")
    ),
}
"""The commands in the order in which they are listed."""


class _Command(TyperCommand):
    """A command whose flags are shown without a type."""

    def get_params(self, ctx: Any) -> Any:
        """Return the parameters, flags with an empty type."""
        return _without_types(super().get_params(ctx))


class Group(TyperGroup):
    """The same for a group of commands."""

    def get_params(self, ctx: Any) -> Any:
        """Return the parameters, flags with an empty type."""
        return _without_types(super().get_params(ctx))


def _without_types(parameters: Any) -> Any:
    """Empty the type that is shown for flags: typer shows ``<bool>``, but they take no value."""
    for parameter in parameters:
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
    return parameters


def add_help(app: typer.Typer) -> None:
    """Give all registered commands their panels, examples and order. Commands without an entry come last."""
    for command in app.registered_commands:
        command.cls = _Command
        entry = COMMANDS.get(name_of(command))
        if entry is not None:
            command.rich_help_panel, command.epilog = entry.panel, _epilog(entry)
    for group in app.registered_groups:
        _set_classes(group)
        entry = COMMANDS.get(str(group.typer_instance.info.name)) if group.typer_instance else None
        if entry is not None:
            group.rich_help_panel, group.epilog = entry.panel, _epilog(entry)
    order = {name: place for place, name in enumerate(COMMANDS)}
    app.registered_commands.sort(key=lambda command: order.get(name_of(command), len(order)))


def _set_classes(group: typer.models.TyperInfo) -> None:
    group.cls = Group
    if group.typer_instance is not None:
        for command in group.typer_instance.registered_commands:
            command.cls = _Command
        for inside in group.typer_instance.registered_groups:
            _set_classes(inside)


def name_of(command: typer.models.CommandInfo) -> str:
    """Return the name under which a command is called."""
    return command.name or str(getattr(command.callback, "__name__", ""))


def _epilog(entry: CommandHelp) -> str:
    lines = "\n".join(f"  {example}" for example in entry.examples)
    return f"Example{'s' if len(entry.examples) > 1 else ''}:\n{lines}"
