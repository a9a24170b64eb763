"""Options that several commands share, and the settings that they stand for."""

import json
from pathlib import Path
from typing import Annotated

import typer

from flows.spec_from_recipe import resolve
from t5train.spec import RunSpec, StorageSpec

RecipeArgument = Annotated[str, typer.Argument(metavar="RECIPE", help="Recipe to start from; see `recipes`")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="PART.KEY=VALUE", help="Setting to change; can be repeated", show_default=False),
]
RootOption = Annotated[
    Path | None,
    typer.Option("--root", help="Folder that holds everything a run makes", show_default="work", readable=False),
]
NameOption = Annotated[
    str | None, typer.Option("--name", help="Name of the run", show_default="made of recipe and settings")
]
HostfileOption = Annotated[
    Path | None,
    typer.Option(
        "--hostfile", help="File with hosts to use: lines 'name slots=N'", show_default="this machine", readable=False
    ),
]
IncludeOption = Annotated[
    str | None, typer.Option("--include", metavar="NAME[:SLOT,...][@...]", help="Hosts and slots to use")
]
ExcludeOption = Annotated[
    str | None, typer.Option("--exclude", metavar="NAME[:SLOT,...][@...]", help="Hosts and slots not to use")
]
NumNodesOption = Annotated[int | None, typer.Option("--num-nodes", help="Use only the first N hosts")]
SparesOption = Annotated[
    int | None, typer.Option("--spares", help="How many of the last hosts wait in reserve to replace hosts that fail")
]
ShipCodeOption = Annotated[
    bool | None, typer.Option("--ship-code", help="Send this project's code to the hosts", show_default=False)
]
BeginAgainOption = Annotated[
    bool,
    typer.Option("--begin-again", help="Train from step 0; the run's checkpoints are moved aside, none is deleted"),
]
AdoptOption = Annotated[
    bool,
    typer.Option("--adopt", help="Take over a run whose checkpoints on the hosts belong to another head that has died"),
]
LauncherOption = Annotated[str | None, typer.Option("--launcher", help="pdsh, slurm or openmpi", show_default="pdsh")]


def root_of(root: Path | None) -> Path:
    """Return the absolute path of the given root, or of the default one."""
    return (root or StorageSpec().root).absolute()


def settings(assignments: list[str] | None) -> dict[str, str]:
    """Parse ``["optimizer.num_steps=8"]`` to ``{"optimizer.num_steps": "8"}``.

    Raises a usage error if the name or the equals sign is missing.
    """
    found = {}
    for assignment in assignments or []:
        name, equals, value = assignment.partition("=")
        if not name or not equals:
            raise typer.BadParameter(f"{assignment!r} is not of the form part.key=value", param_hint="--set")
        found[name] = value
    return found


def host_settings(
    hostfile: Path | None,
    include: str | None,
    exclude: str | None,
    num_nodes: int | None,
    launcher: str | None,
    spares: int | None = None,
    ship_code: bool | None = None,
) -> dict[str, str]:
    """Return the settings that the options for hosts stand for. Options that are not given are left out."""
    given = {
        "cluster.hostfile": hostfile and str(hostfile.absolute()),
        "cluster.include": include,
        "cluster.exclude": exclude,
        "cluster.num_nodes": num_nodes,
        "cluster.launcher": launcher,
        "cluster.spares": spares,
        "cluster.ship_code": ship_code,
    }
    # Quoted, so that a name such as "2024" stays text when the setting is read as JSON.
    return {setting: json.dumps(value) for setting, value in given.items() if value is not None}


def spec_of(recipe: str, changes: list[str] | None, root: Path | None, name: str | None = None) -> RunSpec:
    """Return the RunSpec that the options describe."""
    return resolve(recipe, settings(changes), root=root, run_name=name)
