"""What ``deployments/prefect.yaml`` declares, as ``prefect deploy`` and ``prefect automation create`` read it."""

from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from importlib.resources import files
from typing import Any, Literal, Self

import yaml
from prefect import Flow
from prefect.events import AutomationCore
from prefect.utilities.importtools import import_object
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from t5train.errors import InputError
from t5train.spec.settings import explain

FILE = "prefect.yaml"
POOL = "t5-pretrain"


class Definition(BaseModel):
    """A part of the file. Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class WorkPool(Definition):
    """Where the runs of a deployment wait."""

    name: Literal["t5-pretrain"]
    work_queue_name: str


class Schedule(Definition):
    """When runs of a deployment start. It is off until somebody switches it on in the UI."""

    slug: str
    cron: str
    timezone: str
    active: Literal[False] = False
    parameters: dict[str, Any] = {}


class Deployment(Definition):
    """A deployment of a flow. Its name on the command line of ``prefect deployment run`` is ``full_name``."""

    name: str
    description: str
    entrypoint: str
    work_pool: WorkPool
    enforce_parameter_schema: Literal[True]
    parameters: dict[str, Any] = {}
    schedules: tuple[Schedule, ...] = ()

    @cached_property
    def flow(self) -> Flow[..., Any]:
        """The flow that is deployed."""
        flow: Flow[..., Any] = import_object(self.entrypoint)
        return flow

    @property
    def full_name(self) -> str:
        """The name in the form ``flow/name``."""
        return f"{self.flow.name}/{self.name}"


class Definitions(Definition):
    """The whole file."""

    definitions: dict[str, Any] = {}
    """What deployments refer to by YAML's anchors."""
    pull: list[dict[str, Any]]
    deployments: tuple[Deployment, ...]
    automations: tuple[AutomationCore, ...] = ()

    @model_validator(mode="after")
    def _require_distinct_names(self) -> Self:
        names = [f"automation {automation.name}" for automation in self.automations]
        for each in self.deployments:  # without ``full_name``, which imports the flow
            own = f"deployment {each.name} of {each.entrypoint}"
            names += [own, *(f"schedule {schedule.slug} of {own}" for schedule in each.schedules)]
        if twice := [name for name, count in Counter(names).items() if count > 1]:
            raise ValueError(f"more than one definition is called: {', '.join(twice)}")
        return self

    @classmethod
    def load(cls) -> Self:
        """Read the file of this package. Raises InputError if it does not declare what it must."""
        return cls.parse((files("deployments") / FILE).read_text("utf-8"), str(files("deployments") / FILE))

    @classmethod
    def parse(cls, text: str, file: str) -> Self:
        """Parse the content of a file. Raises InputError with everything that is wrong in it."""
        try:
            return cls.model_validate(yaml.safe_load(text))
        except yaml.YAMLError as error:
            raise InputError(f"{file} is not YAML: {error}. Correct the file") from error
        except ValidationError as error:
            raise InputError(f"{file}: {explain(error)}. Correct the file") from error

    @property
    def queues(self) -> list[str]:
        """The names of the queues in which runs wait."""
        return list(dict.fromkeys(each.work_pool.work_queue_name for each in self.deployments))

    def names(self) -> list[str]:
        """Return the names of everything that is defined, each with its kind."""
        return list(self._names())

    def _names(self) -> Iterator[str]:
        yield from (f"queue {queue}" for queue in self.queues)
        yield from (f"deployment {deployment.full_name}" for deployment in self.deployments)
        yield from (
            f"schedule {each.full_name} {schedule.slug}" for each in self.deployments for schedule in each.schedules
        )
        yield from (f"automation {automation.name}" for automation in self.automations)
