"""What all parts of a RunSpec have in common.

A setting is either *identity* (it decides what comes out, and is in the fingerprint) or *execution* (where and
how; it is not). Execution settings are named in ``execution`` of the part they belong to.
"""

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict


class SpecPart(BaseModel):
    """One part of a RunSpec: immutable, and closed to names it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    execution: ClassVar[frozenset[str]] = frozenset()

    def identity(self) -> dict[str, Any]:
        """The settings that are in the fingerprint, as plain JSON values."""
        return {name: value for name, value in self.model_dump(mode="json").items() if name not in self.execution}
