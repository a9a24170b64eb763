"""Settings of the processes that train, and of the hosts they run on."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, field_validator

from t5train.errors import SpecError
from t5train.spec.settings import SpecPart, change, check, explain
from t5train.spec.storage_spec import HomePath, StorageSpec

Accelerator = Literal["cpu", "cuda", "xpu", "npu", "mps", "hpu", "mlu", "sdaa", "supa", "klxpu"]


class DeadlinesSpec(SpecPart):
    """How long a rank may take for one phase before it counts as hung."""

    start_seconds: float = Field(
        600, gt=0, description="Imports and the rendezvous of all ranks, in seconds; on one machine, each of the two"
    )
    compile_seconds: float = Field(1800, gt=0, description="Compiling operators and the first step, in seconds")
    step_seconds: float = Field(60, gt=0, description="One step, in seconds; 10 median steps if that is longer")
    save_seconds: float = Field(1800, gt=0, description="Saving one checkpoint, in seconds")
    validate_seconds: float = Field(1800, gt=0, description="One validation, in seconds")
    predict_seconds: float = Field(
        1800, gt=0, description="Predicting for one validation (evaluate.best_metric), in seconds"
    )


class ClusterSpec(SpecPart):
    """The processes that train, and the hosts they run on."""

    ranks: int = Field(
        1,
        ge=1,
        le=16384,
        description="Processes that train, one per accelerator; with a hostfile, its slots",
    )
    accelerator: Accelerator | None = Field(
        None,
        description="Kind of accelerator; cpu to train on CPUs. null: the kind that torch finds",
    )
    master_port: int | None = Field(None, ge=1024, le=65535, description="Port of the rendezvous. null: a free one")
    retries: int = Field(2, ge=0, le=100, description="How often training is retried after a transient failure")
    hostfile: HomePath | None = Field(
        None,
        description="File of the hosts to train on, with lines 'name slots=N'. null: only this machine",
    )
    include: str | None = Field(
        None, min_length=1, description="Hosts and slots of the hostfile to use, such as node1@node2:0,2. null: all"
    )
    exclude: str | None = Field(
        None, min_length=1, description="Hosts and slots of the hostfile not to use, written like include. null: none"
    )
    num_nodes: int | None = Field(None, ge=1, description="Use only the first N hosts of the hostfile. null: all")
    spares: int = Field(
        0,
        ge=0,
        le=1024,
        description="How many of the last hosts wait in reserve, to replace hosts that are down or fail twice",
    )
    launcher: Literal["pdsh", "slurm", "openmpi"] = Field(
        "pdsh", description="How DeepSpeed starts processes on the hosts"
    )
    ship_code: bool = Field(False, description="Send this project's code to the hosts")
    ssh_user: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}$",
        description="User on the hosts. null: from ssh's configuration",
    )
    ssh_port: int | None = Field(
        None, ge=1, le=65535, description="Port of ssh on every host. null: from ssh's configuration"
    )
    known_hosts: HomePath | None = Field(
        None, description="File with the only host keys to accept. null: ssh's known hosts"
    )
    master_address: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,252}$",
        description="Address of the first host for the rendezvous. null: found automatically",
    )
    environment: tuple[str, ...] = Field((), description="Names of additional variables to pass to ranks")
    lease_seconds: float = Field(
        60,
        ge=5,
        description="How long ranks keep training without contact with the head, in seconds",
    )
    grace_seconds: float = Field(
        30,
        ge=0,
        le=3600,
        description="Time for ranks to begin to save when they are asked to stop, in seconds",
    )
    deadlines: DeadlinesSpec = DeadlinesSpec()

    @field_validator("environment")
    @classmethod
    def _variables_have_names(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if wrong := [name for name in names if not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name)]:
            raise ValueError(
                f"cluster.environment holds {wrong[0]!r}: give names of variables only. Their values are read "
                "from the head's environment"
            )
        return names

    @check
    def _hosts_are_chosen_in_one_way(self) -> None:
        chosen = [name for name in ("include", "exclude", "num_nodes") if getattr(self, name) is not None]
        if chosen and self.hostfile is None:
            raise ValueError(
                f"cluster.{chosen[0]} selects hosts of a hostfile, but cluster.hostfile is not set: give "
                f"--hostfile, or leave cluster.{chosen[0]} out"
            )
        if self.spares and self.hostfile is None:
            raise ValueError(
                f"cluster.spares is {self.spares}, but cluster.hostfile is not set: give --hostfile, or leave "
                "cluster.spares out"
            )
        if len(chosen) > 1:
            raise ValueError(f"cluster.{chosen[0]} and cluster.{chosen[1]} cannot be combined: set only one of them")

    def require_hosts_for_code(self, *others: Path | None) -> None:
        """Raise ValueError if code is to be sent to hosts, but neither the hostfile nor one of ``others`` is set."""
        if self.ship_code and not any((self.hostfile, *others)):
            raise ValueError(
                "cluster.ship_code is true, but cluster.hostfile is not set: give --hostfile, or leave "
                "cluster.ship_code out"
            )


class MachinesSpec(SpecPart):
    """Where files are stored, and how hosts are reached."""

    storage: StorageSpec = StorageSpec()
    cluster: ClusterSpec = ClusterSpec()

    @check
    def _code_is_sent_to_hosts(self) -> None:
        self.cluster.require_hosts_for_code()

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Self:
        """Return the defaults with ``{"part.key": value}`` changed. Raises SpecError if a setting is not valid."""
        values = cls().model_dump(mode="json")
        change(cls, values, settings)
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise SpecError(explain(error, cls)) from None
