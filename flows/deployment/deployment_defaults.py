"""What all deployments train on, where, and what becomes of it: configured once, and kept on the Prefect server."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict

from flows.deployment.definitions import Definitions, Deployment
from flows.run_parameters import LOCATIONS, SETTINGS_OF_PARAMETERS, RunParameters
from infra.head.preflight.run_checks import require_possible
from t5train.data.corpus import of_part
from t5train.data.sources import PYDOCS, require_source
from t5train.errors import SpecError, T5TrainError
from t5train.records.locations import without_secret
from t5train.spec.recipes import recipe

FLOW, FINE_TUNING = "t5-pretrain", "t5-finetune"
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

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """Return the defaults that were given (``changed``), with parameters in place of settings that they stand for.

        A run can replace the parameter, and its page then no longer shows the setting. Raises SpecError if there is a
        secret.
        """
        settings = dict(given.get("deployed_settings") or {})
        as_parameters = {name: settings.pop(each) for name, each in _AS_PARAMETERS.items() if each in settings}
        cls.model_validate(given).require_no_secrets()  # whose errors name the settings
        return cls.model_validate(as_parameters | dict(given) | {"deployed_settings": settings or None})

    def parameters(self) -> dict[str, Any]:
        """Return the parameters that are set, as JSON values."""
        return self.model_dump(mode="json", exclude_none=True)

    def of_deployment(self, deployment: Deployment) -> dict[str, Any]:
        """Return the parameters of a deployment: those of these that its flow takes, and its own."""
        taken = deployment.flow.parameters.properties
        return {name: value for name, value in self.parameters().items() if name in taken} | deployment.parameters

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

        Raises InputError if there is no text, and otherwise an error if all that pre-train would be refused.
        """
        if self.corpus is not None and self.corpus != PYDOCS:
            chosen = recipe("smoke", self._corpus_settings()).corpus
            for part, text in enumerate(chosen.texts()):
                if text.source != PYDOCS:
                    with of_part(part, text):
                        require_source(text.source, text.revision, None, text.hub_text)
        found: dict[str, T5TrainError] = {}
        for deployment in definitions.deployments:
            if deployment.flow.name not in {FLOW, FINE_TUNING}:
                continue
            try:
                require_possible(RunParameters(**self.of_deployment(deployment)).spec())
            except T5TrainError as error:
                found[deployment.full_name] = error
        pretraining = {each.full_name for each in definitions.deployments if each.flow.name == FLOW}
        if pretraining and pretraining <= found.keys():
            raise next(error for name, error in found.items() if name in pretraining)
        return {name: str(error) for name, error in found.items()}

    def _corpus_settings(self) -> dict[str, Any]:
        """Return what chooses the text: it is the same whatever the recipe."""
        deployed = {name: value for name, value in (self.deployed_settings or {}).items() if name.startswith("corpus.")}
        return deployed | {"corpus.source": self.corpus}


def changed(earlier: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what was given earlier, changed by what is given now. An empty value removes the earlier, None keeps it.

    Settings replace all earlier ones. Raises SpecError if two of those given now contradict each other.
    """
    given = {name: value for name, value in given.items() if value is not None}
    kept = {name: value for name, value in earlier.items() if name not in given}
    settings, kept_settings = given.get("deployed_settings") or {}, kept.pop("deployed_settings", None) or {}
    for parameter, setting in _AS_PARAMETERS.items():
        if parameter in given and settings.get(setting) not in (None, given[parameter]):
            raise SpecError(
                f"--{parameter} is {given[parameter]}, but --set {setting} is {settings[setting]}: give only one"
            )
        if parameter in given:
            kept_settings = {name: value for name, value in kept_settings.items() if name != setting}
        elif setting in settings:
            kept.pop(parameter, None)
    made = {"deployed_settings": kept_settings} | kept | given
    return {name: value for name, value in made.items() if value not in ("", {})}
