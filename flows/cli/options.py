"""Options that several commands share, alone or in groups, and the settings that they stand for."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple

import typer

from flows.spec_from_recipe import resolve
from t5train.errors import InputError, SpecError, StorageError
from t5train.files.atomic import replacing, try_writing
from t5train.files.os_errors import reason
from t5train.files.presence import is_folder, visible_in
from t5train.files.run_folder import RUNS
from t5train.records.locations import at_home
from t5train.spec import RunSpec, StorageSpec, setting_names
from t5train.spec.config_file import Configuration, read_config
from t5train.spec.recipes import RECIPES, summary
from t5train.spec.recipes import recipe as recipe_spec
from t5train.spec.settings import parsed, settings_of


def _recipes_like(incomplete: str) -> list[tuple[str, str]]:
    """Complete the name of a recipe in a shell."""
    return [(name, summary(name)) for name in RECIPES if name.startswith(incomplete)]


def _settings_like(incomplete: str) -> list[str]:
    """Complete ``part.key=`` in a shell, and the value of a setting that takes one of a few."""
    name, equals, _ = incomplete.partition("=")
    names = [each for each in setting_names() if (each == name if equals else each.startswith(name))]
    with_values = [f"{each}={value}" for each in names[:1] for value in settings_of(RunSpec)[each].choices]
    if equals:
        return [each for each in with_values if each.startswith(incomplete)]
    if len(names) != 1:
        return [f"{each}=" for each in names]
    # More than one candidate, because bash adds a space after a single one.
    return [f"{names[0]}=", *(with_values or [f"{names[0]}=..."])]


def runs_like(context: typer.Context, incomplete: str) -> list[str]:
    """Complete the name of a run under the root in a shell."""
    return [
        path.name for path in visible_in(root_of(context.params.get("root")) / RUNS) if path.name.startswith(incomplete)
    ]


def _expanded(path: Path | None) -> Path | None:
    """Expand ``~``, which shells leave in ``--root=~/t5``."""
    return path and at_home(path)


RecipeArgument = Annotated[
    str, typer.Argument(metavar="RECIPE", help="Recipe to start from; see `recipes`", autocompletion=_recipes_like)
]
RecipeOrConfig = Annotated[
    str | None,
    typer.Argument(
        metavar="RECIPE",
        help="Recipe to start from; see `recipes`",
        show_default="that of --config",
        autocompletion=_recipes_like,
    ),
]
ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config", metavar="FILE", help="File with a recipe and settings, as `init` writes it", readable=False
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="PART.KEY=VALUE",
        help="Setting to change; can be repeated",
        show_default=False,
        autocompletion=_settings_like,
    ),
]
CorpusOption = Annotated[
    str | None,
    typer.Option(
        "--corpus",
        metavar="SOURCE",
        help="Text to train on (corpus.source): path, pattern or URL",
        show_default="that of --config",
    ),
]
TrainOption = Annotated[
    list[str] | None,
    typer.Option(
        "--train",
        metavar="FILE",
        help="Pairs of a task to train on (pairs.train): path, pattern or URL, and columns, such as "
        "'wmt.jsonl#source=en&target=de'; can be repeated",
        show_default="those of --config",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON, for programs")]
RootOption = Annotated[
    Path | None,
    typer.Option(
        "--root",
        help="Folder that holds everything a run makes",
        show_default="work",
        readable=False,
        callback=_expanded,
    ),
]
NameOption = Annotated[
    str | None, typer.Option("--name", help="Name of the run", show_default="made of recipe and settings")
]
HostfileOption = Annotated[
    Path | None,
    typer.Option(
        "--hostfile",
        help="File with hosts to use: lines 'name slots=N'",
        show_default="this machine",
        readable=False,
        callback=_expanded,
    ),
]
PlotOption = Annotated[
    Path | None, typer.Option("--plot", help="Write a plot to this file (.png)", metavar="FILE", readable=False)
]
BeginAgainOption = Annotated[
    bool,
    typer.Option("--begin-again", help="Train from step 0; the run's checkpoints are moved aside, none is deleted"),
]
AdoptOption = Annotated[
    bool,
    typer.Option("--adopt", help="Take over a run whose checkpoints on the hosts belong to another head that has died"),
]


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Make a command of a function that takes groups of options: typer makes an option of each field of a group."""
    taken = signature(command, eval_str=True).parameters.values()
    groups: dict[str, Any] = {each.name: each.annotation for each in taken if is_dataclass(each.annotation)}

    @wraps(command)
    def flat(**given: Any) -> None:
        made = {
            name: group(**{each.name: given.pop(each.name) for each in fields(group) if each.name in given})
            for name, group in groups.items()
        }
        command(**made, **given)

    of_groups = {name: signature(group, eval_str=True).parameters.values() for name, group in groups.items()}
    options = [option for each in taken for option in of_groups.get(each.name, [each])]
    by_keyword = [option.replace(kind=Parameter.KEYWORD_ONLY) for option in options]
    flat.__dict__["__signature__"] = Signature(by_keyword)
    return flat


@dataclass(frozen=True)
class HostOptions:
    """The options for the hosts that a command uses."""

    hostfile: HostfileOption = None
    include: Annotated[
        str | None, typer.Option("--include", metavar="HOSTS", help="Hosts and slots to use, such as node1@node2:0,2")
    ] = None
    exclude: Annotated[
        str | None,
        typer.Option("--exclude", metavar="HOSTS", help="Hosts and slots not to use, written like --include"),
    ] = None
    ship_code: Annotated[
        bool | None, typer.Option("--ship-code", help="Send this project's code to the hosts", show_default=False)
    ] = None

    def settings(self) -> dict[str, str]:
        """Return the settings that the given options stand for."""
        given = asdict(self) | {"hostfile": self.hostfile and str(self.hostfile.absolute())}
        # Quoted, so that a name such as "2024" stays text when the setting is read as JSON.
        return {f"cluster.{name}": json.dumps(value) for name, value in given.items() if value is not None}


@dataclass(frozen=True)
class TrainingHostOptions(HostOptions):
    """The options for the hosts that a run trains on."""

    num_nodes: Annotated[int | None, typer.Option("--num-nodes", help="Use only the first N hosts")] = None
    launcher: Annotated[str | None, typer.Option("--launcher", help="pdsh, slurm or openmpi", show_default="pdsh")] = (
        None
    )
    spares: Annotated[
        int | None,
        typer.Option("--spares", help="How many of the last hosts wait in reserve to replace hosts that fail"),
    ] = None


def require_writable_names(out: Path | None = None, plot: Path | None = None, report: Path | None = None) -> None:
    """Raise an error if a result could not be written in the end."""
    for option, path, suffix in (("--out", out, ".jsonl"), ("--plot", plot, ".png"), ("--report", report, ".md")):
        if path is None:
            continue
        if path.suffix.lower() != suffix:
            raise SpecError(f"{option} is {path}, but its name must end in {suffix}. Give such a name")
        if not path.absolute().parent.is_dir():
            raise InputError(f"{option} is {path}, but the folder {path.absolute().parent} does not exist. Create it")
        if path.is_dir():
            raise InputError(f"{option} is {path}, which is a folder. Give the name of a file")
        try:
            try_writing(path.absolute().parent)
        except OSError as error:
            raise StorageError(f"{option} is {path}, which cannot be written: {reason(error, path)}") from error


def write_plot(plot: Path | None, draw: Callable[[], bytes]) -> None:
    """Write a picture to the file that --plot names, if it is given."""
    if plot is not None:
        with replacing(plot) as file:
            file.write(draw())


def root_of(root: Path | None) -> Path:
    """Return the absolute path of the given root, or of the default one."""
    return (root or StorageSpec().root).absolute()


def existing_root(root: Path | None) -> Path:
    """Return the absolute path of the given root, or of the default one, which need not exist before the first run.

    Raises InputError if the given root is not a folder.
    """
    folder = root_of(root)
    if root is not None and not is_folder(folder):
        raise InputError(
            f"--root is {root}, but there is no folder {folder}. Give the --root that the runs were started with"
        )
    return folder


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


def text_settings(corpus: str | None) -> dict[str, str]:
    """Return the setting that ``--corpus`` stands for. Quoted, so that a name such as "2024" stays text."""
    return {} if corpus is None else {"corpus.source": json.dumps(corpus)}


class Chosen(NamedTuple):
    """What a user chose on the command line and in a configuration file: a recipe, and what differs from it."""

    recipe: str
    settings: dict[str, Any]
    root: Path | None
    name: str | None
    named: frozenset[str]
    """All settings that the user named. Those in a file whose values are the recipe's are not among ``settings``."""

    def spec(self) -> RunSpec:
        """Return the RunSpec. Raises SpecError if it is not valid."""
        return resolve(self.recipe, self.settings, root=self.root, run_name=self.name)


def chosen(
    recipe: str | None,
    config: Path | None,
    changed: Mapping[str, str],
    *,
    root: Path | None = None,
    name: str | None = None,
    default: str | None = None,
) -> Chosen:
    """Return what a recipe, a configuration file and options choose; later ones take precedence.

    ``changed`` are the settings that the options stand for. Raises a usage error if neither a recipe nor a file is
    given, and there is no default. Raises SpecError if the file is not valid together with the options, or names
    another recipe than the command line.
    """
    named, root = frozenset(changed), root or _changed_root(changed)
    changed = {setting: value for setting, value in changed.items() if setting != "storage.root"}
    if name is not None:
        changed.pop("name", None)
    if config is None:
        if recipe is None and default is None:
            raise typer.BadParameter(
                "name a recipe (see `t5-pretrain recipes`), or a file with --config", param_hint="RECIPE"
            )
        return Chosen(recipe or str(default), changed, root, name, named)
    file = read_config(config)
    base = _recipe_of(file, recipe)
    of_file = file.changes(base)
    if "cluster.hostfile" in changed:
        of_file.pop("cluster.ranks", None)  # the slots of these hosts determine it
    of_file = {setting: value for setting, value in of_file.items() if setting not in changed}
    root = root or _changed_root(of_file)
    of_file.pop("storage.root", None)
    of_name = of_file.pop("name", None)
    named = frozenset({*named, *file.settings})
    made = Chosen(base.recipe, of_file | changed, root, name or (of_name and json.loads(of_name)), named)
    with file.locating(changed):
        made.spec()
    return made


def _changed_root(changed: Mapping[str, Any]) -> Path | None:
    given = parsed(RunSpec, {name: value for name, value in changed.items() if name == "storage.root"})
    return Path(str(given["storage.root"])) if given else None


def _recipe_of(file: Configuration, recipe: str | None) -> RunSpec:
    """Return the spec of the recipe that a file or the command line names."""
    if file.recipe is None:
        if recipe is None:
            raise SpecError(
                f"{file.path} names no recipe: add a line such as `recipe: smoke`, or name it before --config"
            )
        return recipe_spec(recipe)
    if recipe not in (None, file.recipe):
        raise SpecError(
            f"the command line names the recipe {recipe!r}, but {file.where('recipe')} names {file.recipe!r}: leave "
            "RECIPE out, or correct the file"
        )
    return recipe_spec(file.recipe)


@dataclass(frozen=True)
class SpecOptions:
    """The options that choose a recipe and what differs from it."""

    recipe: RecipeOrConfig = None
    config: ConfigOption = None
    changes: SetOption = None
    root: RootOption = None
    default: ClassVar[str | None] = None

    def changed(self) -> dict[str, str]:
        """Return the settings that the options stand for."""
        return settings(self.changes)

    def chosen(self, more: Mapping[str, str] | None = None, name: str | None = None) -> Chosen:
        """Return what these options choose, together with ``more`` settings and the name of a run; see ``chosen``."""
        changed = self.changed() | dict(more or {})
        return chosen(self.recipe, self.config, changed, root=self.root, name=name, default=self.default)


@dataclass(frozen=True)
class TextOptions(SpecOptions):
    """The options that choose a recipe, a text to train on, and what differs from the recipe."""

    corpus: CorpusOption = None

    def changed(self) -> dict[str, str]:
        """Return the settings that the options stand for."""
        return super().changed() | text_settings(self.corpus)


@dataclass(frozen=True)
class PairsOptions(SpecOptions):
    """The options that choose a recipe, pairs to train on, and what differs from the recipe."""

    train: TrainOption = None

    def changed(self) -> dict[str, str]:
        """Return the settings that the options stand for."""
        return super().changed() | ({"pairs.train": json.dumps(self.train)} if self.train else {})


@dataclass(frozen=True)
class SmokeOptions(SpecOptions):
    """Options that choose the recipe smoke if they name no other."""

    recipe: Annotated[
        str | None,
        typer.Argument(
            metavar="RECIPE",
            help="Recipe to start from; see `recipes`",
            show_default="that of --config, or smoke",
            autocompletion=_recipes_like,
        ),
    ] = None
    default: ClassVar[str | None] = "smoke"
