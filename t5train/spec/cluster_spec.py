"""Settings of a run's folders, of the processes that train, and of the hosts they run on."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, ValidationError, ValidationInfo, field_validator

from t5train.errors import SpecError
from t5train.locations import at_home, without_secret
from t5train.spec.overrides import SpecPart, change, check, explain

HomePath = Annotated[Path, AfterValidator(at_home)]


class StorageSpec(SpecPart):
    """Where files are stored, and how often state is saved."""

    execution = frozenset(
        {
            "root",
            "scratch",
            "node_local",
            "publish_to",
            "publish_checkpoints_under",
            "checkpoint_every_steps",
            "keep_last",
            "keep_every_steps",
            "checkpoint_gigabytes",
            "validate_every_steps",
            "validate_sequences",
        }
    )

    root: HomePath = Field(Path("work"), title="Root", description="Folder that holds everything a run makes")
    scratch: Path | None = Field(
        None,
        title="Scratch",
        description="Folder on each host's own disk, for hosts that do not share the root. null: in /var/tmp",
    )
    node_local: bool = Field(
        False,
        title="Node-local",
        description="Train in storage.scratch on each host's own disk even if hosts share the root",
    )
    publish_to: str | None = Field(
        None, title="Publish to", description="Folder or fsspec URL to publish to. null: {root}/published/{name}"
    )
    publish_checkpoints_under: str | None = Field(
        None,
        title="Publish checkpoints under",
        description="Folder in S3 under which the run stores its complete checkpoints while it trains. null: none",
    )
    checkpoint_every_steps: int = Field(
        1000,
        ge=1,
        title="Checkpoint every",
        description="Save a checkpoint every so many optimizer steps, and at the last one",
    )
    keep_last: int = Field(2, ge=1, title="Keep", description="How many of the newest complete checkpoints to keep")
    keep_every_steps: int | None = Field(
        None,
        ge=1,
        title="Keep every",
        description="Also keep checkpoints whose step is a multiple of this number. null: none",
    )
    checkpoint_gigabytes: float | None = Field(
        None,
        gt=0,
        title="Checkpoint gigabytes",
        description="Disk space in GB for the run's checkpoints on each disk; the oldest are removed, never the "
        "newest. null: no limit",
    )
    validate_every_steps: int = Field(
        500, ge=1, title="Validate every", description="Validate every so many optimizer steps, and at the last one"
    )
    validate_sequences: int = Field(
        512,
        ge=1,
        title="Validation",
        description="Sequences per validation, at most; they are drawn from the whole split",
    )

    @property
    def checkpoint_bytes(self) -> int | None:
        """``checkpoint_gigabytes`` in bytes."""
        return None if self.checkpoint_gigabytes is None else int(self.checkpoint_gigabytes * 1e9)

    @field_validator("root", "scratch")
    @classmethod
    def _root_is_no_pattern(cls, folder: Path | None, info: ValidationInfo) -> Path | None:
        if found := set("*?[") & set(str(folder or "")):
            raise ValueError(
                f"storage.{info.field_name} is {str(folder)!r}: DeepSpeed would read {' '.join(sorted(found))} in it "
                "as a glob pattern and find no checkpoint to resume from; choose a folder without these characters"
            )
        return folder

    @field_validator("scratch")
    @classmethod
    def _scratch_is_the_same_place_everywhere(cls, folder: Path | None) -> Path | None:
        if folder is not None and not folder.is_absolute():
            raise ValueError(
                f"storage.scratch is {str(folder)!r}: a relative path can differ between hosts; give an absolute one"
            )
        return folder

    @check
    def _scratch_is_not_the_root(self) -> None:
        if self.node_local and self.scratch is not None and self.scratch == self.root.absolute():
            raise ValueError(
                f"storage.scratch is {str(self.scratch)!r}, which is the root, but hosts remove from scratch what a "
                "run no longer needs; choose another folder, or set storage.node_local=false"
            )

    @field_validator("publish_to", "publish_checkpoints_under")
    @classmethod
    def _destination_holds_no_secret(cls, url: str | None, info: ValidationInfo) -> str | None:
        return url if url is None else without_secret(f"storage.{info.field_name}", url)

    @field_validator("publish_checkpoints_under")
    @classmethod
    def _checkpoints_are_in_s3(cls, url: str | None) -> str | None:
        if url is not None and not url.startswith("s3://"):
            raise ValueError(
                f"storage.publish_checkpoints_under is {url!r}: give s3://BUCKET/FOLDER, because other stores have no "
                "write that keeps two heads from changing the same checkpoints"
            )
        return url


Accelerator = Literal["cpu", "cuda", "xpu", "npu", "mps", "hpu", "mlu", "sdaa", "supa", "klxpu"]


class DeadlinesSpec(SpecPart):
    """How long a rank may take for one phase before it counts as hung."""

    execution = frozenset({"start_seconds", "compile_seconds", "step_seconds", "save_seconds", "validate_seconds"})

    start_seconds: float = Field(
        600, gt=0, title="Start", description="Until all ranks have joined the rendezvous, in seconds"
    )
    compile_seconds: float = Field(
        1800, gt=0, title="Compile", description="Compiling operators and the first step, in seconds"
    )
    step_seconds: float = Field(
        60, gt=0, title="Step", description="One step, in seconds; 10 median steps if that is longer"
    )
    save_seconds: float = Field(1800, gt=0, title="Save", description="Saving one checkpoint, in seconds")
    validate_seconds: float = Field(1800, gt=0, title="Validate", description="One validation, in seconds")


class ClusterSpec(SpecPart):
    """The processes that train, and the hosts they run on."""

    execution = frozenset(
        {
            *("ranks", "accelerator", "master_port", "retries", "hostfile", "include", "exclude", "num_nodes"),
            *("spares", "ship_code"),
            *("launcher", "ssh_user", "ssh_port", "known_hosts", "master_address", "environment"),
            *("lease_seconds", "grace_seconds", "deadlines"),
        }
    )

    ranks: int = Field(
        1,
        ge=1,
        le=16384,
        title="Ranks",
        description="Processes that train, one per accelerator; with a hostfile, its slots",
    )
    accelerator: Accelerator | None = Field(
        None,
        title="Accelerator",
        description="Kind of accelerator; cpu to train on CPUs. null: the kind that torch finds",
    )
    master_port: int | None = Field(
        None, ge=1024, le=65535, title="Port", description="Port of the rendezvous. null: a free one"
    )
    retries: int = Field(
        2, ge=0, le=100, title="Retries", description="How often training is retried after a transient failure"
    )
    hostfile: HomePath | None = Field(
        None,
        title="Hostfile",
        description="File of the hosts to train on, with lines 'name slots=N'. null: only this machine",
    )
    include: str | None = Field(
        None,
        min_length=1,
        title="Include",
        description="Hosts and slots of the hostfile to use, such as node1@node2:0,2. null: all",
    )
    exclude: str | None = Field(
        None,
        min_length=1,
        title="Exclude",
        description="Hosts and slots of the hostfile not to use, written like include. null: none",
    )
    num_nodes: int | None = Field(
        None, ge=1, title="Nodes", description="Use only the first N hosts of the hostfile. null: all"
    )
    spares: int = Field(
        0,
        ge=0,
        le=1024,
        title="Spares",
        description="How many of the last hosts wait in reserve, to replace hosts that are down or fail twice",
    )
    launcher: Literal["pdsh", "slurm", "openmpi"] = Field(
        "pdsh", title="Launcher", description="How DeepSpeed starts processes on the hosts"
    )
    ship_code: bool = Field(
        False,
        title="Ship code",
        description="Send this project's code to the hosts",
    )
    ssh_user: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}$",
        title="ssh user",
        description="User on the hosts. null: from ssh's configuration",
    )
    ssh_port: int | None = Field(
        None, ge=1, le=65535, title="ssh port", description="Port of ssh on every host. null: from ssh's configuration"
    )
    known_hosts: HomePath | None = Field(
        None, title="Known hosts", description="File with the only host keys to accept. null: ssh's known hosts"
    )
    master_address: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,252}$",
        title="Master address",
        description="Address of the first host for the rendezvous. null: found automatically",
    )
    environment: tuple[str, ...] = Field(
        (),
        title="Environment",
        description="Names of additional variables to pass to ranks",
    )
    lease_seconds: float = Field(
        60,
        ge=5,
        title="Lease",
        description="How long ranks keep training without contact with the head, in seconds",
    )
    grace_seconds: float = Field(
        30,
        ge=0,
        le=3600,
        title="Grace",
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
        if self.ship_code and self.hostfile is None:
            raise ValueError(
                "cluster.ship_code is true, but cluster.hostfile is not set: give --hostfile, or leave "
                "cluster.ship_code out"
            )
        if len(chosen) > 1:
            raise ValueError(f"cluster.{chosen[0]} and cluster.{chosen[1]} cannot be combined: set only one of them")


class MachinesSpec(SpecPart):
    """Where files are stored, and how hosts are reached."""

    storage: StorageSpec = StorageSpec()
    cluster: ClusterSpec = ClusterSpec()

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Self:
        """Return the defaults with ``{"part.key": value}`` changed. Raises SpecError if a setting is not valid."""
        values = cls().model_dump(mode="json")
        change(cls, values, settings)
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise SpecError(explain(error, cls)) from None
