"""What ``deployments/definitions.yaml`` declares: queues, deployments with their schedules, and automations."""

from collections import Counter
from collections.abc import Iterator
from importlib.resources import files
from typing import Any, Self

import yaml
from prefect.events import AutomationCore
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from t5train.errors import InputError
from t5train.spec.settings import explain

FILE = "definitions.yaml"


class Definition(BaseModel):
    """A part of the file. Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Queue(Definition):
    """A queue of the pool."""

    name: str
    description: str
    runs_at_a_time: int = Field(ge=1)


class Schedule(Definition):
    """When runs of a deployment start. It is off until somebody switches it on in the UI."""

    slug: str
    cron: str
    timezone: str
    parameters: dict[str, Any] = {}


class Deployment(Definition):
    """A deployment of a flow. Its name on the command line of ``prefect deployment run`` is ``full_name``."""

    flow: str
    name: str
    queue: str
    description: str
    parameters: dict[str, Any] = {}
    schedules: tuple[Schedule, ...] = ()

    @property
    def full_name(self) -> str:
        """The name in the form ``flow/name``."""
        return f"{self.flow}/{self.name}"


class Definitions(Definition):
    """The whole file."""

    flows: dict[str, str]
    """Module and function of each flow, by its name."""
    queues: tuple[Queue, ...]
    deployments: tuple[Deployment, ...]
    automations: tuple[AutomationCore, ...] = ()

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

    @model_validator(mode="after")
    def _names_exist(self) -> Self:
        queues = {queue.name for queue in self.queues}
        for deployment in self.deployments:
            if deployment.flow not in self.flows:
                raise ValueError(
                    f"the deployment {deployment.full_name} is of the flow {deployment.flow!r}, but flows "
                    f"has only {', '.join(self.flows)}"
                )
            if deployment.queue not in queues:
                raise ValueError(
                    f"the deployment {deployment.full_name} is in the queue {deployment.queue!r}, but "
                    f"queues has only {', '.join(sorted(queues))}"
                )
        if twice := [name for name, count in Counter(self.names()).items() if count > 1]:
            raise ValueError(f"more than one definition is called: {', '.join(twice)}")
        return self

    def names(self) -> list[str]:
        """Return the names of everything that is defined, each with its kind."""
        return list(self._names())

    def _names(self) -> Iterator[str]:
        yield from (f"queue {queue.name}" for queue in self.queues)
        yield from (f"deployment {deployment.full_name}" for deployment in self.deployments)
        yield from (
            f"schedule {each.full_name} {schedule.slug}" for each in self.deployments for schedule in each.schedules
        )
        yield from (f"automation {automation.name}" for automation in self.automations)
