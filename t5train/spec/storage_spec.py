"""Settings of a run's folders: where files are stored, which checkpoints are kept, and when they are saved."""

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field, ValidationInfo, field_validator

from t5train.records.locations import at_home, without_secret
from t5train.spec.settings import SpecPart, check

HomePath = Annotated[Path, AfterValidator(at_home)]
VALIDATIONS = ("validate_every_steps", "validate_sequences")
"""The settings of ``storage`` that decide which steps are validated, and on what."""


class StorageSpec(SpecPart):
    """Where files are stored, and how often state is saved."""

    root: HomePath = Field(Path("work"), description="Folder that holds everything a run makes")
    scratch: Path | None = Field(
        None,
        description="Folder on each host's own disk, for hosts that do not share the root. null: in /var/tmp",
    )
    node_local: bool = Field(
        False,
        description="Train in storage.scratch on each host's own disk even if hosts share the root",
    )
    publish_to: str | None = Field(
        None, description="Folder or fsspec URL to publish to. null: {root}/published/{name}"
    )
    publish_checkpoints_under: str | None = Field(
        None,
        description="Folder in S3 under which the run stores its complete checkpoints while it trains. null: none",
    )
    checkpoint_every_steps: int = Field(
        1000, ge=1, description="Save a checkpoint every so many optimizer steps, and at the last one"
    )
    keep_last: int = Field(2, ge=1, description="How many of the newest complete checkpoints to keep")
    keep_every_steps: int | None = Field(
        None, ge=1, description="Also keep checkpoints whose step is a multiple of this number. null: none"
    )
    checkpoint_gigabytes: float | None = Field(
        None,
        gt=0,
        description="Disk space in GB for the run's checkpoints on each disk; the oldest are removed, never the "
        "newest. null: no limit",
    )
    validate_every_steps: int = Field(
        500, ge=1, description="Validate every so many optimizer steps, and at the last one"
    )
    validate_sequences: int = Field(
        512, ge=1, description="Sequences per validation, at most; they are drawn from the whole split"
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
