"""The parameters of a run in Prefect: a recipe and flat overrides. They become a complete RunSpec here.

``prefect deployment run --param`` replaces whole parameters. Therefore what ``deploy`` configures for all deployments
is not in ``settings``, which a run replaces, but in parameters of its own.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from flows.spec_from_recipe import (
    has_own_data,
    require_own_data,
    require_used,
    resolve,
    without_unused,
)
from infra.head.preflight.remote_starts import with_start_here
from infra.head.preflight.run_checks import require_accelerators, require_possible
from t5train.checkpoint.resume import published_name
from t5train.errors import SpecError
from t5train.spec import RUN_NAME_PATTERN, RunSpec
from t5train.spec.config_file import data_setting
from t5train.spec.known_texts import BUILT_IN, is_relative_path, known_texts
from t5train.spec.pairs_spec import GENERATED
from t5train.spec.recipes import recipe as recipe_spec
from t5train.spec.recipes import trial_settings
from t5train.spec.settings import settings_of

_TEXTS = "|".join([BUILT_IN, *known_texts()])
_PAIRS = "|".join(GENERATED)
_ALLOWED = (
    r"^(?!(.*::)?[\w+.-]+://[^/]*:[^/]*@)(?!(.*::)?(https?|s3a?|gc?s)://[^/]*@)(?!.*\?[\w-]+=)"
    rf"(/|~|[\w+.-]+:|({_TEXTS})$|({_PAIRS})(#|$))"
)
"""Refuses URLs with a password or a query, also chained ones, so that the server does not even store them.

Also refuses relative paths, because a worker has another current folder. The names of known texts and of built-in pairs
are not paths.
"""

LOCATIONS = (
    *("corpus.source", "corpus.mixed_with", "corpus.test_sets", "corpus.remove_listed"),
    *("pairs.train", "pairs.validation", "pairs.test"),
    *("storage.publish_to", "storage.publish_checkpoints_under", "model.start_from", "tokenizer.path"),
)
"""Settings that name files, of which some can be URLs, and all could be given one. Some are lists."""

PATHS = ("cluster.hostfile", "cluster.known_hosts", "evaluate.hostfile", "storage.root")
"""Settings that name local files or folders only."""

_LOCATION = {"type": "string", "minLength": 1, "pattern": _ALLOWED}
_LOCAL_PATH = {"type": "string", "pattern": "^/"}


def _settings() -> dict[str, Any]:
    """Return the schema of a JSON object with settings, with which the server refuses unknown names and values.

    It is below "then", because Prefect's form would show a field for each of the settings otherwise.
    """
    properties = {name: setting.schema for name, setting in settings_of(RunSpec).items()}
    for name in (*LOCATIONS, *PATHS):
        properties[name] = {"allOf": [properties[name], {"pattern": _ALLOWED, "items": {"pattern": _ALLOWED}}]}
    return {"type": "object", "if": True, "then": {"properties": properties, "additionalProperties": False}}


def _shown(description: str, schema: dict[str, Any]) -> WithJsonSchema:
    """The schema of a parameter for the form. Unlike pydantic's own, it does not offer null as a second type."""
    return WithJsonSchema({"description": description} | schema)


RecipeName = Literal[
    "smoke",
    "small",
    "base",
    "large",
    "moe",
    "pipeline",
    "zero1_offload",
    "zero2_offload",
    "zero3",
    "t5_3b",
    "t5_3b_one_gpu",
    "t5_11b_one_gpu",
]
"""The names of the recipes in t5train.spec.recipes that train on text, written out because type checkers need them."""
FineTuningRecipeName = Literal[
    "reverse_and_sort", "finetune_base", "translate_3b", "translate_3b_one_gpu", "translate_11b_one_gpu"
]
"""The names of the recipes that train on pairs."""


def _recipe(names: Any) -> WithJsonSchema:
    return _shown("What is trained, and with which layout.", {"type": "string", "enum": list(get_args(names))})


Recipe = Annotated[RecipeName, _recipe(RecipeName)]
FineTuningRecipe = Annotated[FineTuningRecipeName, _recipe(FineTuningRecipeName)]
Root = Annotated[
    Path,
    _shown(
        "Absolute path of the folder that holds everything a run makes, on the machine that executes the run.",
        _LOCAL_PATH,
    ),
]
Corpus = Annotated[str | None, _shown("Text to train on: a file, folder, pattern or fsspec URL.", _LOCATION)]
Train = Annotated[
    list[str] | None,
    _shown(
        "Files of pairs to train on, one for each task: a path, pattern, URL or hf://OWNER/NAME, and after # the "
        "columns, prefix and name of the task, such as /data/wmt.jsonl#source=en&target=de&task=en-de.",
        {"type": "array", "items": _LOCATION, "minItems": 1},
    ),
]
Steps = Annotated[
    int | None,
    Field(ge=1),
    _shown("Number of optimizer steps; the recipe's if left out.", {"type": "integer", "minimum": 1}),
]
RunName = Annotated[
    str | None,
    Field(pattern=RUN_NAME_PATTERN),
    _shown(
        "Name of the run's folder; made of recipe and settings if left out. If the run exists, it continues.",
        {"type": "string", "pattern": RUN_NAME_PATTERN},
    ),
]
Trial = Annotated[
    bool,
    _shown(
        "Train a tiny model for a few steps on this machine's CPUs. The text or pairs and the recipe's layout and "
        "precision are kept. The deployment's hosts, destination and settings, other than those of the text or pairs, "
        "are not used.",
        {"type": "boolean"},
    ),
]
Settings = Annotated[
    dict[str, Any] | None,
    _shown(
        'Changes to the recipe, as "part.key" and value, such as {"optimizer.peak_learning_rate": 0.01}.', _settings()
    ),
]
PublishUnder = Annotated[
    str | None,
    _shown(
        "Folder or fsspec URL in which the run publishes a folder of its name; root/published if left out.", _LOCATION
    ),
]
Hostfile = Annotated[
    Path | None,
    _shown("Absolute path of a file with the hosts to train on; only this machine if left out.", _LOCAL_PATH),
]
Scratch = Annotated[
    Path | None,
    _shown("Absolute path of a folder on each host's own disk, for hosts that do not share the root.", _LOCAL_PATH),
]
DeployedSettings = Annotated[
    dict[str, Any] | None,
    _shown("Settings that `t5-pretrain deploy --set` configured. The run's settings take precedence.", _settings()),
]
Adopt = Annotated[
    bool,
    _shown("Take over a run whose checkpoints on its hosts belong to another head that has died.", {"type": "boolean"}),
]


SETTINGS_OF_PARAMETERS = {
    "corpus": "corpus.source",
    "train": "pairs.train",
    "steps": "optimizer.num_steps",
    "hostfile": "cluster.hostfile",
    "scratch": "storage.scratch",
    "publish_under": "storage.publish_to",
    "run_name": "name",
}
"""The settings that parameters stand for.

A run's settings take precedence over parameters, and parameters over the settings of its deployment.
"""

_NOT_IN_TRIALS = frozenset({"hostfile", "scratch", "publish_under"})
"""Parameters that a trial does not use: it trains on the CPUs of one machine, and publishes under the root."""


class RunParameters(BaseModel):
    """The parameters of ``t5-pretrain`` and ``t5-finetune``, except those that do not change the spec."""

    model_config = ConfigDict(extra="forbid")

    recipe: str
    root: Path
    run_name: str | None = None
    corpus: str | None = None
    train: list[str] | None = None
    steps: int | None = None
    trial: bool = False
    settings: dict[str, Any] | None = None
    publish_under: str | None = None
    hostfile: Path | None = None
    scratch: Path | None = None
    deployed_settings: dict[str, Any] | None = None

    @classmethod
    def of(cls, parameters: Mapping[str, Any]) -> Self:
        """Take those of a flow run's parameters that decide the spec. Raises pydantic's error if one is invalid."""
        return cls.model_validate({name: value for name, value in parameters.items() if name in cls.model_fields})

    def possible_spec(self) -> RunSpec:
        """Return the spec of a run that could succeed. Raises the errors of ``spec`` and ``require_possible``.

        A model to start from that is not on this machine is copied to the root, except its weights.

        Raises SpecError if the recipe needs text or pairs, and none are given.
        """
        require_own_data(self.recipe, self._changes())
        spec = with_start_here(self.spec())
        require_possible(spec)
        return spec

    def spec_for_this_machine(self) -> RunSpec:
        """Return ``possible_spec`` for this machine. Raises SpecError first if its accelerators are too few."""
        require_accelerators(self.spec())
        return self.possible_spec()

    def used(self) -> Self:
        """Return these parameters without those that the run does not use, and with the text or pairs it trains on.

        The page of a run shows them, so that nothing on it contradicts what the run does.
        """
        settings, deployed = dict(self.settings or {}), without_unused(self.recipe, self.deployed_settings or {})
        if self.trial:
            deployed = {name: value for name, value in deployed.items() if name.startswith(("corpus.", "pairs."))}
        unused = {parameter for parameter, setting in SETTINGS_OF_PARAMETERS.items() if setting in settings}
        unused -= {"run_name"}  # the setting is the same, see ``_require_one``
        unused |= _NOT_IN_TRIALS if self.trial else frozenset()
        recipe = recipe_spec(self.recipe)
        data = data_setting(recipe)
        unused |= {"corpus"} if recipe.is_fine_tuning else {"train"}
        named = {name: None if name in unused else getattr(self, name) for name in SETTINGS_OF_PARAMETERS}
        given = {SETTINGS_OF_PARAMETERS[name] for name, value in named.items() if value is not None} | settings.keys()
        deployed = {name: value for name, value in deployed.items() if name not in given}
        if data not in given | deployed.keys() and has_own_data(self.recipe, self._of_trial()):
            named |= {"train": list(recipe.pairs.train)} if recipe.is_fine_tuning else {"corpus": recipe.corpus.source}
        return self.model_copy(update=named | {"settings": settings or None, "deployed_settings": deployed or None})

    def spec(self) -> RunSpec:
        """Return the spec. Raises SpecError if the parameters are not valid, or contradict each other."""
        for parameter in ("root", "corpus", "publish_under"):
            if is_relative_path((value := getattr(self, parameter)) and str(value)):
                raise SpecError(
                    f"{parameter} is {str(value)!r}: give an absolute path, because a worker has another current folder"
                )
        for settings in (self.settings or {}, self.deployed_settings or {}):
            self._require_one("root", "storage.root", settings)
        self._require_one("run_name", "name", self.settings or {})
        used, changes = self.used(), self._changes()
        rank = changes.get("finetune.lora.rank")
        if self.trial and rank is not None and changes.get("model.start_from", "") is None:
            raise SpecError(
                f"finetune.lora.rank is {rank}, but a trial draws the weights of its tiny model, and adapters need one "
                "to start from. Run the trial without finetune.lora first, and then set model.start_from to the folder "
                "that it is published to"
            )
        spec = resolve(self.recipe, changes, root=self.root, run_name=used.run_name)
        if used.publish_under is None:
            return spec
        url = f"{used.publish_under.rstrip('/')}/{published_name(spec)}"
        return resolve(self.recipe, changes, root=self.root, run_name=used.run_name, publish_to=url)

    def _require_one(self, parameter: str, setting: str, settings: Mapping[str, Any]) -> None:
        """Raise SpecError if a setting and a parameter that takes precedence over it name different run folders."""
        if (value := getattr(self, parameter)) is None or setting not in settings:
            return
        spec = recipe_spec(self.recipe, {setting: settings[setting]})
        named = spec.name if setting == "name" else spec.storage.root.absolute()
        if named != value:
            raise SpecError(
                f"{setting} is {str(named)!r} in the settings, but the parameter {parameter} is {str(value)!r}: leave "
                "the setting out"
            )

    def _of_trial(self) -> dict[str, Any]:
        if not self.trial:
            return {}
        given = {*(self.settings or {}), *(self.deployed_settings or {})}
        return trial_settings(self.recipe, own_pairs=self.train is not None or "pairs.train" in given)

    def _changes(self) -> dict[str, Any]:
        """Return all changes to the recipe. Text is quoted, so that it is not read as JSON."""
        require_used(self.recipe, self.settings or {})
        used = self.used()
        named = {
            SETTINGS_OF_PARAMETERS[name]: value if isinstance(value, int | list) else json.dumps(str(value))
            for name in ("corpus", "train", "steps", "hostfile", "scratch")
            if (value := getattr(used, name)) is not None
        }
        return self._of_trial() | (used.deployed_settings or {}) | named | (used.settings or {})
