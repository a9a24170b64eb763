"""What ``deployments/definitions.yaml`` declares: queues, deployments with their schedules, and automations."""

from collections.abc import Iterator
from importlib.resources import files
from typing import Any, Self

import yaml
from prefect.events import AutomationCore
from pydantic import BaseModel, ConfigDict, Field, model_validator

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
        """Read the file of this package."""
        return cls.model_validate(yaml.safe_load((files("deployments") / FILE).read_text("utf-8")))

    @model_validator(mode="after")
    def _names_exist(self) -> Self:
        queues = {queue.name for queue in self.queues}
        for deployment in self.deployments:
            if deployment.flow not in self.flows or deployment.queue not in queues:
                raise ValueError(f"{deployment.full_name}: flow or queue {deployment.queue!r} is not defined")
        if len(self.names()) != len(set(self.names())):
            raise ValueError("two definitions have the same name")
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
