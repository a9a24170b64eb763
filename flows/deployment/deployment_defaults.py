"""What all deployments train on, where, and what becomes of it: configured once, and kept on the Prefect server."""

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from flows.deployment.definitions import Definitions
from flows.run_parameters import LOCATIONS, SETTINGS_OF_PARAMETERS, RunParameters
from infra.head.preflight.run_checks import require_possible
from t5train.data.corpus import of_part
from t5train.data.sources import PYDOCS, require_source
from t5train.errors import SpecError, T5TrainError
from t5train.locations import without_secret
from t5train.spec.recipes import recipe

FLOW = "t5-pretrain"
_AS_PARAMETERS = {name: SETTINGS_OF_PARAMETERS[name] for name in ("corpus", "hostfile", "scratch")}


class DeploymentDefaults(BaseModel):
    """Parameters of all deployments that train. The fields are parameters of the flow; see ``flows.run_parameters``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    root: Path
    corpus: str | None = None
    hostfile: Path | None = None
    scratch: Path | None = None
    publish_under: str | None = None
    deployed_settings: dict[str, Any] | None = None

    def parameters(self) -> dict[str, Any]:
        """Return the parameters that are set, as JSON values."""
        return self.model_dump(mode="json", exclude_none=True)

    def require_no_secrets(self) -> None:
        """Raise SpecError if a URL has a password, a key or a query: the server would store and display it."""
        of_settings = {name: (self.deployed_settings or {}).get(name) for name in LOCATIONS}
        for name, given in {"--corpus": self.corpus, "--publish-to": self.publish_under, **of_settings}.items():
            try:
                for url in given if isinstance(given, list) else [given]:
                    without_secret(name, str(url or ""))
            except ValueError as error:
                raise SpecError(str(error)) from None

    def refused(self, definitions: Definitions) -> dict[str, str]:
        """Return why a run would be refused, by the names of deployments. Hosts and accelerators are not checked here.

        Raises InputError if there is no text, and otherwise an error if every deployment that trains would be refused.
        """
        if self.corpus is not None and self.corpus != PYDOCS:
            chosen = recipe("smoke", self._corpus_settings()).corpus
            for part, text in enumerate(chosen.texts()):
                if text.source != PYDOCS:
                    with of_part(part, text):
                        require_source(text.source, text.revision, None, text.hub_text)
        found: dict[str, T5TrainError] = {}
        of_flow = [each for each in definitions.deployments if each.flow == FLOW]
        for deployment in of_flow:
            try:
                require_possible(RunParameters(**self.parameters() | deployment.parameters).spec())
            except T5TrainError as error:
                found[deployment.full_name] = error
        if of_flow and len(found) == len(of_flow):
            raise next(iter(found.values()))
        return {name: str(error) for name, error in found.items()}

    def _corpus_settings(self) -> dict[str, Any]:
        """Return what chooses the text: it is the same whatever the recipe."""
        deployed = {name: value for name, value in (self.deployed_settings or {}).items() if name.startswith("corpus.")}
        return deployed | {"corpus.source": self.corpus}


def changed(
    earlier: Mapping[str, Any], given: Mapping[str, Any], earlier_of_settings: Collection[str] = ()
) -> DeploymentDefaults:
    """Return the earlier defaults with those given now. An empty value removes the earlier one; None keeps it.

    Settings replace all earlier ones, also those that have become parameters, which ``earlier_of_settings`` names.
    Raises SpecError if one of them holds a secret, or if two of those given now contradict each other.
    """
    given = {name: value for name, value in given.items() if value is not None}
    if "deployed_settings" in given:
        replaced = {"deployed_settings", *earlier_of_settings}
        earlier = {name: value for name, value in earlier.items() if name not in replaced}
    _defaults({**earlier, **given}).require_no_secrets()
    for parameter, setting in _AS_PARAMETERS.items():
        named, value = given.get(parameter), (given.get("deployed_settings") or {}).get(setting)
        if named is not None and value not in (None, named):
            raise SpecError(f"--{parameter} is {named}, but --set {setting} is {value}: give only one")
    return _defaults(_with_parameters(earlier) | _with_parameters(given))


def of_settings(names: Iterable[str], earlier: Mapping[str, Any], given: Mapping[str, Any]) -> list[str]:
    """Return which parameters of the changed defaults come from settings; ``names`` are those of the earlier ones."""
    if (settings := given.get("deployed_settings")) is not None:
        names = [name for name, each in _AS_PARAMETERS.items() if each in settings]
    else:
        kept = earlier.get("deployed_settings") or {}
        names = [*names, *(name for name, each in _AS_PARAMETERS.items() if each in kept and name not in earlier)]
    return [name for name in names if given.get(name) is None]


def _defaults(values: Mapping[str, Any]) -> DeploymentDefaults:
    return DeploymentDefaults.model_validate({name: value for name, value in values.items() if value not in ("", {})})


def _with_parameters(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values with parameters in place of the settings that they stand for.

    A run can replace the parameter, and its page then no longer shows the setting.
    """
    settings = dict(values.get("deployed_settings") or {})
    of_settings = {name: settings.pop(each) for name, each in _AS_PARAMETERS.items() if each in settings}
    return of_settings | dict(values) | ({"deployed_settings": settings} if of_settings else {})
